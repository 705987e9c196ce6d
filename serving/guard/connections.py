"""What a connection may cost before the front sees a request of it: URL and headers, time to arrive, and how many there are.

uvicorn (0.54) has no such limits, so this is its own HTTP protocol with them, and with our one shape for
bytes that are no HTTP. What could be read as two different requests is refused (serving/guard/framing.py), and so are connections
from elsewhere where nobody has allowed them (serving/guard/binding.py).
"""

import asyncio
import functools
import logging
import secrets
from typing import Any, ClassVar

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serving.guard.binding import is_guarded, is_loopback
from serving.guard.framing import MAX_HEADERS, MAX_URL_BYTES, require_clear_framing
from serving.inference import Inference
from serving.responses import RETRY_AFTER, Refusal, Response, encoded_headers, error_response, head_lines

MAX_HEADER_BYTES = 64 << 10  # of one request, with its path; as uvicorn's other protocol has it
LINGER_S = 1.0  # for a refused caller to read why: a few round trips of a slow line
MOST_LINGERING = 64  # of a worker: a flood of connections is not to take more descriptors than these
LAST_LOOK_S = 0.01  # not 0: the event loop would look before it reads
AT_ONCE = "slipway.at_once"  # among the scope's extensions: `answer_at_once` of its request


def limit_connections(inference: Inference) -> None:
    """Have uvicorn use our protocol in this process. BentoML names none, so uvicorn takes what is called "auto"."""
    HTTP_PROTOCOLS["auto"] = functools.partial(Connection, inference)  # type: ignore[assignment]  # it may be a callable


class Connection(HttpToolsProtocol):
    """One connection of a caller."""

    _lingering: ClassVar[set["Connection"]] = set()  # refused, of this process

    def __init__(self, inference: Inference, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._inference = inference
        self._fault: Refusal | None = None  # why the parser was stopped, if we stopped it
        self._deadline: float | None = None  # the event loop's seconds; None while nothing is waited for
        self._timer: asyncio.TimerHandle | None = None  # goes off at the deadline or before
        self._is_last_look = False
        self._is_in_head = True
        self._header_bytes = 0  # of this request so far
        self._num_headers = 0
        self._pending_bytes = 0  # received since the last piece of a body, or the last whole request
        self._went_on = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Refuse the connection if it must not be there, or there are too many; else wait for its headers."""
        super().connection_made(transport)
        most = self._inference.settings.max_connections
        if not is_guarded(self._inference.settings) and self.server and not is_loopback(self.server[0]):
            message = "this address can be reached from other machines, and there are no keys (SLIPWAY_KEYS, SLIPWAY_ALLOW_ANYONE)"
            self._refuse(Refusal("not_allowed", message))
        elif len(self.connections) > most:
            message = f"there are {most} connections, the limit (SLIPWAY_MAX_CONNECTIONS); try again later"
            self._refuse(Refusal("too_many_connections", message, headers=(RETRY_AFTER,)))
        else:
            self._wait(1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._arrived()
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, with an eye on callers that never go on, and on headers, chunk sizes and trailers that never end."""
        if self in self._lingering:
            return  # it was refused; read, so that the kernel resets nothing, and forgotten
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._wait(1)
        self._went_on = False
        super().data_received(data)
        self._pending_bytes = 0 if self._went_on else self._pending_bytes + len(data)
        if self._pending_bytes > MAX_HEADER_BYTES and not self.transport.is_closing() and self not in self._lingering:
            self._refuse(_headers_too_large())

    def on_url(self, url: bytes) -> None:
        """Count it."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parsing(Refusal("url_too_long", f"the URL is longer than the limit of {MAX_URL_BYTES} bytes"))
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it; also those behind a chunked body, which come through here as well."""
        self._count(len(name) + len(value))
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._stop_parsing(Refusal("headers_too_large", f"there are more headers than the limit of {MAX_HEADERS}"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body; the front answers for it within half of that."""
        try:
            require_clear_framing(self.headers, self.parser.get_http_version(), self.parser.should_upgrade())
        except Refusal as refusal:
            self._stop_parsing(refusal)
        self._is_in_head = False
        self._wait(2)
        super().on_headers_complete()
        if self.cycle is not None:
            if self._inference.is_draining:
                self.cycle.keep_alive = False  # so that the caller's next connection goes elsewhere
            if not self.access_logger.isEnabledFor(logging.INFO):  # what writes that log is behind `send`
                extensions: Any = {AT_ONCE: functools.partial(answer_at_once, self.cycle)}
                self.scope["extensions"] = extensions

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which the front counts."""
        self._went_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there; the next may begin."""
        super().on_message_complete()
        self._went_on, self._is_in_head, self._header_bytes, self._num_headers = True, True, 0, 0
        self._arrived()

    def send_400_response(self, msg: str) -> None:
        """What the parser did not take, in the one shape of every error."""
        self._refuse(self._fault or Refusal("malformed_request", "these bytes are no HTTP/1.1 request"))

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._stop_parsing(_headers_too_large())

    def _wait(self, num_timeouts: int) -> None:
        """A timer that goes off too early and looks again is cheaper than one armed and taken back twice for each request."""
        now, seconds = self.loop.time(), self._inference.settings.request_timeout_s
        self._deadline, self._is_last_look = now + num_timeouts * seconds, False
        if self._timer is None:
            self._timer = self.loop.call_at(now + seconds, self._look)  # no deadline that is set later will be before this

    def _arrived(self) -> None:
        self._deadline = None

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        now = self.loop.time()
        if now < self._deadline:
            self._timer = self.loop.call_at(min(self._deadline, now + self._inference.settings.request_timeout_s), self._look)
        elif not self._is_last_look:  # the loop itself may be late: what has arrived meanwhile is read first
            self._is_last_look = True
            self._timer = self.loop.call_later(LAST_LOOK_S, self._look)
        else:
            self._deadline = None
            self._too_late()

    def _too_late(self) -> None:
        if self._is_in_head and self._pending_bytes:
            seconds = self._inference.settings.request_timeout_s
            self._refuse(Refusal("header_timeout", f"the headers did not arrive within {seconds:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"))
        else:  # silence, or a body that the front has given up
            self.transport.close()

    def _stop_parsing(self, refusal: Refusal) -> None:
        self._fault = refusal
        raise ValueError(refusal.message)  # out of the parser, which then calls send_400_response

    def _refuse(self, refusal: Refusal) -> None:
        request_id = secrets.token_hex(8)
        response = error_response(refusal, request_id)
        self._inference.monitoring.refused(refusal.code)
        self._inference.monitoring.answered("other", response.status)
        lines = [b"%s: %s\r\n" % header for header in [*encoded_headers(response, request_id), (b"connection", b"close")]]
        self.transport.write(b"".join([STATUS_LINE[response.status], *lines, b"\r\n", response.body]))
        self._close_when_read()

    def _close_when_read(self) -> None:
        """End the connection once the caller has ended it, or after `LINGER_S`.

        To close at once while bytes of the caller are unread, or on their way, resets the connection, and the caller may lose an answer
        that it has not read yet (RFC 9112, section 9.6). So only our side of it ends now.
        """
        self._arrived()
        answers_wait = bool(self.pipeline)  # to requests that were sent before: they cannot be written any more
        if self.transport.is_closing() or answers_wait or len(self._lingering) >= MOST_LINGERING:
            self.transport.close()
            return
        self._lingering.add(self)
        self.connections.discard(self)  # it holds no place of those that are served
        if self.cycle is not None and not self.cycle.response_complete:  # its answer comes too late, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


def answer_at_once(cycle: RequestResponseCycle, response: Response, request_id: str) -> bool:
    """Write a whole answer in one piece, as two calls of the cycle's `send` would; False where these have to be made.

    `send` looks at every header for bytes that must not be there, which takes longer than all else it does. The headers here are
    constants, a length, and a request id that was looked at.
    """
    if response.headers or cycle.flow.write_paused or cycle.disconnected or cycle.response_started:
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    lines = [b"%s: %s\r\n" % header for header in cycle.default_headers]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    cycle.transport.write(b"".join([STATUS_LINE[response.status], *lines, head_lines(response, request_id), b"\r\n", response.body]))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


def _headers_too_large() -> Refusal:
    return Refusal("headers_too_large", f"path and headers are larger than the limit of {MAX_HEADER_BYTES} bytes")
