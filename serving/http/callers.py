"""The check of callers. Without one that authenticates them, only this machine is admitted.

A browser on this machine can reach loopback, too. A page of another site must not call the service through it, so two headers
are checked that no page can forge: `Host`, which stays the page's own name when that name is pointed at 127.0.0.1 (DNS
rebinding), and `Origin`, which a browser adds to requests to other sites.
"""

import functools
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol

from serving.http.responses import Refusal
from serving.http.routes import Access, Headers


class CallerCheck(Protocol):
    """Decides whether a caller may use a route. One per worker."""

    @property
    def allows_remote(self) -> bool:
        """True if other machines may connect."""

    @property
    def errors(self) -> tuple[str, ...]:
        """The error codes that `admit` may refuse with."""

    @property
    def security(self) -> Mapping[str, Any]:
        """OpenAPI security schemes, by name. Empty if callers send no credentials."""

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Return the name of the caller's key, or None if no key is needed. Raises Refusal."""


class LoopbackOnly:
    """Admits every caller on this machine, but no page of another site. `names` are further host names of this service."""

    allows_remote = False
    errors: tuple[str, ...] = ("foreign_origin", "unknown_host")
    security: Mapping[str, Any] = {}

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self._names = names

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Refuse requests of other sites' pages; return None for all others."""
        if access == "open":
            return None
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not is_own_host(host, self._names):
            message = "without keys only requests to an address, localhost or a name in SLIPWAY_HOSTS are answered"
            raise Refusal("unknown_host", message, field="host")
        if origin is not None and origin.partition(b"://")[2] != (host or b""):
            raise Refusal(
                "foreign_origin", "without keys no page of another site may ask", field="origin"
            )
        return None


@functools.lru_cache(64)  # called for each request
def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach `address`. A name other than `localhost` counts as reachable by others."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@functools.lru_cache(maxsize=256)  # bounded, because callers choose the header
def is_own_host(host: bytes, names: frozenset[str]) -> bool:
    """Return True if a Host header names this machine: an address, `localhost` or one of `names`, with any port."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
