"""Limits on connections that uvicorn lacks: number, slow or large heads, callers that stall.

A `Connection` is uvicorn's own protocol, which parses HTTP, with limits around its events. Bytes
that never become a request are answered with an error (400, 408, 431, 503), or the connection is
closed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from slipway.serving.http.framing import MAX_HEAD_BYTES, headers_too_large
from slipway.serving.http.refusal_log import Peer
from slipway.serving.http.responses import RETRY_AFTER, Refusal, Response, response_bytes
from slipway.serving.http.routes import new_request_id

LINGER_S = 1.0  # time for a refused caller to read the reason: a few round trips of a slow line
MAX_LINGERING = 64  # refused connections of a worker that stay open that long
MIN_IDLE_S = 5.0  # least idle time before a connection is closed to make room for another
_TICKS = 10  # checks of each connection within the time-out
_SLICE_BYTES = 32 << 10  # bytes of a body that are parsed at once
_HEAD_SLICE_BYTES = 2 << 10  # small, so that few pipelined requests are parsed early
_CONTINUE = b"HTTP/1.1 100 "
# Without uvicorn's warnings, one for each bad request: callers could fill the disk with them.
_errors = logging.getLogger("uvicorn.error.slipway")
_errors.setLevel(logging.ERROR)


class ConnectionLimits:
    """Creates a `Connection` for each connection (uvicorn's setting `http`), and ends slow ones.

    `respond` creates the response to a request that a connection refuses. Its arguments are the
    refusal, a request id, the caller's address, and the path (empty if it has not arrived).
    """

    def __init__(
        self,
        max_connections: int,
        timeout_s: float,
        idle_timeout_s: int,
        respond: Callable[[Refusal, str, Peer, str], Response],
    ) -> None:
        self.max_connections = max_connections
        self.timeout_s = timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.respond = respond
        self.connections: set[Connection] = set()
        self.idle: dict[Connection, float] = {}  # idle since this loop time, the oldest first
        self._num_lingering = 0
        self._is_ticking = False

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "Connection":
        return Connection(self, config, server_state, app_state, _loop)

    def replace_uvicorns_default(self) -> None:
        """Make every uvicorn server of this process use these limits.

        Replaces uvicorn's default, because BentoML gives no access to uvicorn's setting `http`.
        """
        HTTP_PROTOCOLS["auto"] = self  # type: ignore[assignment]  # uvicorn takes a factory as well
        WS_PROTOCOLS["auto"] = None

    def add(self, connection: "Connection") -> bool:
        """Register a new connection. Returns False if it must be refused.

        If the limit is exceeded, the longest idle connection is closed in its place. A connection
        that became idle just now is not closed, because its caller may be sending a request.
        """
        self.connections.add(connection)
        if not self._is_ticking:
            self._tick()
        if len(self.connections) - self._num_lingering <= self.max_connections:
            return True
        oldest = next(iter(self.idle), None)
        now = asyncio.get_running_loop().time()
        if oldest is None or now - self.idle[oldest] < MIN_IDLE_S:
            return False
        self.remove(oldest)
        oldest.transport.close()
        return True

    def remove(self, connection: "Connection", *, was_lingering: bool = False) -> None:
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        self._num_lingering -= was_lingering

    def may_linger(self) -> bool:
        """Count a connection that is about to close.

        Returns True if it may linger, so that its caller can read the response. The number of
        lingering connections is limited.
        """
        self._num_lingering += 1
        return self._num_lingering <= MAX_LINGERING

    def _tick(self) -> None:
        """Call `tick` on all connections, once per interval of the timer.

        Timeouts count ticks and not seconds, so that a suspended process causes none.
        """
        for connection in tuple(self.connections):
            connection.tick()
        self._is_ticking = bool(self.connections)
        if self._is_ticking:
            asyncio.get_running_loop().call_later(self.timeout_s / _TICKS, self._tick)


class AnswerTransport:
    """Wraps the transport of uvicorn's protocol: sends fewer packets, and closes gracefully.

    uvicorn writes the head and the body of a response separately, which takes two system calls and
    two packets; this class sends both at once. uvicorn also closes a connection while the caller
    still sends a body. The resulting reset may destroy a response that the caller has not read yet
    (RFC 9112, section 9.6); this class lingers instead.
    """

    def __init__(
        self, transport: asyncio.Transport, may_linger: Callable[[], bool] = lambda: False
    ) -> None:
        self._transport = transport
        self._may_linger = may_linger
        self._unsent = b""
        self._is_holding = False
        self.is_body_owed = False  # the caller has not sent all of the body
        self.is_lingering = False  # what still arrives is dropped
        self.has_input = False  # the connection holds bytes that are not parsed yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold_head(self) -> None:
        """Hold back the next response head until its body is written or the connection closes."""
        self._is_holding = True

    def resume_reading(self) -> None:
        """Resume reading, unless bytes that were read before are still waiting to be parsed."""
        if not self.has_input:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self._is_holding and not data.startswith(_CONTINUE):
            self._unsent, self._is_holding = data, False
        else:
            self._transport.write(self._unsent + data)
            self._unsent = b""

    def send(self) -> None:
        """Send the held response head, if there is one, without a body."""
        if self._unsent:
            self.write(b"")

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        self.send()
        if self.is_body_owed:
            self.linger()
        else:
            self._transport.close()

    def linger(self) -> None:
        """Close gracefully: send end-of-file, then discard input until the caller closes.

        After `LINGER_S` seconds the connection is closed in any case.
        """
        self.send()
        if self.is_closing():
            return
        self.is_lingering = True
        if self._may_linger() and self._transport.can_write_eof():
            self._transport.resume_reading()
            with contextlib.suppress(OSError):  # the caller is gone already
                self._transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
        else:
            self._transport.close()


class Connection(HttpToolsProtocol):
    """One HTTP connection: uvicorn's protocol with time and size limits."""

    transport: AnswerTransport  # type: ignore[assignment]  # behaves like one

    def __init__(self, limits: ConnectionLimits, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logger = _errors
        self.timeout_keep_alive = limits.idle_timeout_s
        self.url = b""  # URL of the last request, as far as it has arrived
        self._limits = limits
        self._held: bytes | memoryview = b""  # bytes that are not parsed yet
        self._previous: Any = None  # cycle before the last one
        self._refusal: Refusal | None = None  # to be sent after the answers to earlier requests
        self._is_at_eof = False
        self._num_bytes = 0  # bytes of an incomplete head, chunk extensions or trailers
        self._age = 0  # ticks that a head has taken
        self._num_unsent, self._stalled_ticks = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeouts of a new connection, or refuse it if there are too many."""
        answers = AnswerTransport(cast(asyncio.Transport, transport), self._limits.may_linger)
        super().connection_made(answers)  # type: ignore[arg-type]
        answers.hold_head()
        if not self._limits.add(self):
            most = self._limits.max_connections
            limit = f"{most} connections, the limit (SLIPWAY_MAX_CONNECTIONS)"
            message = f"there are {limit}; try again later"
            self._refuse(Refusal("too_many_connections", message, headers=(RETRY_AFTER,)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.remove(self, was_lingering=self.transport.is_lingering)
        self.transport.is_body_owed = False
        super().connection_lost(exc)
        self.pipeline.clear()
        # Both refer to this connection.
        self.cycle = self._previous = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless an earlier request is still being processed."""
        if not self.transport.is_closing() and self._refusal is None:
            self._held = b"".join((self._held, data)) if self._held else data
            self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open until the complete requests have their responses."""
        self._is_at_eof = True
        return self._is_answering() and not self.cycle.more_body and not self.transport.is_closing()

    def resume_writing(self) -> None:
        self._stalled_ticks = 0
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes = self._num_bytes or 1  # perhaps in one packet with the request before

    def on_headers_complete(self) -> None:
        self._previous = self.cycle
        super().on_headers_complete()
        self._num_bytes = self._age = 0
        self.transport.is_body_owed = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_bytes = 0
        self.transport.is_body_owed = False

    def on_response_complete(self) -> None:
        """After a response, parse bytes received meanwhile, or close a connection that must end."""
        self.transport.send()
        self.transport.hold_head()
        super().on_response_complete()
        if self._is_answering() or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self.transport.is_body_owed:  # later bytes could belong to it
            self._end()
        elif self._held:
            self._parse()
        elif self._is_at_eof:
            self.transport.close()
        elif self._num_bytes:  # the next head has begun
            self._unset_keepalive_if_required()
        else:
            self._limits.idle[self] = self.loop.time()

    def tick(self) -> None:
        """End the connection if its head arrives too slowly, or if its caller does not read."""
        num_unsent = self.transport.get_write_buffer_size()
        is_stalled = 0 < self._num_unsent <= num_unsent
        self._stalled_ticks = self._stalled_ticks + 1 if is_stalled else 0
        self._num_unsent = num_unsent
        if self._stalled_ticks > _TICKS:
            self.transport.abort()
        elif not self._is_answering() and (self._num_bytes or self.cycle is None):
            self._age += 1
            if self._age > _TICKS and not self.transport.is_closing():
                self._time_out()

    def _time_out(self) -> None:
        if self._num_bytes:
            seconds = f"{self._limits.timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            message = f"the headers did not arrive within {seconds}"
            self._refuse(Refusal("header_timeout", message))
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        """Return True until the response to the last request is complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parse the received bytes in slices.

        Stops when a request is complete; the bytes after it wait until its response is sent.
        """
        rest = memoryview(self._held)
        while rest and not self.transport.is_closing() and self._refusal is None:
            if self._is_answering() and not self.cycle.more_body:
                self.transport.pause_reading()  # until the response is complete
                break
            size = _SLICE_BYTES if self._is_answering() else _HEAD_SLICE_BYTES
            piece = rest[:size]
            self._num_bytes += len(piece)
            rest = rest[self._feed(piece) :]
            if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(headers_too_large())
        self._held = rest
        was_full, self.transport.has_input = self.transport.has_input, len(rest) > 0
        if was_full and not rest and not self.flow.read_paused:  # by uvicorn, for its own queue
            self.transport.resume_reading()

    def _feed(self, piece: memoryview) -> int:
        """Feed bytes to the HTTP parser. Returns the number of bytes that it consumed.

        Replaces uvicorn's `data_received`, which loses the bytes after a request with `Upgrade`.
        """
        self._unset_keepalive_if_required()
        self._limits.idle.pop(self, None)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:  # ignored: no protocol is supported
            num_parsed: int = upgrade.args[0]
            return num_parsed
        except httptools.HttpParserError:
            message = "the request is not valid HTTP; send HTTP/1.1"
            self._refuse(Refusal("malformed_request", message))
        return len(piece)

    def _refuse(self, refusal: Refusal) -> None:
        if self.pipeline and self.cycle.more_body:  # the refusal answers the last request
            self.pipeline.popleft()
            self.cycle = self._previous
        if self._is_answering() and not self.cycle.more_body:
            self._refusal = refusal
            return
        if self._is_answering() and self.cycle.response_started:  # one request has one answer
            self._end()
            return
        request_id = new_request_id()
        path = unquote_to_bytes(self.url.partition(b"?")[0]).decode("latin-1")
        response = self._limits.respond(refusal, request_id, self.client, path)
        self.transport.write(response_bytes(response, request_id))
        self._end()

    def _end(self) -> None:
        """Close the connection gracefully, and discard the bytes that still arrive."""
        self.transport.linger()
        super().connection_lost(ConnectionAbortedError())
