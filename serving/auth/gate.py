"""Who may pass to a route: by key where there are keys, else whoever is on this machine, but no page of another site.

Without keys the service listens on loopback, where a browser is, too. A page of another site must not ask through it, so two headers
are looked at that no page can forge: `Host`, which stays the page's own name when it points that name at 127.0.0.1 (DNS rebinding),
and `Origin`, which a browser adds to what a page sends elsewhere. With keys neither matters: no page has one unless its user typed it.
"""

import functools
import ipaddress
import math

from serving.auth.keys import Key, KeyRing
from serving.http.responses import Refusal
from serving.http.routes import Access, Headers
from serving.metrics.service_metrics import ServiceMetrics
from serving.settings import Settings

_CHALLENGE = ("www-authenticate", "Bearer")
_INVALID = ("www-authenticate", 'Bearer error="invalid_token"')
HOW = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"


class Gate:
    """One worker's; both of its ports ask the same."""

    def __init__(self, settings: Settings, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._keys = (
            KeyRing(settings.keys, settings.workers, metrics.keys_unreadable)
            if settings.keys
            else None
        )
        self._trusts_this_machine = self._keys is None and not settings.allow_anyone
        self._hosts = settings.host_names()

    def admit(self, headers: Headers, access: Access) -> str | None:
        """The name of the caller's key, None where none is needed; Refusal if this caller may not pass."""
        if access == "open":
            return None
        if self._keys is not None:
            return self._admit_key(self._keys, headers, access)
        if self._trusts_this_machine:
            self._require_own_site(headers)
        return None

    def _admit_key(self, keys: KeyRing, headers: Headers, access: Access) -> str:
        presented = presented_key(headers)
        if presented is None:
            self._metrics.key_refused("missing")
            raise Refusal("key_missing", f"this needs a key: {HOW}", headers=(_CHALLENGE,))
        key = keys.find(presented)
        if key is None:
            self._metrics.key_refused("unknown")
            raise Refusal(
                "key_unknown",
                "the service does not know this key, or no longer",
                headers=(_INVALID,),
            )
        self._require_role(key, access)
        seconds = keys.take(key)
        if seconds:
            self._metrics.key_refused("rate")
            message = f"the key of {key.name} may ask {key.rate:g} times a second, over all workers; try again later"
            raise Refusal(
                "rate_limited", message, headers=(("retry-after", str(max(1, math.ceil(seconds)))),)
            )
        return key.name

    def _require_role(self, key: Key, access: Access) -> None:
        if access == "operator" and key.role != "operator":
            self._metrics.key_refused("role")
            raise Refusal(
                "not_allowed",
                f"this is for operators; the key of {key.name} has the role {key.role}",
            )

    def _require_own_site(self, headers: Headers) -> None:
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not is_own_host(host, self._hosts):
            message = "without keys only requests to an address, localhost or a name in SLIPWAY_HOSTS are answered"
            raise Refusal("unknown_host", message, field="host")
        if origin is not None and origin.partition(b"://")[2] != (host or b""):
            raise Refusal(
                "foreign_origin", "without keys no page of another site may ask", field="origin"
            )


def presented_key(headers: Headers) -> bytes | None:
    """The key that a request carries; None if there is none."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and credentials.strip():
        return credentials.strip()
    return headers.get(b"x-api-key") or None


@functools.lru_cache(maxsize=256)  # callers repeat themselves; bounded, since they choose it
def is_own_host(host: bytes, names: frozenset[str]) -> bool:
    """Whether a Host header names this machine: an address, `localhost` or one of `names`, with any port."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
