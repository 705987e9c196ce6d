"""What a connection may cost before the application sees a request of it: URL and headers, time to arrive, and how many there are.

uvicorn (0.54) has no such limits, so this is its own HTTP protocol with them, and with our one shape for
bytes that are no HTTP. What could be read as two different requests is refused (serving/guard/framing.py), and so are connections
from elsewhere where nobody has allowed them (serving/auth/binding.py).
"""

import asyncio
import functools
import logging
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from urllib.parse import unquote

import httptools
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from serving.app import Application
from serving.guard.exchange import Exchange
from serving.guard.flow import Flow
from serving.guard.framing import MAX_HEADERS, MAX_URL_BYTES, clearly_framed
from serving.guard.repeated_head import Head, RepeatedHead, repeated_head
from serving.http.callers import is_loopback
from serving.http.request_ids import new_request_id, request_id_of
from serving.http.responses import RETRY_AFTER, Refusal, encoded_headers, error_response
from serving.http.routes import Request
from serving.worker import ModelWorker

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEADER_BYTES = 64 << 10  # of one request, with its path; as uvicorn's other protocol has it
LINGER_S = 1.0  # for a refused caller to read why: a few round trips of a slow line
MOST_LINGERING = (
    64  # of a worker: a flood of connections is not to take more descriptors than these
)
LAST_LOOK_S = 0.01  # not 0: the event loop would look before it reads


def limit_connections(worker: ModelWorker, application: Application) -> None:
    """Have uvicorn use our protocol in this process. BentoML names none, so uvicorn takes what is called "auto"."""
    HTTP_PROTOCOLS["auto"] = connections_to(worker, application)


def connections_to(worker: ModelWorker, application: Application) -> Any:
    """What uvicorn makes a protocol with, for each connection to a port that `application` answers at."""
    return functools.partial(Connection, worker, application)


class _Refused(RequestResponseCycle):
    """What was no request has its place behind the requests before it on its connection."""

    def __init__(self, refusal: Refusal) -> None:
        # Not uvicorn's, which asks for a scope.
        self.refusal = refusal


class Connection(HttpToolsProtocol):
    """One connection of a caller."""

    _lingering: ClassVar[set["Connection"]] = set()  # ended from our side, of this process
    flow: Flow

    def __init__(self, worker: ModelWorker, application: Application, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._worker = worker
        self._application = application
        self._head: Head | None = None  # of the last request that was parsed
        self._repeated: RepeatedHead | None = None  # the last one that may come again
        self._due: deque[Exchange] = deque()  # at most one, which is answered next
        self._answering: asyncio.Task[None] | None = None  # answers one after the other
        self._idle: asyncio.Future[None] | None = None  # is waited for where none is due
        self._fault: Refusal | None = None  # why the parser was stopped, if we stopped it
        self._is_deaf = (
            False  # what comes is read, so that the kernel resets nothing, and forgotten
        )
        self._timeout_s = worker.settings.request_timeout_s
        self._look_s = min(self._timeout_s, self.timeout_keep_alive)
        self._deadline: float | None = (
            None  # the event loop's seconds; None while nothing is waited for
        )
        self._timer: asyncio.TimerHandle | None = None  # goes off at the deadline or before
        self._is_last_look = False
        self._is_between = True  # nothing of the next request has been received
        self._is_in_head = True
        self._head_has_ended = False  # with what was received last
        self._new_bytes = 0  # received last
        self._head_bytes = 0  # received since the data in which this request began, and with it
        self._pending_bytes = (
            0  # received since the last piece of a body, or the last whole request
        )
        self._went_on = False
        self._logs_requests = self.access_logger.isEnabledFor(logging.INFO)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Refuse the connection if it must not be there, or there are too many; else wait for its headers."""
        super().connection_made(transport)
        self.flow = Flow(transport, self.pipeline, self._timeout_s)
        most = self._worker.settings.max_connections
        if (
            not self._worker.caller_check.allows_remote
            and self.server
            and not is_loopback(self.server[0])
        ):
            message = "this address can be reached from other machines, and there are no keys (SLIPWAY_KEYS, SLIPWAY_ALLOW_ANYONE)"
            self._refuse(Refusal("not_allowed", message))
        elif len(self.connections) > most:
            message = f"there are {most} connections, the limit (SLIPWAY_MAX_CONNECTIONS); try again later"
            self._refuse(Refusal("too_many_connections", message, headers=(RETRY_AFTER,)))
        else:
            self._wait(self._timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline, and the fault: it holds where it was found, and so this connection."""
        self._deadline = self._fault = None
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._forget_waiting()
        if self._answering is not None and self._idle is not None:
            self._answering.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's says nothing, which ends the connection
        """The caller sends no more, but may still read: True while its last request, which is whole, waits for its answer.

        The connection ends with that one: while others wait behind it nothing is read, not even this.
        """
        cycle = self.cycle
        if self._is_deaf or cycle is None or cycle.response_complete or not self._is_in_head:
            return False
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Parse, with an eye on callers that never go on, and on headers, chunk sizes and trailers that never end."""
        if self._is_deaf:
            return
        is_new = self._is_between
        if is_new and self._repeated is not None and self._begin_repeated(data, self._repeated):
            return
        self._went_on = self._head_has_ended = False
        self._new_bytes = len(data)
        self._head_bytes += self._new_bytes
        self._parse(data)
        self._pending_bytes = 0 if self._went_on else self._pending_bytes + self._new_bytes
        if self._went_on and self._is_in_head:  # a whole request, as nearly always
            if is_new:
                self._repeated = self._repeated_head(data)
            return
        if (
            self._pending_bytes > MAX_HEADER_BYTES
            and not self.transport.is_closing()
            and not self._is_deaf
        ):
            self._refuse(_headers_too_large())
        elif self._head_has_ended and not self._is_in_head:
            self._wait_for_body()
        elif (
            self._pending_bytes == len(data)
            and self._is_in_head
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._wait(self._timeout_s)  # for the rest of a head that has begun

    def _begin_repeated(self, data: bytes, repeated: RepeatedHead) -> bool:
        """Begin a request, if these are the whole of one with the known head; False if they are anything else."""
        body = repeated.body_in(data)
        if body is None:
            return False
        self._deadline, self._pending_bytes = None, 0
        self._begin(repeated.head, keep_alive=True, body=body)
        return True

    def _repeated_head(self, data: bytes) -> RepeatedHead | None:
        cycle = self.cycle
        if self._head is None or not isinstance(cycle, Exchange) or not cycle.keep_alive:
            return None
        return repeated_head(self._head, data)

    def _parse(self, data: "bytes | memoryview") -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except (
                httptools.HttpParserUpgrade
            ) as upgrade:  # not spoken here: what follows is HTTP as before (RFC 9110, section 7.8)
                data = memoryview(data)[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self._refuse(
                    self._fault
                    or Refusal("malformed_request", "these bytes are no HTTP/1.1 request")
                )
                return
            else:
                return

    def on_message_begin(self) -> None:
        """A request begins. uvicorn would make a scope of it, which most never need."""
        self.url, self.headers, self._head_bytes = b"", [], self._new_bytes
        self._is_between, self._head = False, None

    def on_url(self, url: bytes) -> None:
        """Count it."""
        self.url += url
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parsing(
                Refusal(
                    "url_too_long", f"the URL is longer than the limit of {MAX_URL_BYTES} bytes"
                )
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it; also those behind a chunked body, which come through here as well."""
        self.headers.append((name.lower(), value))
        if len(self.headers) > MAX_HEADERS:
            self._stop_parsing(
                Refusal(
                    "headers_too_large", f"there are more headers than the limit of {MAX_HEADERS}"
                )
            )

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if self._head_bytes > MAX_HEADER_BYTES and self._exact_head_bytes() > MAX_HEADER_BYTES:
            self._stop_parsing(_headers_too_large())
        version, asks_for_upgrade = self.parser.get_http_version(), self.parser.should_upgrade()
        try:
            headers = clearly_framed(self.headers, version, asks_for_upgrade)
        except Refusal as refusal:
            self._stop_parsing(refusal)
        self._is_in_head, self._head_has_ended = False, True
        path, query = _path_and_query(self.url)
        # What writes the log of accesses is behind uvicorn's `send`.
        if self._logs_requests or not self._application.answers(path):
            self._begin_by_asgi(is_1_0=version == "1.0")
        else:
            self._head = Head(self.parser.get_method().decode("ascii"), path, query, headers)
            # Of HTTP/1.0 neither is known here; of expectations only this one passes.
            is_1_1 = version == "1.1"
            self._begin(
                self._head,
                keep_alive=is_1_1 and self.parser.should_keep_alive(),
                expects_100_continue=is_1_1 and b"expect" in headers,
            )

    def _begin(
        self,
        head: Head,
        *,
        keep_alive: bool,
        expects_100_continue: bool = False,
        body: bytes | None = None,
    ) -> None:
        if self._worker.is_draining:
            keep_alive = False  # so that the caller's next connection goes elsewhere
        exchange = Exchange(
            self, keep_alive=keep_alive, expects_100_continue=expects_100_continue, body=body
        )
        method, path, query, headers = head
        exchange.request = Request(
            request_id_of(headers),
            method,
            path,
            query,
            headers,
            exchange.receive,  # type: ignore[arg-type]  # uvicorn's messages are ASGI's
            perf_counter(),
        )
        before, self.cycle = self.cycle, exchange
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def _begin_by_asgi(self, *, is_1_0: bool) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        if is_1_0:
            self.expect_100_continue = False
        super().on_headers_complete()
        if self.cycle is not None and self._worker.is_draining:
            self.cycle.keep_alive = False

    def _should_upgrade(self) -> bool:
        """Never."""
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        """Also for a request that had to wait for those before it on its connection."""
        if not isinstance(cycle, Exchange):
            if isinstance(cycle, _Refused):
                self._refuse(cycle.refusal)
            else:
                super()._start_asgi_task(cycle, app)
            return
        self._due.append(cycle)
        if self._answering is None:
            self._answering = self.loop.create_task(self._answer())
        elif self._idle is not None:
            idle, self._idle = self._idle, None
            idle.set_result(None)
        self.tasks.add(
            self._answering
        )  # while there is something to answer: the service does not end before

    async def _answer(self) -> None:
        """One request after the other: to make and register a task for each takes longer than to wake this one."""
        own: Any = self._answering
        try:
            while self._due:
                exchange = self._due.popleft()
                request = exchange.request
                try:
                    request.body = exchange.whole_body()
                    response = await self._application.respond(request)
                    if response is not None:
                        if self.flow.write_paused and not exchange.disconnected:
                            await (
                                self.flow.drain()
                            )  # the caller has not read what was written before
                        exchange.answer(response)
                finally:
                    exchange.let_go()
                    if (
                        not exchange.response_complete and not exchange.disconnected
                    ):  # the task was cancelled: the service ends
                        self.transport.close()
                if self._due:  # it was sent at once with this one; other callers have their turn
                    await asyncio.sleep(0)
                elif not self.transport.is_closing():
                    del (
                        exchange,
                        request,
                        response,
                    )  # they are not to be held until the next one comes
                    self.tasks.discard(own)
                    self._idle = self.loop.create_future()
                    await self._idle
        finally:
            self.tasks.discard(own)
            self._answering = self._idle = None

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which the application counts."""
        self._went_on = True
        if isinstance(self.cycle, Exchange):
            self.cycle.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there; the next may begin."""
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.has_all()
        else:
            super().on_message_complete()
        self._went_on, self._is_in_head, self._is_between, self._deadline = True, True, True, None
        if (
            cycle is not None and cycle.response_complete
        ):  # it was answered before its body had ended
            self._wait(self.timeout_keep_alive)

    def _exact_head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def on_response_complete(self) -> None:
        """Go on with the next request that has come, or wait for one; with our timer instead of one for each request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self.flow.require_reading()
            return
        following = self.pipeline.pop() if self.pipeline else None
        if self.flow.read_paused:
            self.flow.resume_reading()
        if following:
            self._start_asgi_task(*following)
            if not self._is_in_head:
                self._wait_for_body()
        elif self._is_in_head:  # else its body is still waited for
            self._wait(self._timeout_s if self._pending_bytes else self.timeout_keep_alive)

    def end(self, exchange: Exchange) -> None:
        """With the answer to it, which has just been written."""
        self.server_state.total_requests += 1
        if (
            exchange.more_body or self.flow.read_paused
        ):  # there is more that the caller has sent, or sends
            self._close_when_read()
        else:
            self._close()

    def shutdown(self) -> None:
        """End with the answer that is under way, or at once where there is none."""
        super().shutdown()
        self.flow.require_reading()

    def _wait(self, seconds: float) -> None:
        """A timer that goes off too early and looks again is cheaper than several armed and taken back for each request."""
        now = self.loop.time()
        self._deadline, self._is_last_look = now + seconds, False
        if self._timer is None:
            self._timer = self.loop.call_at(
                now + self._look_s, self._look
            )  # no deadline that is set later will be before this

    def _wait_for_body(self) -> None:
        """The application answers for it within half of that. Behind other requests it is not read before they are answered."""
        if not self.pipeline:
            self._wait(2 * self._timeout_s)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        now = self.loop.time()
        if now < self._deadline:
            self._timer = self.loop.call_at(min(self._deadline, now + self._look_s), self._look)
        elif (
            not self._is_last_look
        ):  # the loop itself may be late: what has arrived meanwhile is read first
            self._is_last_look = True
            self._timer = self.loop.call_later(LAST_LOOK_S, self._look)
        else:
            self._deadline = None
            self._too_late()

    def _too_late(self) -> None:
        if self._is_in_head and self._pending_bytes:
            message = f"the headers did not arrive within {self._timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            self._refuse(Refusal("header_timeout", message))
        else:  # silence, or a body that the application has given up
            self._close()

    def _stop_parsing(self, refusal: Refusal) -> NoReturn:
        self._fault = refusal
        raise ValueError(refusal.message)  # out of the parser

    def _refuse(self, refusal: Refusal) -> None:
        """What was received last, in the one shape of every error, and end the connection; behind the answers that are still to come."""
        before = self.cycle is not None and not self.cycle.response_complete
        if (
            not self._is_in_head
        ):  # it was in the body of the last request, which is to be answered by this
            before = bool(self.pipeline)
            if before:
                _let_go(self.pipeline.popleft())
        if before:
            self._is_deaf = True
            self.flow.pause_reading()
            self.pipeline.appendleft((_Refused(refusal), self.app))
            return
        request_id = new_request_id()
        response = error_response(refusal, request_id)
        self._worker.metrics.refused(refusal.code)
        self._worker.metrics.answered("other", response.status)
        lines = [
            b"%s: %s\r\n" % header
            for header in [*encoded_headers(response, request_id), (b"connection", b"close")]
        ]
        self.transport.write(
            b"".join([STATUS_LINE[response.status], *lines, b"\r\n", response.body])
        )
        self._close_when_read()

    def _close_when_read(self) -> None:
        """End the connection once the caller has ended it, or after `LINGER_S`.

        To close at once while bytes of the caller are unread, or on their way, resets the connection, and the caller may lose an answer
        that it has not read yet (RFC 9112, section 9.6). So only our side of it ends now.
        """
        self._deadline = None
        self._forget_waiting()
        if self.transport.is_closing() or len(self._lingering) >= MOST_LINGERING:
            self._close()
            return
        self._is_deaf = True
        self._lingering.add(self)
        self.connections.discard(self)  # it holds no place of those that are served
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # its answer comes too late, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_S, self._close)

    def _close(self) -> None:
        """Once the caller has taken what is left for it, in which it may not pause for long."""
        self.transport.close()
        self.flow.require_reading()

    def _forget_waiting(self) -> None:
        while self.pipeline:
            _let_go(self.pipeline.pop())


def _let_go(waiting: "tuple[RequestResponseCycle, ASGI3Application]") -> None:
    if isinstance(waiting[0], Exchange):
        waiting[0].let_go()


@functools.lru_cache(64)  # callers repeat themselves; bounded, since they choose it
def _path_and_query(url: bytes) -> tuple[str, bytes]:
    """The path decoded."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.query or b""


def _headers_too_large() -> Refusal:
    return Refusal(
        "headers_too_large",
        f"path and headers are larger than the limit of {MAX_HEADER_BYTES} bytes",
    )
