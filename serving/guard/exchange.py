"""One request and its answer on a connection, from its headers to the last byte of the answer.

uvicorn's own makes an ASGI scope for each request, and sends an answer as messages whose headers it checks one by one. Between our
connection and our front that is a detour: the request goes there as it is, and the answer comes back whole.
"""

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from serving.responses import Response, encoded_headers, head_lines
from serving.routes import Request

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent

    from serving.guard.connections import Connection


class Exchange(RequestResponseCycle):
    """Has what uvicorn's connection looks at and sets in one of its own, but is asked and answered without ASGI."""

    _default_lines: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = [], b""  # of headers that uvicorn makes once a second
    request: Request  # set by whoever makes it
    task: "asyncio.Task[None]"  # that answers it, once it has begun
    more_body = True
    _event: asyncio.Event | None = None
    disconnected = response_started = response_complete = False

    def __init__(self, connection: "Connection", *, keep_alive: bool, expects_100_continue: bool) -> None:
        # Not uvicorn's, which asks for a scope.
        self.transport, self.flow = connection.transport, connection.flow
        self.default_headers = connection.server_state.default_headers
        self.connection = connection
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_100_continue
        self.body = bytearray()

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]  # most bodies are there at once, and nobody waits
        """Set while more of the body is there than `receive` gave away, or no more will come."""
        if self._event is None:
            self._event = asyncio.Event()
            if self.body or not self.more_body:
                self._event.set()
        return self._event

    def take(self, piece: bytes) -> None:
        """More of the body is there."""
        if not self.response_complete:
            self.body += piece
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            if self._event is not None:
                self._event.set()

    def has_all(self) -> None:
        """The body is whole."""
        self.more_body = False
        if self._event is not None:
            self._event.set()

    async def receive(self) -> "ASGIReceiveEvent":
        """As ASGI has it; a body that is there already is not waited for."""
        if self.more_body or self.waiting_for_100_continue or self.disconnected or self.response_complete:
            return await super().receive()
        if self.flow.read_paused:  # it was too much at once; a caller that hangs up is to be noticed
            self.flow.resume_reading()
        if self._event is not None:
            self._event.clear()
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": False}

    def answer(self, response: Response) -> None:
        """Write the whole answer; nothing if the caller is gone."""
        # Only the last request of a connection is told that its caller is gone.
        if self.disconnected or self.response_complete or self.transport.is_closing():
            return
        self.transport.write(b"".join(self._pieces(response)))
        self.response_started = self.response_complete = True
        if self.keep_alive:
            self.connection.on_response_complete()
        else:
            self.connection.end(self)

    def _pieces(self, response: Response) -> list[Any]:
        made_of, default_lines = self._default_lines
        if made_of is not self.default_headers:
            default_lines = b"".join([b"%s: %s\r\n" % header for header in self.default_headers])
            Exchange._default_lines = self.default_headers, default_lines
        pieces = [STATUS_LINE[response.status], default_lines]
        if response.headers:
            if ("connection", "close") in response.headers:
                self.keep_alive = False
            headers = encoded_headers(response, self.request.id)
            for name, value in headers:
                if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                    raise RuntimeError(f"no header can be {name!r}: {value!r}")
            pieces += [b"%s: %s\r\n" % header for header in headers if header != (b"connection", b"close")]
        else:  # constants, a length and an id that was looked at: nothing in them is to be checked
            pieces.append(head_lines(response, self.request.id))
        if not self.keep_alive:
            pieces.append(b"connection: close\r\n")
        pieces.append(b"\r\n")
        if self.request.method != "HEAD":
            pieces.append(response.body)
        return pieces

    def let_go(self) -> None:
        """It is over. What is held here holds the exchange: memory that only Python's search for such rings would find."""
        del self.request, self.connection
