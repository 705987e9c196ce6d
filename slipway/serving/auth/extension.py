"""Adds authentication to the service: checks a request's key, the key's role and its rate.

Without keys, it admits only this machine, or everybody if SLIPWAY_DISABLE_AUTH is set.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from prometheus_client import Counter, Gauge
from pydantic import Field

from slipway.serving.auth.keys import KeyFile, KeyRing, read_keys
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.callers import LoopbackOnly
from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Access, Headers
from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.settings import OptionalPath, Settings, SettingsSection
from slipway.serving.worker import ModelWorker

REFUSALS = ("missing", "unknown", "role", "rate")
HOW = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
_HOSTS = r"^([A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*)?$"
_CHALLENGE = ("www-authenticate", "Bearer")
_INVALID = ("www-authenticate", 'Bearer error="invalid_token"')


class AuthSettings(SettingsSection):
    """Settings of authentication: key file, allowed host names, and the switch that disables it."""

    keys: OptionalPath = None  # file with the digests of keys; unset or empty: no key is needed
    disable_auth: bool = False  # let other machines connect without keys
    # Host names besides localhost that requests without keys may use, separated by commas.
    allowed_hosts: Annotated[str, Field(pattern=_HOSTS)] = ""

    def host_names(self) -> frozenset[str]:
        """Return the names in `allowed_hosts`, in lower case."""
        return frozenset(name for name in self.allowed_hosts.lower().split(",") if name)


class AuthMetrics:
    """Metrics of failed authentication and of an invalid key file."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        refused = Counter(
            "slipway_auth_failures_total",
            "Requests refused for their key, by reason.",
            ["reason"],
            registry=registry,
        )
        faults = Counter(
            "slipway_key_file_faults_total",
            "Times that the key file was found invalid.",
            registry=registry,
        )
        self.refused = {reason: metrics.count(refused.labels(reason)) for reason in REFUSALS}
        self.faults = metrics.count(faults)
        self.file_is_invalid = Gauge(
            "slipway_key_file_invalid",
            "1 while the key file is invalid, else 0.",
            multiprocess_mode="livemax",
            registry=registry,
        )

    def file_fault(self) -> None:
        """Count a change that made the key file unreadable or invalid."""
        self.faults.total += 1


class KeyCheck:
    """Admits callers that present a key in the key file, one instance for each worker."""

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
        """Return the name of the caller's key, or None if the route needs no key.

        Raises Refusal if the key is missing or unknown, lacks the required role, or exceeds its
        request rate.
        """
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
                "this key is unknown, or was removed from the key file",
                headers=(_INVALID,),
            )
        if access == "operator" and key.role != "operator":
            self._refused["role"].total += 1
            raise Refusal(
                "not_allowed",
                f"this path requires the role operator; the key of {key.name} has {key.role}",
            )
        seconds = self._keys.take(key)
        if seconds:
            self._refused["rate"].total += 1
            retry_after = ("retry-after", str(max(1, math.ceil(seconds))))
            message = (
                f"the key of {key.name} may send {key.rate:g} requests a second, over all workers; "
                "try again later"
            )
            raise Refusal("rate_limited", message, headers=(retry_after,))
        return key.name


class AdmitAnyone:
    """Admits every caller from anywhere: the operator has disabled authentication."""

    allows_remote = True
    errors: tuple[str, ...] = ()
    security: Mapping[str, Any] = {}

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Return None: every caller is admitted, and no key is read."""
        return None


def presented_key(headers: Headers) -> bytes | None:
    """Return the key in the headers of a request, or None."""
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
            gauges=(KeyFile(settings.keys, metrics.file_is_invalid.set),),
        )
    if settings.disable_auth:
        return Hooks(caller_check=AdmitAnyone())
    return Hooks(caller_check=LoopbackOnly(settings.host_names()))


def _allows_remote(settings: Settings) -> bool:
    """Return True if other machines may connect. Raises KeysError if the key file is unusable."""
    section = settings.section(AuthSettings)
    if section.keys:
        read_keys(section.keys)
    return section.keys is not None or section.disable_auth


EXTENSION = Extension("auth", _attach, AuthSettings, allows_remote=_allows_remote)
