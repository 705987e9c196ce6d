"""One request and its answer on a connection, from its headers to the last byte of the answer.

uvicorn's own makes an ASGI scope for each request, and sends an answer as messages whose headers it checks one by one. Between our
connection and our front that is a detour: the request goes there as it is, and the answer comes back whole.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from serving.responses import Response, encoded_headers, head_lines
from serving.routes import Request

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Exchange(RequestResponseCycle):
    """Has what uvicorn's connection looks at and sets in one of its own, but is asked and answered without ASGI."""

    request: Request  # set by whoever makes it
    task: "asyncio.Task[None]"  # that answers it, once it has begun

    def __init__(self, connection: "HttpToolsProtocol", *, keep_alive: bool, expects_100_continue: bool) -> None:
        # Not uvicorn's, which asks for a scope.
        self.transport, self.flow = connection.transport, connection.flow
        self.default_headers = connection.server_state.default_headers
        self.on_response = connection.on_response_complete
        self.message_event = asyncio.Event()  # more of the body is there, or no more will come
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_100_continue
        self.body = bytearray()
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False

    async def receive(self) -> "ASGIReceiveEvent":
        """As ASGI has it; a body that is there already is not waited for."""
        if self.more_body or self.waiting_for_100_continue or self.disconnected or self.response_complete:
            return await super().receive()
        self.flow.resume_reading()  # it may have been too much at once; a caller that hangs up is to be noticed
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": False}

    async def answer(self, response: Response) -> None:
        """Write the whole answer, once the caller has read what was written before; nothing if the caller is gone."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        # Only the last request of a connection is told that its caller is gone.
        if self.disconnected or self.response_complete or self.transport.is_closing():
            return
        self.response_started = self.response_complete = True
        self.transport.write(b"".join(self._pieces(response)))
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _pieces(self, response: Response) -> list[Any]:
        pieces = [STATUS_LINE[response.status], *[b"%s: %s\r\n" % header for header in self.default_headers]]
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
        del self.request
        self.on_response = _nothing


def _nothing() -> None:
    """The answer has ended before."""
