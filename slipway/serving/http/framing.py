"""Refuses ambiguous framing (request smuggling, RFC 9112 section 11.2) and oversized heads.

A proxy and the service behind it must agree on the end of a request: else a caller can hide a
second request in the body of the first. The parser refuses most ambiguous requests; the checks here
cover the rest, also for other releases of the parser.
"""

import re
from itertools import chain

from starlette.types import Scope

from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Headers

MAX_HEADERS = 100
MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 64 << 10  # URL and headers; uvicorn's h11 protocol has the same limit
_ONCE = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"host",
        b"expect",
        b"content-encoding",
        b"content-type",
        b"authorization",
        b"x-api-key",
    )
)
# RFC 9110, section 7.2: a name or an address, and a port.
HOST = re.compile(
    rb"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.~!$&'()*+,;=%-]*))(?::[0-9]*)?", re.ASCII
)
_VERSIONS = ("1.0", "1.1")
_CONTINUE = b"100-continue"


def checked_headers(scope: Scope) -> Headers:
    """Return the headers of an ASGI scope by lower-case name, the last value of each.

    Raises Refusal if the request is ambiguous, or its head exceeds a limit.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    query = scope["query_string"]
    num_url_bytes = len(scope["raw_path"]) + (len(query) + 1 if query else 0)
    _require_limits(num_url_bytes, headers)
    version = scope["http_version"]
    if version not in _VERSIONS:
        raise _malformed(f"HTTP/{version} is not supported; send HTTP/1.1")
    values = dict(headers)
    if len(values) < len(headers):
        _require_once(headers)
    coding, length = values.get(b"transfer-encoding"), values.get(b"content-length")
    if coding is not None:
        is_plainly_chunked = coding.strip().lower() == b"chunked" and version == "1.1"
        if length is not None or not is_plainly_chunked:
            raise _malformed(
                "expected one content-length, or chunked as the only transfer-encoding of HTTP/1.1"
            )
    if length is not None and not length.strip().isdigit():
        raise _malformed("the content-length is not a number")
    if b"host" in values and not HOST.fullmatch(values[b"host"]):
        raise _malformed("the Host header is neither a name nor an address, with or without a port")
    has_body = coding is not None or length is not None
    if has_body and b"upgrade" in values and _asks_for_upgrade(headers):
        raise _malformed("Upgrade and a body: send HTTP/1.1 without Upgrade (curl --http1.1)")
    if b"expect" in values:
        _require_continue(values[b"expect"], version)
    return values


def _asks_for_upgrade(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return True if the header `Connection` names Upgrade, as an upgrade requires (RFC 9110)."""
    values = b",".join(value for name, value in headers if name == b"connection")
    return b"upgrade" in (option.strip() for option in values.lower().split(b","))


def headers_too_large() -> Refusal:
    message = f"path and headers are larger than the limit of {MAX_HEAD_BYTES} bytes"
    return Refusal("headers_too_large", message)


def _require_limits(num_url_bytes: int, headers: list[tuple[bytes, bytes]]) -> None:
    if num_url_bytes > MAX_URL_BYTES:
        message = f"the URL is longer than the limit of {MAX_URL_BYTES} bytes"
        raise Refusal("url_too_long", message)
    if len(headers) > MAX_HEADERS:
        message = f"there are more headers than the limit of {MAX_HEADERS}"
        raise Refusal("headers_too_large", message)
    if num_url_bytes + sum(map(len, chain.from_iterable(headers))) > MAX_HEAD_BYTES:
        raise headers_too_large()


def _require_once(headers: list[tuple[bytes, bytes]]) -> None:
    found = set()
    for name, _ in headers:
        if name in _ONCE and name in found:
            raise _malformed(f"the header {name.decode()} is repeated")
        found.add(name)


def _require_continue(expectation: bytes, version: str) -> None:
    """Refuse expectations other than `100-continue`, and any in HTTP/1.0.

    A caller of HTTP/1.0 would mistake `100 Continue` for the response.
    """
    if expectation.strip().lower() != _CONTINUE or version == "1.0":
        found = expectation.decode("latin-1")[:80]
        only = f"only {_CONTINUE.decode()} in HTTP/1.1 is supported"
        message = f"the expectation {found!r} was found; {only}"
        raise Refusal("expectation_failed", message, field="expect")


def _malformed(message: str) -> Refusal:
    return Refusal("malformed_request", message)
