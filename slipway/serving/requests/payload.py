"""The payload of one request before decoding: encoded images, or rows as JSON."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from slipway.kinds.registry import input_kind
from slipway.serving.http.routes import Request


@dataclass(slots=True)  # a frozen one takes four times as long to create
class Payload:
    """The encoded content of one request, before decoding. Treat it as immutable."""

    kind: str  # kind of the input
    items: tuple[bytes, ...]  # encoded images in the caller's order, or one JSON text

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.items))

    def as_request(self) -> tuple[str, bytes]:
        """Return the payload as an HTTP request: its content type and body."""
        kind = input_kind(self.kind)
        if not kind.takes_files:
            return kind.content_type, self.items[0]
        from slipway.inputs.multipart import encode_images  # only the request log needs it

        return encode_images(self.items)


ReceivePayload = Callable[
    [Request, int, int, Callable[[], None]], Coroutine[Any, Any, Callable[[], Payload]]
]


def receive_payload(
    request: Request,
    max_bytes: int,
    max_items: int,
    kind: str,
    require_room: Callable[[], None],
) -> Coroutine[Any, Any, Callable[[], Payload]]:
    """Read a body for a model with this kind of input.

    Returns, once awaited, a function that parses the body; call it once.

    `require_room` is called before the body is awaited, and may raise Refusal. Raises Refusal for
    another kind of input, and ClientDisconnectedError if the client disconnected.
    """
    receive: ReceivePayload = input_kind(kind).load_part("receive")
    return receive(request, max_bytes, max_items, require_room)
