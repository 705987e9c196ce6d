"""From an HTTP request to what the model is asked about: one or several encoded images, or the rows of a table as JSON.

An image is the body itself, or a file in a multipart form. Refuses what is too large while it arrives, other content
types, and forms with anything but files named `image`. Text in that field is never taken for a URL: nothing is ever fetched.
"""

import functools
import io
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message

from serving.http.responses import ClientGoneError, Refusal
from serving.http.routes import Headers, Request
from serving.requests.payload import Payload
from slipway.inputs.multipart import FIELD
from slipway.kinds.registry import input_kind
from slipway.system.malloc import LARGEST_BLOCK_OF_A_SERVICE

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

JSON = b"application/json"
Receive = Callable[[Request, int, int, Callable[[], None]], Awaitable[Callable[[], Payload]]]
ACCEPTED = (
    "send the image as the body with content type image/png, image/jpeg or the like, or as the file `image` of a multipart form, "
    "which takes several"
)
ACCEPTED_ROWS = 'send one row as a JSON object, or {"rows": [...]}, with content type application/json; GET /model lists the columns'


async def receive_payload(
    request: Request,
    max_bytes: int,
    max_items: int,
    kind: str,
    require_room: Callable[[], None],
) -> Callable[[], Payload]:
    """Read a body for a model with this kind of input; return a function that parses it.

    Refusal if the request holds something else, or from `require_room`, which is called before a
    body is waited for; ClientGoneError if the caller hung up. The function may be called once.
    """
    receive: Receive = input_kind(kind).load_part("receive")
    return await receive(request, max_bytes, max_items, require_room)


async def receive_rows(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    """Read the JSON text of one row or several; the decoder limits their number, not `max_items`."""
    text = await read_json(request, max_bytes, require_room=require_room)
    return lambda: Payload("columns", (text,))


async def receive_images(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    """Read 1 to `max_items` encoded images."""
    media_type, options = _parsed_content_type(request.headers.get(b"content-type"))
    if media_type.startswith(b"image/") or media_type == b"application/octet-stream":
        image = await read_body(request, max_bytes, require_room)
        return lambda: Payload("images", (image,))
    if media_type == b"multipart/form-data":
        declared = request.headers.get(b"content-length", b"")  # none of a body in chunks
        blocks = _Blocks(int(declared[:20]) if declared.isdigit() else max_bytes)
        boundary = options.get(b"boundary")
        if not boundary:
            raise Refusal(
                "malformed_body",
                "the multipart content type has no boundary; let the client library write that header",
            )
        first, is_more = await _receive_first(request, max_bytes, require_room)
        blocks.write(first)
        if is_more:
            await _receive_rest(request, max_bytes, len(first), blocks.write)
        return lambda: Payload("images", _images_in(blocks, boundary, max_items))
    raise _unsupported(
        media_type, "this model takes images, not JSON: " if media_type == JSON else "", ACCEPTED
    )


def _nothing() -> None:
    """Let every request in."""


class _Blocks:
    """The pieces of a body in blocks, of which large ones have memory of their own that the system gets back once they are parsed."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is how long the body is said to be: to clear a block that is larger would take as long as to fill it."""
        self._block_bytes = min(max(num_bytes, 1 << 12), LARGEST_BLOCK_OF_A_SERVICE)
        self._blocks = deque[bytearray]()
        self._room = 0  # bytes of the last block that are free

    def write(self, piece: bytes) -> None:
        """Add a piece of the body."""
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
        """Each block in turn, which is not held any longer."""
        if self._blocks and self._room:
            del self._blocks[-1][-self._room :]
        while self._blocks:
            yield self._blocks.popleft()


def _images_in(blocks: _Blocks, boundary: bytes, max_items: int) -> tuple[bytes, ...]:
    """The images of a form, which is in memory once: its blocks are let go one by one."""
    with closing(FormReader(boundary, max_items)) as form:
        for block in blocks:
            form.write(block)
        return form.images()


async def read_json(
    request: Request,
    max_bytes: int,
    accepted: str = ACCEPTED_ROWS,
    require_room: Callable[[], None] = _nothing,
) -> bytes:
    """The JSON text of a request, in UTF-8 if it is text at all; Refusal with what is `accepted` if it is declared to be something else."""
    media_type, options = _parsed_content_type(request.headers.get(b"content-type"))
    is_image = media_type.startswith(b"image/") or media_type in (
        b"multipart/form-data",
        b"application/octet-stream",
    )
    if media_type != JSON:
        hint = (
            "this model takes rows of a table, not images: "
            if is_image and accepted is ACCEPTED_ROWS
            else ""
        )
        raise _unsupported(media_type, hint, accepted)
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() != b"utf-8":
        raise Refusal(
            "unsupported_media_type",
            f"charset {charset.decode('latin-1')[:80]} was found, JSON is UTF-8",
            field="content-type",
        )
    return await read_body(request, max_bytes, require_room)


@functools.lru_cache(
    256
)  # a caller sends the same one again and again, or a new boundary each time
def _parsed_content_type(value: bytes | None) -> tuple[bytes, Mapping[bytes, bytes]]:
    """Media type in lower case, and options."""
    return parse_options_header(value)


def _unsupported(media_type: bytes, hint: str, accepted: str) -> Refusal:
    found = media_type.decode("latin-1")[:80] or "none"
    return Refusal(
        "unsupported_media_type",
        f"content type {found} was found; {hint}{accepted}",
        field="content-type",
    )


async def read_body(
    request: Request, max_bytes: int, require_room: Callable[[], None] = _nothing
) -> bytes:
    """The whole body, if it has at most `max_bytes`; refused before a byte is read where its length or its compression is declared."""
    first, is_more = await _receive_first(request, max_bytes, require_room)
    if not is_more:
        return first
    body = io.BytesIO()  # gives its bytes away without copying them
    body.write(first)
    await _receive_rest(request, max_bytes, len(first), body.write)
    return body.getvalue()


async def _receive_first(
    request: Request, max_bytes: int, require_room: Callable[[], None]
) -> tuple[bytes, bool]:
    """The first piece of a body, which is most often all of it, and True if more follows."""
    _require_readable(request.headers, max_bytes)
    require_room()
    message = await request.receive()
    return _piece(message, max_bytes, 0), message.get("more_body", False)


async def _receive_rest(
    request: Request, max_bytes: int, num_bytes: int, take: Callable[[bytes], object]
) -> None:
    """Calls `take` with each further piece of a body of which `num_bytes` have arrived."""
    is_more = True
    while is_more:
        message = await request.receive()
        piece, is_more = _piece(message, max_bytes, num_bytes), message.get("more_body", False)
        num_bytes += len(piece)
        take(piece)


def _piece(message: Message, max_bytes: int, num_before: int) -> bytes:
    """What a message has of a body; Refusal if that is too much with what came before."""
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    piece: bytes = message.get("body", b"")
    if num_before + len(piece) > max_bytes:
        raise _too_large(max_bytes)
    return piece


def _require_readable(headers: Headers, max_bytes: int) -> None:
    """Raises Refusal if the headers declare a body that is compressed, too large or without an end."""
    if b"content-encoding" in headers:
        _require_identity(headers[b"content-encoding"])
    declared = headers.get(b"content-length")
    if declared is None:
        if b"transfer-encoding" not in headers:
            raise Refusal(
                "length_required",
                "the request has neither a content-length nor a chunked body",
                field="content-length",
            )
    elif not declared.isdigit():
        raise Refusal(
            "malformed_body", "the content-length is not a number", field="content-length"
        )
    elif int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _require_identity(encoding: bytes) -> None:
    """Nothing is ever decompressed: no body is larger than it looks."""
    if encoding.strip().lower() not in (b"", b"identity"):
        message = f"content-encoding {encoding.decode('latin-1')[:80]} was found; send the body as it is, without compression"
        raise Refusal(
            "unsupported_media_type",
            message,
            field="content-encoding",
            headers=(("accept-encoding", "identity"),),
        )


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(
        "body_too_large",
        f"the body is larger than the limit of {max_bytes} bytes (SLIPWAY_MAX_BODY_BYTES); send a smaller one",
    )


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
    """Reads a multipart form of at most `max_parts` files, piece by piece.

    What is wrong at its beginning is refused there, and the rest is not looked into. The other methods are the parser's callbacks.
    """

    def __init__(self, boundary: bytes, max_parts: int) -> None:
        self._parts: list[_Part] = []
        self._is_complete = False
        self._max_parts = max_parts
        self._name = b""
        self._value = b""
        callbacks: MultipartCallbacks = {
            "on_part_begin": self.on_part_begin,
            "on_part_data": self.on_part_data,
            "on_header_begin": self.on_header_begin,
            "on_header_field": self.on_header_field,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_end": self.on_end,
        }
        with _refusing():
            self._parser = MultipartParser(boundary, callbacks)

    def write(self, piece: bytes | bytearray) -> None:
        """Take the next bytes; Refusal if they cannot be of such a form."""
        with _refusing():
            self._parser.write(piece)  # type: ignore[arg-type]  # it searches and slices, which both types can

    def images(self) -> tuple[bytes, ...]:
        """The files `image` in their order; Refusal unless there is at least one, and nothing else, and the form is whole."""
        if not self._is_complete:
            raise Refusal(
                "malformed_body", "the multipart form breaks off before its closing boundary"
            )
        return _only_images(self._parts)

    def close(self) -> None:
        """Let go of what was read. Reader and parser hold each other: Python alone would free them hundreds of requests later."""
        del self._parser
        self._parts.clear()

    def on_part_begin(self) -> None:
        if len(self._parts) == self._max_parts:
            message = f"the form has more than {self._max_parts} parts, the limit; send fewer images in each request (SLIPWAY_MAX_ITEMS)"
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
        self._parts[-1].content.write(memoryview(data)[start:end])

    def on_end(self) -> None:
        self._is_complete = True


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise Refusal(
            "malformed_body", f"the multipart form cannot be read: {str(error)[:200]}"
        ) from None


def _only_images(parts: list[_Part]) -> tuple[bytes, ...]:
    for part in parts:
        if part.name != FIELD:
            raise Refusal(
                "unknown_field",
                f"the form has a field {part.name!r}, expected only files {FIELD!r}",
                field=part.name,
            )
    if not parts:
        raise Refusal("missing_field", f"the form has no field {FIELD!r}; {ACCEPTED}", field=FIELD)
    for position, part in enumerate(parts):
        if not part.is_file:
            place = item_field(position, len(parts))
            raise Refusal(
                "not_a_file",
                f"{place} is text, expected a file (curl -F {FIELD}=@picture.png); URLs are not fetched",
                field=place,
            )
    return tuple(part.content.getvalue() for part in parts)


def item_field(position: int, num_items: int) -> str:
    """What a fault of one of several images is named by: "image[3]", counted from 0; "image" where there is only one."""
    return FIELD if num_items == 1 else f"{FIELD}[{position}]"
