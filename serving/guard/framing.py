"""Whether it is beyond doubt where a request ends and what it is for.

A proxy in front of the service and the service itself must never disagree about that: else a caller hides a second request in the
body of a first (request smuggling). The parser refuses most of what is ambiguous; here is what it lets through, or might in another
release. The largest numbers of headers and of bytes in a URL are here, too.
"""

from collections.abc import Mapping, Sequence

from serving.http.responses import Refusal

MAX_HEADERS = 100  # of one request, with those behind a chunked body
MAX_URL_BYTES = 8 << 10
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
_VERSIONS = ("1.0", "1.1")
_CONTINUE = b"100-continue"


def clearly_framed(
    headers: Sequence[tuple[bytes, bytes]], version: str, asks_for_upgrade: bool
) -> Mapping[bytes, bytes]:
    """The headers by name, the last of each; Refusal if the request could be read in two ways.

    `headers` with lower-case names; `version` is of HTTP, as "1.1".
    """
    if version not in _VERSIONS:
        raise _malformed(f"HTTP/{version} is not spoken here; send HTTP/1.1")
    values = dict(headers)
    if len(values) < len(headers):
        _require_once(headers)
    coding, length = values.get(b"transfer-encoding"), values.get(b"content-length")
    if coding is not None and (
        coding.strip().lower() != b"chunked" or length is not None or version != "1.1"
    ):
        raise _malformed(
            "expected one content-length, or chunked as the only transfer-encoding of HTTP/1.1"
        )
    if length is not None and not length.strip().isdigit():
        raise _malformed("the content-length is not a number")
    if asks_for_upgrade and (coding is not None or length is not None):
        raise _malformed("Upgrade and a body: send HTTP/1.1 without Upgrade (curl --http1.1)")
    expected = values.get(b"expect")
    if expected is not None and expected.strip().lower() != _CONTINUE:
        message = f"the expectation {expected.decode('latin-1')[:80]!r} was found; the only one that is met is {_CONTINUE.decode()}"
        raise Refusal("expectation_failed", message, field="expect")
    return values


def _require_once(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refusal if a header that decides is there twice."""
    found = set()
    for name, _ in headers:
        if name in _ONCE and name in found:
            raise _malformed(f"the header {name.decode()} is there more than once")
        found.add(name)


def _malformed(message: str) -> Refusal:
    return Refusal("malformed_request", message)
