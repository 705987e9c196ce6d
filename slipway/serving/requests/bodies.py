"""Reads the body of a request: an image, a form of images, or the JSON of rows or texts.

An image is the body itself, or a file of a multipart form. A body may be compressed with gzip or
deflate; limits count its bytes before and after. Bodies that are too large, other content types,
and forms with anything but files named `image` are refused while they arrive. Text in that field is
never used as a URL: nothing is fetched.
"""

import asyncio
import functools
import io
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message, Receive

from slipway.inputs.multipart import FIELD
from slipway.serving.http.responses import ClientDisconnectedError, Refusal
from slipway.serving.http.routes import Headers, Request
from slipway.serving.requests.payload import Payload
from slipway.system.malloc import SERVICE_BLOCK_BYTES

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Errors of every route that reads a body.
BODY_ERRORS = (
    "malformed_body",
    "length_required",
    "body_too_large",
    "unsupported_media_type",
    "body_timeout",
    "deadline_exceeded",
)
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_INFLATED_BYTES = 1 << 18  # bytes inflated at once, which takes well under a millisecond
JSON = b"application/json"
FORM = b"multipart/form-data"
ACCEPTED = (
    "send the image as the body with content type image/png, image/jpeg or similar, or as the "
    "file `image` of a multipart form, which may contain several"
)
ACCEPTED_ROWS = (
    'send one row as a JSON object, or {"rows": [...]}, with content type application/json; '
    "GET /model lists the columns"
)

ACCEPTED_TEXTS = (
    'send a text as a JSON object such as {"text": "..."}, or several as {"rows": [...]}, with '
    "content type application/json; GET /model lists the columns"
)


async def receive_rows(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    """Read the JSON of table rows. Returns a function that creates their payload.

    `max_items` is unused: the decoder limits the number of rows. Raises Refusal.
    """
    text = await read_json(request, max_bytes, require_room=require_room)
    return lambda: Payload("columns", (text,))


async def receive_texts(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    """Read the JSON of texts. Returns a function that creates their payload.

    `max_items` is unused: the decoder limits the number of texts. Raises Refusal.
    """
    body = await read_json(request, max_bytes, ACCEPTED_TEXTS, require_room)
    return lambda: Payload("texts", (body,))


async def receive_images(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    """Read 1 to `max_items` encoded images. Returns a function that creates their payload.

    Raises Refusal for other content.
    """
    media_type, options = _parsed_content_type(request.headers.get(b"content-type"))
    if media_type.startswith(b"image/") or media_type == b"application/octet-stream":
        image = await read_body(request, max_bytes, require_room)
        return lambda: Payload("images", (image,))
    if media_type != FORM:
        hint = "this model takes images, not JSON: " if media_type == JSON else ""
        raise _unsupported(media_type, hint, ACCEPTED)
    boundary = options.get(b"boundary")
    if not boundary:
        raise Refusal(
            "malformed_body",
            "the multipart content type has no boundary; let the client library set that header",
        )
    declared = request.headers.get(b"content-length", b"")  # absent from a chunked body
    blocks = _Blocks(int(declared[:20]) if declared.isdigit() else max_bytes)
    first, receive = await _receive_first(request, max_bytes, require_room)
    blocks.write(first)
    if receive:
        await _receive_rest(receive, max_bytes, len(first), blocks.write)
    return lambda: Payload("images", _images_in(blocks, boundary, max_items))


def _nothing() -> None:
    """Do nothing. The default of `require_room`, which then admits every request."""


async def read_json(
    request: Request,
    max_bytes: int,
    accepted: str = ACCEPTED_ROWS,
    require_room: Callable[[], None] = _nothing,
) -> bytes:
    """Return the JSON text of a request.

    Raises Refusal, which names `accepted`, for other types.
    """
    media_type, options = _parsed_content_type(request.headers.get(b"content-type"))
    if media_type != JSON:
        is_image = media_type.startswith(b"image/") or media_type in (
            FORM,
            b"application/octet-stream",
        )
        is_for_rows = is_image and accepted is ACCEPTED_ROWS
        hint = "this model takes rows of a table, not images: " if is_for_rows else ""
        raise _unsupported(media_type, hint, accepted)
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() != b"utf-8":
        raise Refusal(
            "unsupported_media_type",
            f"charset {charset.decode('latin-1')[:80]} was found, expected UTF-8",
            field="content-type",
        )
    return await read_body(request, max_bytes, require_room)


async def read_body(
    request: Request, max_bytes: int, require_room: Callable[[], None] = _nothing
) -> bytes:
    """Return the whole body of at most `max_bytes`.

    Raises Refusal for bad headers before reading.
    """
    first, receive = await _receive_first(request, max_bytes, require_room)
    if receive is None:
        return first
    body = io.BytesIO()  # getvalue() does not copy
    body.write(first)
    await _receive_rest(receive, max_bytes, len(first), body.write)
    return body.getvalue()


async def _receive_first(
    request: Request, max_bytes: int, require_room: Callable[[], None]
) -> tuple[bytes, Receive | None]:
    """Receive the first piece of a body, which is usually all of it.

    Returns the piece, and a function that receives the rest, or None if the body is complete.
    """
    receive = _receiver(request, max_bytes)
    require_room()
    message = await receive()
    return _piece(message, max_bytes, 0), receive if message.get("more_body", False) else None


async def _receive_rest(
    receive: Receive, max_bytes: int, num_bytes: int, take: Callable[[bytes], object]
) -> None:
    is_more = True
    while is_more:
        message = await receive()
        piece = _piece(message, max_bytes, num_bytes)
        is_more = message.get("more_body", False)
        num_bytes += len(piece)
        take(piece)


def _piece(message: Message, max_bytes: int, num_before: int) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError
    piece: bytes = message.get("body", b"")
    if num_before + len(piece) > max_bytes:
        raise _too_large(max_bytes)
    return piece


class _Inflater:
    """Receives a compressed body in decompressed pieces of at most _INFLATED_BYTES."""

    def __init__(self, receive: Receive, encoding: bytes, max_bytes: int) -> None:
        self._receive = receive
        self._encoding = encoding.decode()
        self._max_bytes = max_bytes
        self._decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
        self._compressed = b""
        self._num_received = 0
        self._is_more = True

    async def __call__(self) -> Message:
        if self._compressed:
            await asyncio.sleep(0)  # a small piece may become megabytes
        else:
            message = await self._receive()
            self._compressed = _piece(message, self._max_bytes, self._num_received)
            self._num_received += len(self._compressed)
            self._is_more = message.get("more_body", False)
        try:
            piece = self._decompressor.decompress(self._compressed, _INFLATED_BYTES)
        except zlib.error as error:
            raise self._damaged(str(error)) from None
        if self._decompressor.unused_data:
            raise self._damaged("bytes follow its end")
        self._compressed = self._decompressor.unconsumed_tail
        is_more = self._is_more or bool(self._compressed)
        if not is_more and not self._decompressor.eof:
            raise self._damaged("it ends too early")
        return {"type": "http.request", "body": piece, "more_body": is_more}

    def _damaged(self, reason: str) -> Refusal:
        message = f"the body cannot be decompressed as {self._encoding}: {reason}"
        return Refusal("malformed_body", message, field="content-encoding")


def _receiver(request: Request, max_bytes: int) -> Receive:
    """Return the function that receives the pieces of a body, decompressed.

    Raises Refusal if the headers declare a body that is unreadable, too large or endless.
    """
    encoding = request.headers.get(b"content-encoding", b"identity").strip().lower()
    is_compressed = encoding in _WINDOW_BITS
    if not is_compressed and encoding not in (b"", b"identity"):
        found = encoding.decode("latin-1")[:80]
        raise Refusal(
            "unsupported_media_type",
            f"content-encoding {found} was found, expected gzip, deflate or an uncompressed body",
            field="content-encoding",
            headers=(("accept-encoding", "gzip, deflate"),),
        )
    _require_length(request.headers, max_bytes)
    return _Inflater(request.body, encoding, max_bytes) if is_compressed else request.body


def _require_length(headers: Headers, max_bytes: int) -> None:
    declared = headers.get(b"content-length")
    if declared is None:
        if b"transfer-encoding" not in headers:
            message = "the request has neither a content-length nor a chunked body"
            raise Refusal("length_required", message, field="content-length")
    elif not declared.isdigit():
        message = "the content-length is not a number"
        raise Refusal("malformed_body", message, field="content-length")
    elif int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> Refusal:
    limit = f"the limit of {max_bytes} bytes (SLIPWAY_MAX_BODY_BYTES)"
    return Refusal("body_too_large", f"the body is larger than {limit}; send a smaller one")


@functools.lru_cache(256)  # cached because callers may repeat it; bounded because they may not
def _parsed_content_type(value: bytes | None) -> tuple[bytes, Mapping[bytes, bytes]]:
    return parse_options_header(value)


def _unsupported(media_type: bytes, hint: str, accepted: str) -> Refusal:
    found = media_type.decode("latin-1")[:80] or "none"
    message = f"content type {found} was found; {hint}{accepted}"
    return Refusal("unsupported_media_type", message, field="content-type")


class _Blocks:
    """Collects the pieces of a body in large blocks. Iteration yields and frees each block."""

    def __init__(self, num_bytes: int) -> None:
        """Choose the block size for a body of `num_bytes`: clearing large blocks takes time."""
        self._block_bytes = min(max(num_bytes, 1 << 12), SERVICE_BLOCK_BYTES)
        self._blocks = deque[bytearray]()
        self._room = 0  # free bytes of the last block

    def write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            if not self._room:
                self._room = self._block_bytes
                self._blocks.append(bytearray(self._room))
            now, rest = rest[: self._room], rest[self._room :]
            begin = self._block_bytes - self._room
            self._blocks[-1][begin : begin + len(now)] = now
            self._room -= len(now)

    def __iter__(self) -> Iterator[bytearray]:
        if self._blocks and self._room:
            del self._blocks[-1][-self._room :]
        while self._blocks:
            yield self._blocks.popleft()


def _images_in(blocks: _Blocks, boundary: bytes, max_items: int) -> tuple[bytes, ...]:
    """Parse a multipart form and return its images.

    Each block is freed once it is parsed, so the form is in memory only once.
    """
    with closing(FormReader(boundary, max_items)) as form:
        for block in blocks:
            form.write(block)
        return form.images()


@dataclass
class _Part:
    headers: dict[str, bytes] = field(default_factory=dict)
    content: io.BytesIO = field(default_factory=io.BytesIO)

    @property
    def name(self) -> str:
        return self._disposition.get(b"name", b"").decode("utf-8", "replace")[:80]

    @property
    def is_file(self) -> bool:
        return b"filename" in self._disposition

    @property
    def _disposition(self) -> dict[bytes, bytes]:
        return parse_options_header(self.headers.get("content-disposition"))[1]


class FormReader:
    """Parses a multipart form of at most `max_parts` files, piece by piece.

    Invalid forms are refused as soon as possible. The `on_` methods are the parser's callbacks.
    """

    def __init__(self, boundary: bytes, max_parts: int) -> None:
        self._parts: list[_Part] = []
        self._is_complete = False
        self._max_parts = max_parts
        self._name = b""
        self._value = b""
        callbacks: MultipartCallbacks = {}
        with _refusing_bad_forms():
            self._parser = MultipartParser(boundary, callbacks)
        # The parser knows no preamble (RFC 2046, section 5.1.1): it becomes a first part here.
        self._parser.write(b"--%s\r\n\r\n\r\n" % boundary)
        callbacks |= {
            "on_part_begin": self.on_part_begin,
            "on_part_data": self.on_part_data,
            "on_header_begin": self.on_header_begin,
            "on_header_field": self.on_header_field,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_end": self.on_end,
        }

    def write(self, piece: bytes | bytearray) -> None:
        """Parse the next bytes. Raises Refusal if they are not part of a valid form."""
        with _refusing_bad_forms():
            self._parser.write(piece)  # type: ignore[arg-type]  # works on both types

    def images(self) -> tuple[bytes, ...]:
        """Return the files named `image` in order. Raises Refusal for none or other fields."""
        if not self._is_complete:
            message = "the multipart form has no closing boundary, or another one than its header"
            raise Refusal("malformed_body", message)
        for part in self._parts:
            if part.name != FIELD:
                message = f"the form has a field {part.name!r}, expected only files {FIELD!r}"
                raise Refusal("unknown_field", message, field=part.name)
        if not self._parts:
            message = f"the form has no field {FIELD!r}; {ACCEPTED}"
            raise Refusal("missing_field", message, field=FIELD)
        for position, part in enumerate(self._parts):
            if not part.is_file:
                place = item_field(position, len(self._parts))
                raise Refusal(
                    "not_a_file",
                    f"{place} is text, expected a file (curl -F {FIELD}=@picture.png); "
                    "URLs are not fetched",
                    field=place,
                )
        return tuple(part.content.getvalue() for part in self._parts)

    def close(self) -> None:
        """Free the parts, and the reference cycle of reader and parser."""
        del self._parser
        self._parts.clear()

    def on_part_begin(self) -> None:
        if len(self._parts) == self._max_parts:
            limit = f"more than {self._max_parts} parts, the limit (SLIPWAY_MAX_ITEMS)"
            message = f"the form has {limit}; send fewer images in each request"
            raise Refusal("too_many_items", message, field=FIELD)
        self._parts.append(_Part())

    def on_header_begin(self) -> None:
        self._name, self._value = b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._parts[-1].headers[self._name.decode("latin-1").lower()] = self._value

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._parts:  # without any part, it is the preamble
            self._parts[-1].content.write(memoryview(data)[start:end])

    def on_end(self) -> None:
        self._is_complete = True


@contextmanager
def _refusing_bad_forms() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        message = f"the multipart form cannot be read: {str(error)[:200]}"
        raise Refusal("malformed_body", message) from None


def item_field(position: int, num_items: int) -> str:
    """Return the name of an image in errors: "image", or "image[3]" if there are several."""
    return FIELD if num_items == 1 else f"{FIELD}[{position}]"
