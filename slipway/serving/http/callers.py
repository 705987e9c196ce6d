"""Decides which callers are admitted. Without authentication, only this machine is.

A web page of another site could call the service through a browser on this machine. Two headers
that a page cannot forge prevent this. `Host` shows DNS rebinding: it has the page's own host name,
even if that name was pointed at 127.0.0.1. `Origin` shows cross-origin requests: browsers add it to
them.
"""

import functools
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol

from slipway.serving.http.framing import HOST
from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Access, Headers


class CallerCheck(Protocol):
    """Decides whether a caller may use a route. Each worker has one CallerCheck."""

    @property
    def allows_remote(self) -> bool:
        """True if other machines may connect."""

    @property
    def errors(self) -> tuple[str, ...]:
        """The error codes with which `admit` may refuse a request."""

    @property
    def security(self) -> Mapping[str, Any]:
        """OpenAPI security schemes, by name. Empty if callers send no credentials."""

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Return the name of the caller's key; None if no key is needed. Raises Refusal."""


class LoopbackOnly:
    """Admits every caller on this machine, except web pages of other sites.

    `names` are allowed host names besides addresses and localhost.
    """

    allows_remote = False
    errors: tuple[str, ...] = ("foreign_origin", "unknown_host")
    security: Mapping[str, Any] = {}

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self._names = names

    def admit(self, headers: Headers, access: Access) -> str | None:
        """Return None: no key is needed.

        Raises Refusal for a request from a page of another site.
        """
        if access == "open":
            return None
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not is_own_host(host, self._names):
            message = (
                "unknown host: without API keys, send requests to an address, to localhost, or to "
                "a name in SLIPWAY_ALLOWED_HOSTS"
            )
            raise Refusal("unknown_host", message, field="host")
        if origin is not None and origin.partition(b"://")[2] != (host or b""):
            message = "cross-origin request refused: no API keys are configured (set SLIPWAY_KEYS)"
            raise Refusal("foreign_origin", message, field="origin")
        return None


@functools.lru_cache(64)
def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach `address`: a loopback address or `localhost`."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@functools.lru_cache(maxsize=256)  # bounded, because callers choose the header
def is_own_host(host: bytes, names: frozenset[str]) -> bool:
    """Return True if a Host header names an IP address, `localhost` or one of `names`.

    Any port is accepted.
    """
    parsed = HOST.fullmatch(host.lower())
    if parsed is None:
        return False
    name = (parsed["bracketed"] or parsed["name"]).decode()
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
