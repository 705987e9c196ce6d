"""Limits of connections that uvicorn lacks: their number, slow or large heads, callers that do not read.

A `Connection` holds uvicorn's own protocol and forwards asyncio's events to it. The application, as
wrapped by `tracked`, reports the begin and the end of each request, so nothing here parses HTTP.
Bytes that never become a request get 408, 431, uvicorn's plain 400, or a close.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from serving.http.framing import MAX_HEAD_BYTES, headers_too_large
from serving.http.request_ids import new_request_id
from serving.http.responses import RETRY_AFTER, Refusal, error_response, response_bytes

LINGER_S = 1.0  # time for a refused caller to read the reason: a few round trips of a slow line
MAX_LINGERING = 64  # refused connections of a worker that stay open for that long
_TICKS = 10  # checks of each connection within the time-out
_SLICE_BYTES = 32 << 10
_KEY = "slipway_connection"  # in the state of a request's ASGI scope


class ConnectionLimits:
    """Creates uvicorn's protocol for each connection (uvicorn's setting `http`) and times them.

    `count` is called with the error code and the status of each refusal.
    """

    def __init__(
        self, max_connections: int, timeout_s: float, count: Callable[[str, int], None]
    ) -> None:
        self.max_connections = max_connections
        self.timeout_s = timeout_s
        self.count = count
        self.connections: set[Connection] = set()
        self._num_lingering = 0
        self._is_ticking = False

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
    ) -> "Connection":
        """The protocol of a new connection; the arguments are those of uvicorn's protocols."""
        return Connection(self, app_state, config=config, server_state=server_state)

    def replace_uvicorns_default(self) -> None:
        """Use this in every server of the process: BentoML's configuration of uvicorn has no `http`."""
        HTTP_PROTOCOLS["auto"] = self  # type: ignore[assignment]  # uvicorn takes a factory as well
        WS_PROTOCOLS["auto"] = None

    def add(self, connection: "Connection") -> int:
        """Time a new connection from now on; the number of connections that are served."""
        self.connections.add(connection)
        if not self._is_ticking:
            self._tick()
        return len(self.connections) - self._num_lingering

    def remove(self, connection: "Connection", *, was_lingering: bool) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self._num_lingering -= was_lingering

    def may_linger(self) -> bool:
        """Count a connection as refused; True if it may stay open for a while."""
        self._num_lingering += 1
        return self._num_lingering <= MAX_LINGERING

    def _tick(self) -> None:
        """Age all connections: in ticks, not by the clock, so a suspended process times nobody out."""
        for connection in tuple(self.connections):
            connection.tick()
        self._is_ticking = bool(self.connections)
        if self._is_ticking:
            asyncio.get_running_loop().call_later(self.timeout_s / _TICKS, self._tick)


class Connection(asyncio.Protocol):
    """One connection: uvicorn's protocol with limits around it."""

    def __init__(
        self, limits: ConnectionLimits, app_state: dict[str, Any], **arguments: Any
    ) -> None:
        self._limits = limits
        # A weak reference: uvicorn's protocol keeps the state of its last request.
        state = app_state | {_KEY: weakref.ref(self)}
        self._http = HttpToolsProtocol(app_state=state, **arguments)
        self._transport: Any = None
        self._is_refused = False  # what still arrives is dropped, which avoids a TCP reset
        self._num_active = 0  # requests; 2 for a moment when one follows another
        self._is_receiving = False  # the application waits for more of a body
        self._is_body_owed = False
        self._is_at_eof = False
        self._will_go_on = False
        self._held: bytes | memoryview = b""  # not forwarded yet
        self._num_bytes = 0  # forwarded since the application last received something
        self._age: int | None = 0  # ticks that a head has taken; None: none is waited for
        self._num_unsent, self._stalled_ticks = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to time the connection; refuse it above the limit."""
        self._transport = transport
        self._http.connection_made(self._transport)
        most = self._limits.max_connections
        if self._limits.add(self) > most:
            message = f"there are {most} connections, the limit (SLIPWAY_MAX_CONNECTIONS); try again later"
            self._refuse(Refusal("too_many_connections", message, headers=(RETRY_AFTER,)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._limits.remove(self, was_lingering=self._is_refused)
        if not self._is_refused:
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Forward the data if somebody waits for them; else hold them and stop reading."""
        if self._is_refused:
            return
        self._held = b"".join((self._held, data)) if self._held else data
        if self._num_active and not self._is_receiving:
            self._transport.pause_reading()
        else:
            self._forward()

    def eof_received(self) -> bool:
        """Keep the connection open for the answers to what arrived in whole."""
        self._is_at_eof = True
        self._go_on_soon()
        return not self._is_refused and (self._num_active > 0 or self._num_bytes > 0)

    def pause_writing(self) -> None:
        """Forward."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Forward: the caller has read."""
        self._stalled_ticks = 0
        self._http.resume_writing()

    def begin(self, headers: dict[bytes, bytes]) -> None:
        """The application has a request with these headers."""
        self._num_active += 1
        has_length = headers.get(b"content-length", b"0") != b"0"
        self._is_body_owed = has_length or b"transfer-encoding" in headers
        self._num_bytes, self._age = 0, None

    async def receive(self, receive: Receive) -> Message:
        """The application wants more of a body."""
        if self._held:
            self._forward()
        self._is_receiving = True
        try:
            message = await receive()
        finally:
            self._is_receiving = False
        self._num_bytes = 0
        self._is_body_owed = message.get("more_body", False)
        return message

    def holding(self, send: Send) -> Send:
        """Hold an answer open whose request has a body that was not read.

        uvicorn would close the connection at its end, and the reset would take the answer away
        from a caller that still sends; `end` lingers instead. A chunked answer needs its end.
        """
        is_chunked = True

        async def hold(message: Message) -> None:
            nonlocal is_chunked
            if message["type"] == "http.response.start":
                is_chunked = all(name != b"content-length" for name, _ in message["headers"])
            elif self._is_body_owed and not is_chunked:
                message = {**message, "more_body": True}
            await send(message)

        return hold

    def end(self) -> None:
        """The application has answered. A pipelined request begins before `_leave` is called."""
        if self._is_body_owed:
            self._linger()
        self._http.loop.call_soon(self._leave)

    def tick(self) -> None:
        """End the connection if a head takes too long, or its caller reads nothing."""
        num_unsent = self._transport.get_write_buffer_size()
        is_stalled = 0 < self._num_unsent <= num_unsent
        self._stalled_ticks = self._stalled_ticks + 1 if is_stalled else 0
        self._num_unsent = num_unsent
        if self._age is not None:
            self._age += 1
        if self._stalled_ticks > _TICKS:
            self._transport.abort()
        elif self._age is not None and self._age > _TICKS and not self._is_over():
            self._time_out()

    def _time_out(self) -> None:
        if self._num_bytes:
            seconds = f"{self._limits.timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            message = f"the headers did not arrive within {seconds}"
            self._refuse(Refusal("header_timeout", message))
        else:
            self._transport.close()

    def _is_over(self) -> bool:
        return self._is_refused or self._transport.is_closing()

    def _forward(self) -> None:
        """Forward a slice of what is held: it may hold thousands of pipelined requests."""
        if self._is_over():
            return
        data, self._held = self._held, b""
        if len(data) > _SLICE_BYTES:
            whole = memoryview(data)
            data, self._held = whole[:_SLICE_BYTES], whole[_SLICE_BYTES:]
        self._num_bytes += len(data)
        if self._age is None and not self._num_active:
            self._age = 0
        self._http.data_received(data)  # type: ignore[arg-type]  # its parser takes any buffer
        if self._transport.is_closing():
            self._limits.count("malformed_request", 400)  # which uvicorn has sent
        elif self._held or self._num_bytes > MAX_HEAD_BYTES:
            # The application first begins the request, or receives the body, that this may be.
            self._transport.pause_reading()
            self._go_on_soon()
        else:
            self._transport.resume_reading()

    def _go_on_soon(self) -> None:
        if not self._will_go_on:
            self._will_go_on = True
            self._http.loop.call_soon(self._go_on)

    def _leave(self) -> None:
        self._num_active -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Go on with what is held, or with the end, if the application waits for it."""
        self._will_go_on = False
        if self._is_over() or (self._num_active and not self._is_receiving):
            return
        if self._held:
            self._forward()
        elif self._num_bytes > MAX_HEAD_BYTES and self._num_active:
            self._linger()  # chunk extensions or trailers of a request with an answer of its own
        elif self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(headers_too_large())
        elif self._is_at_eof and not self._num_bytes:
            self._transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        request_id = new_request_id()
        response = error_response(refusal, request_id)
        self._limits.count(refusal.code, response.status)
        self._transport.write(response_bytes(response, request_id))
        self._linger()

    def _linger(self) -> None:
        """End our side, and close once the caller has ended, or after `LINGER_S`.

        A close while the caller sends would reset the connection, and the caller may lose an answer
        that it has not read yet (RFC 9112, section 9.6).
        """
        if self._is_over():
            return
        self._http.connection_lost(ConnectionAbortedError())
        self._is_refused, self._held = True, b""
        if self._limits.may_linger() and self._transport.can_write_eof():
            self._transport.resume_reading()
            with contextlib.suppress(OSError):  # the caller is gone already
                self._transport.write_eof()
            self._http.loop.call_later(LINGER_S, self._transport.close)
        else:
            self._transport.close()


def tracked(app: ASGIApp) -> ASGIApp:
    """The same application, which reports its requests to their connections."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        reference = scope.get("state", {}).get(_KEY)
        connection: Connection | None = reference() if reference else None
        if connection is None:  # the lifespan, or another server
            await app(scope, receive, send)
            return
        connection.begin(dict(scope["headers"]))
        try:
            await app(scope, lambda: connection.receive(receive), connection.holding(send))
        finally:
            connection.end()

    return serve
