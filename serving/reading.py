"""From an HTTP request to what the model is asked about: an encoded image, or the rows of a table as JSON.

An image is the body itself, or one file in a multipart form. Refuses what is too large while it arrives, other content
types, and forms with anything but one file named `image`. Text in that field is never taken for a URL: nothing is ever fetched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from serving.responses import ClientGoneError, Refusal

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = "image"
MAX_PARTS = 8  # one is right; the others are named in the error
JSON = b"application/json"
ACCEPTED = "send the image as the body with content type image/png, image/jpeg or the like, or as the file `image` of a multipart form"
ACCEPTED_ROWS = 'send one row as a JSON object, or {"rows": [...]}, with content type application/json; GET /model lists the columns'

Headers = Mapping[bytes, bytes]


async def read_payload(headers: Headers, receive: Receive, max_bytes: int, kind: Literal["images", "columns"]) -> bytes:
    """What a model with this kind of input is asked about; Refusal if the request holds something else."""
    return await (read_image if kind == "images" else read_json)(headers, receive, max_bytes)


async def read_image(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The encoded image of a request; Refusal if there is none, ClientGoneError if the caller hung up."""
    media_type, options = parse_options_header(headers.get(b"content-type"))
    if media_type == b"multipart/form-data":
        boundary = options.get(b"boundary")
        if not boundary:
            raise Refusal("malformed_body", "the multipart content type has no boundary; let the client library write that header")
        return image_from_form(await read_body(headers, receive, max_bytes), boundary)
    if media_type.startswith(b"image/") or media_type == b"application/octet-stream":
        return await read_body(headers, receive, max_bytes)
    raise _unsupported(media_type, "this model takes images, not JSON: " if media_type == JSON else "", ACCEPTED)


async def read_json(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The JSON text of a request, in UTF-8 if it is text at all; Refusal if it is declared to be something else."""
    media_type, options = parse_options_header(headers.get(b"content-type"))
    is_image = media_type.startswith(b"image/") or media_type in (b"multipart/form-data", b"application/octet-stream")
    if media_type != JSON:
        raise _unsupported(media_type, "this model takes rows of a table, not images: " if is_image else "", ACCEPTED_ROWS)
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() != b"utf-8":
        raise Refusal("unsupported_media_type", f"charset {charset.decode('latin-1')[:80]} was found, JSON is UTF-8", field="content-type")
    return await read_body(headers, receive, max_bytes)


def _unsupported(media_type: bytes, hint: str, accepted: str) -> Refusal:
    found = media_type.decode("latin-1")[:80] or "none"
    return Refusal("unsupported_media_type", f"content type {found} was found; {hint}{accepted}", field="content-type")


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, if it has at most `max_bytes`; refused before a byte is read where its length or its compression is declared."""
    _require_plain(headers)
    declared = headers.get(b"content-length")
    if declared is None and b"transfer-encoding" not in headers:
        raise Refusal("length_required", "the request has neither a content-length nor a chunked body", field="content-length")
    if declared is not None and not declared.isdigit():
        raise Refusal("malformed_body", "the content-length is not a number", field="content-length")
    if declared is not None and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _require_plain(headers: Headers) -> None:
    """Nothing is ever decompressed: no body is larger than it looks."""
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        message = f"content-encoding {encoding.decode('latin-1')[:80]} was found; send the body as it is, without compression"
        raise Refusal("unsupported_media_type", message, field="content-encoding", headers=(("accept-encoding", "identity"),))


def _too_large(max_bytes: int) -> Refusal:
    return Refusal("body_too_large", f"the body is larger than the limit of {max_bytes} bytes (SLIPWAY_MAX_BODY_BYTES); send a smaller one")


@dataclass
class _Part:
    headers: dict[str, bytes] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        return self._disposition.get(b"name", b"").decode("utf-8", "replace")[:80]

    @property
    def is_file(self) -> bool:
        return b"filename" in self._disposition

    @property
    def _disposition(self) -> dict[bytes, bytes]:
        return parse_options_header(self.headers.get("content-disposition"))[1]


class _FormReader:
    """Collects the parts of a form; its methods are the parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.complete = False
        self._name = b""
        self._value = b""

    def on_part_begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise Refusal("malformed_body", f"the form has more than {MAX_PARTS} parts, expected one file named {FIELD!r}")
        self.parts.append(_Part())

    def on_header_begin(self) -> None:
        self._name, self._value = b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self.parts[-1].headers[self._name.decode("latin-1").lower()] = self._value

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].content += data[start:end]

    def on_end(self) -> None:
        self.complete = True


def image_from_form(body: bytes, boundary: bytes) -> bytes:
    """The file `image` of a multipart form; Refusal unless it is there once, as a file, and alone."""
    reader = _FormReader()
    callbacks: MultipartCallbacks = {
        "on_part_begin": reader.on_part_begin,
        "on_part_data": reader.on_part_data,
        "on_header_begin": reader.on_header_begin,
        "on_header_field": reader.on_header_field,
        "on_header_value": reader.on_header_value,
        "on_header_end": reader.on_header_end,
        "on_end": reader.on_end,
    }
    try:
        MultipartParser(boundary, callbacks).write(body)
    except FormParserError as error:
        raise Refusal("malformed_body", f"the multipart form cannot be read: {str(error)[:200]}") from None
    if not reader.complete:
        raise Refusal("malformed_body", "the multipart form breaks off before its closing boundary")
    return _only_image(reader.parts)


def _only_image(parts: list[_Part]) -> bytes:
    for part in parts:
        if part.name != FIELD:
            raise Refusal("unknown_field", f"the form has a field {part.name!r}, expected only the file {FIELD!r}", field=part.name)
    if not parts:
        raise Refusal("missing_field", f"the form has no field {FIELD!r}; {ACCEPTED}", field=FIELD)
    if len(parts) > 1:
        raise Refusal(
            "repeated_field", f"the form has {len(parts)} fields {FIELD!r}, expected one; send one request for each image", field=FIELD
        )
    if not parts[0].is_file:
        raise Refusal("not_a_file", f"{FIELD!r} is text, expected a file (curl -F {FIELD}=@picture.png); URLs are not fetched", field=FIELD)
    return bytes(parts[0].content)
