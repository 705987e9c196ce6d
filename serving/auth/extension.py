"""API keys for callers: checks the key, its role and its rate. Without keys, admits this machine only, or everybody if so configured."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from prometheus_client import Counter, Gauge
from pydantic import Field

from serving.auth.keys import Key, KeyFile, KeyRing, read_keys
from serving.extension import Extension, Hooks
from serving.http.callers import LoopbackOnly
from serving.http.responses import Refusal
from serving.http.routes import Access, Headers
from serving.metrics.service_metrics import ServiceMetrics
from serving.settings import OptionalPath, Settings, SettingsSection
from serving.worker import ModelWorker

REFUSALS = ("missing", "unknown", "role", "rate")
HOW = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
_HOSTS = r"^([A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*)?$"
_CHALLENGE = ("www-authenticate", "Bearer")
_INVALID = ("www-authenticate", 'Bearer error="invalid_token"')


class AuthSettings(SettingsSection):
    """Callers that the service admits, and the names it answers to."""

    keys: OptionalPath = None  # file with the digests of keys; unset or empty: no key is needed
    allow_anyone: bool = False  # let other machines connect without keys
    hosts: Annotated[str, Field(pattern=_HOSTS)] = (
        ""  # host names it is called by without keys, separated by commas, besides localhost
    )

    def host_names(self) -> frozenset[str]:
        """The names in `hosts`, in lower case."""
        return frozenset(name for name in self.hosts.lower().split(",") if name)


class AuthMetrics:
    """Counts refused keys, and shows whether the key file is usable."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        refused = Counter(
            "slipway_refused_keys",
            "Requests refused for their key, by why.",
            ["reason"],
            registry=registry,
        )
        faults = Counter(
            "slipway_key_file_faults",
            "Times that the file of keys was found wrong.",
            registry=registry,
        )
        self.refused = {reason: metrics.count(refused.labels(reason)) for reason in REFUSALS}
        self.faults = metrics.count(faults)
        self.file_is_wrong = Gauge(
            "slipway_key_file_wrong",
            "1 while the file of keys cannot be used as it is, else 0.",
            multiprocess_mode="livemax",
            registry=registry,
        )

    def file_fault(self) -> None:
        """Count a change of the key file that cannot be used."""
        self.faults.total += 1


class KeyCheck:
    """Admits callers that present a key of the file. One per worker."""

    allows_remote = True
    errors: tuple[str, ...] = ("key_missing", "key_unknown", "not_allowed", "rate_limited")
    security: Mapping[str, Any] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": "Authorization: Bearer KEY",
        },
        "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }

    def __init__(self, keys: KeyRing, metrics: AuthMetrics) -> None:
        self._keys = keys
        self._refused = metrics.refused

    def admit(self, headers: Headers, access: Access) -> str | None:
        """The name of the caller's key, or None if the route is open. Raises Refusal."""
        if access == "open":
            return None
        presented = presented_key(headers)
        if presented is None:
            self._refused["missing"].total += 1
            raise Refusal("key_missing", f"this needs a key: {HOW}", headers=(_CHALLENGE,))
        key = self._keys.find(presented)
        if key is None:
            self._refused["unknown"].total += 1
            raise Refusal(
                "key_unknown",
                "the service does not know this key, or no longer",
                headers=(_INVALID,),
            )
        self._require_role(key, access)
        seconds = self._keys.take(key)
        if seconds:
            self._refused["rate"].total += 1
            message = f"the key of {key.name} may ask {key.rate:g} times a second, over all workers; try again later"
            raise Refusal(
                "rate_limited", message, headers=(("retry-after", str(max(1, math.ceil(seconds)))),)
            )
        return key.name

    def _require_role(self, key: Key, access: Access) -> None:
        if access == "operator" and key.role != "operator":
            self._refused["role"].total += 1
            raise Refusal(
                "not_allowed",
                f"this is for operators; the key of {key.name} has the role {key.role}",
            )


class AdmitAnyone:
    """Admits every caller from anywhere: the operator has disabled authentication."""

    allows_remote = True
    errors: tuple[str, ...] = ()
    security: Mapping[str, Any] = {}

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Refuse nobody."""
        return None


def presented_key(headers: Headers) -> bytes | None:
    """The key that a request carries; None if there is none."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and credentials.strip():
        return credentials.strip()
    return headers.get(b"x-api-key") or None


def _attach(worker: ModelWorker) -> Hooks:
    settings, metrics = worker.settings.section(AuthSettings), AuthMetrics(worker.metrics)
    if settings.keys:
        ring = KeyRing(settings.keys, worker.settings.workers, metrics.file_fault)
        return Hooks(
            caller_check=KeyCheck(ring, metrics),
            gauges=(KeyFile(settings.keys, metrics.file_is_wrong.set),),
        )
    if settings.allow_anyone:
        return Hooks(caller_check=AdmitAnyone())
    return Hooks(caller_check=LoopbackOnly(settings.host_names()))


def _allows_remote(settings: Settings) -> bool:
    """Raises KeysError if the key file cannot be used."""
    section = settings.section(AuthSettings)
    if section.keys:
        read_keys(section.keys)
    return section.keys is not None or section.allow_anyone


EXTENSION = Extension("auth", _attach, AuthSettings, allows_remote=_allows_remote)
