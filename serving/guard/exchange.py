"""One request and its answer on a connection, from its headers to the last byte of the answer.

uvicorn's own makes an ASGI scope for each request, and sends an answer as messages whose headers it checks one by one. Between our
connection and our front that is a detour: the request goes there as it is, and the answer comes back whole.
"""

import asyncio
from typing import TYPE_CHECKING, ClassVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

from serving.http.responses import Response, encoded_headers, head_lines
from serving.http.routes import Request

if TYPE_CHECKING:
    from serving.guard.connections import Connection


class Exchange(RequestResponseCycle):
    """Has what uvicorn's connection looks at and sets in one of its own, but is asked and answered without ASGI."""

    _default_lines: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = (
        [],
        b"",
    )  # of headers that uvicorn makes once a second
    request: Request  # set by whoever makes it

    def __init__(
        self,
        connection: "Connection",
        *,
        keep_alive: bool,
        expects_100_continue: bool,
        body: bytes | None = None,
    ) -> None:
        """`body` is the whole of it, where it has come."""
        # Not uvicorn's, which asks for a scope.
        self.transport, self.flow = connection.transport, connection.flow
        self.default_headers = connection.server_state.default_headers
        self.connection = connection
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_100_continue
        self.body = bytearray()
        self._whole = body
        self.more_body = body is None
        self.disconnected = self.response_started = self.response_complete = False
        self._event: asyncio.Event | None = None

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

    def whole_body(self) -> bytes | None:
        """The body, to be taken once, if all of it has come and its caller is there; None: it is to be received."""
        if self.more_body or self.waiting_for_100_continue or self.disconnected:
            return None
        whole, self._whole = self._whole, None
        if whole is not None:
            return whole
        if (
            self.flow.read_paused
        ):  # it was too much at once; a caller that hangs up is to be noticed
            self.flow.resume_reading()
        body, self.body = bytes(self.body), bytearray()
        return body

    def answer(self, response: Response) -> None:
        """Write the whole answer; nothing if the caller is gone."""
        # Only the last request of a connection is told that its caller is gone.
        if self.disconnected or self.response_complete or self.transport.is_closing():
            return
        request = self.request
        lines = self._own_lines(response) if response.headers else head_lines(response, request.id)
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        body = b"" if request.method == "HEAD" else response.body
        self.transport.write(
            b"".join((STATUS_LINE[response.status], self._servers_lines(), lines, end, body))
        )
        self.response_started = self.response_complete = True
        if self.keep_alive:
            self.connection.on_response_complete()
        else:
            self.connection.end(self)

    def _servers_lines(self) -> bytes:
        """Of the headers that uvicorn makes once a second."""
        made_of, lines = self._default_lines
        if made_of is not self.default_headers:
            lines = b"".join([b"%s: %s\r\n" % header for header in self.default_headers])
            Exchange._default_lines = self.default_headers, lines
        return lines

    def _own_lines(self, response: Response) -> bytes:
        """As `head_lines`, of an answer with headers of its own."""
        if ("connection", "close") in response.headers:
            self.keep_alive = False
        headers = encoded_headers(response, self.request.id)
        for name, value in headers:
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"no header can be {name!r}: {value!r}")
        return b"".join(
            [b"%s: %s\r\n" % header for header in headers if header != (b"connection", b"close")]
        )

    def let_go(self) -> None:
        """It is over. What is held here holds the exchange: memory that only Python's search for such rings would find."""
        del self.request, self.connection
