"""Limits on one connection, with a fake transport."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from slipway.serving.app import Application, connection_limits
from slipway.serving.http import connections
from slipway.serving.http.connections import (
    LINGER_S,
    MAX_LINGERING,
    AnswerTransport,
    Connection,
    ConnectionLimits,
)
from slipway.serving.http.framing import MAX_HEAD_BYTES
from slipway.serving.http.responses import Response
from slipway.serving.http.routes import Request
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, full_worker, metric

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /livez HTTP/1.1\r\nhost: localhost\r\n"
TIMEOUT_S = 0.3


class Transport(asyncio.Transport):
    """A fake transport that records the written bytes."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 3000), "peername": ("127.0.0.1", 50000)})
        self.written, self.is_closed, self.is_aborted = b"", False, False
        self.num_writes = 0
        self.has_eof = False
        self.is_reading_paused = False
        self.num_unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        self.num_writes += 1

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def is_reading(self) -> bool:
        return not self.is_reading_paused

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def statuses(self) -> list[bytes]:
        return [answer[:3] for answer in self.written.split(b"HTTP/1.1 ")[1:]]


class Asked:
    """A worker without a model that responds to `/livez`, and its connections."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self.application = Application(behind, worker)
        self.limits = connection_limits(worker)
        self.state = ServerState()
        app = self.application
        self._config = uvicorn.Config(app=app, log_config=None)

    def connect(self) -> tuple[Connection, Transport]:
        connection, transport = self.limits(self._config, self.state, {}), Transport()
        connection.connection_made(transport)
        return connection, transport


def connected_to(worker: ModelWorker) -> tuple[Asked, Connection, Transport]:
    asked = Asked(worker)
    return asked, *asked.connect()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def turns(number: int = 10) -> None:
    """Let the event loop run for a number of turns."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
def worker(make_settings: MakeSettings) -> ModelWorker:
    return full_worker(
        make_settings(request_timeout_s=TIMEOUT_S, max_connections=3, idle_timeout_s=1)
    )


def test_pipelined_requests_get_responses_in_order(worker: ModelWorker) -> None:
    async def work() -> None:
        asked, connection, transport = connected_to(worker)
        ids = [b"first", b"second", b"third"]
        heads = [LIVEZ[:-2] + b"x-request-id: " + name + b"\r\n\r\n" for name in ids]
        connection.data_received(b"".join(heads))
        await turns(20)
        lines = transport.written.split(b"\r\n")
        assert [line[14:] for line in lines if line.startswith(b"x-request-id: ")] == ids
        assert not asked.state.tasks
        connection.connection_lost(None)

    run(work())


def test_response_head_and_body_are_written_together(worker: ModelWorker) -> None:
    async def work() -> None:
        _, connection, transport = connected_to(worker)
        connection.data_received(LIVEZ)
        await turns()
        assert transport.statuses() == [b"200"]
        assert transport.num_writes == 1

    run(work())


def test_head_of_a_response_without_body_is_sent_when_the_connection_closes() -> None:
    transport = Transport()
    answer = AnswerTransport(transport)
    answer.hold_head()
    answer.write(b"head")
    assert not transport.written
    answer.close()
    assert (transport.written, transport.is_closed) == (b"head", True)


def slow(asked: Asked, seconds: float) -> None:
    """Delay each response by `seconds`."""
    respond = asked.application.respond

    async def respond_slowly(request: Request, *others: Any) -> Response | None:
        await asyncio.sleep(seconds)
        return await respond(request, *others)

    asked.application.respond = respond_slowly  # type: ignore[assignment, method-assign]


def test_connection_stops_reading_while_requests_wait_for_their_responses(
    worker: ModelWorker,
) -> None:
    """Otherwise requests of a caller that sends endlessly would fill the memory."""

    async def work() -> None:
        asked, connection, transport = connected_to(worker)
        slow(asked, 0.05)
        connection.data_received(LIVEZ)
        await turns()
        assert transport.is_reading()  # a caller that hangs up is to be noticed
        connection.data_received(LIVEZ * 2)
        await turns()
        assert not transport.is_reading()
        assert connection._held == LIVEZ * 2
        await asyncio.sleep(0.2)
        assert transport.statuses() == [b"200"] * 3
        assert transport.is_reading()
        connection.connection_lost(None)

    run(work())


def test_completed_request_leaves_no_reference_cycle(worker: ModelWorker) -> None:
    """Otherwise bodies would stay in memory until Python's next search for cycles."""

    async def work() -> None:
        asked, connection, _ = connected_to(worker)
        seen = list[Any]()
        respond = asked.application.respond

        async def noting(request: Request, *others: Any) -> Response | None:
            seen.append(weakref.ref(request))
            return await respond(request, *others)

        asked.application.respond = noting  # type: ignore[assignment, method-assign]
        gc.disable()
        try:
            connection.data_received(LIVEZ)
            await turns()
            connection.data_received(LIVEZ * 3)
            await turns(3)
            assert [reference() for reference in seen[:1]] == [None]
            connection.connection_lost(None)
            last = weakref.ref(connection)
            del connection
            await turns(20)
            assert last() is None
        finally:
            gc.enable()

    run(work())


@pytest.mark.parametrize("reads", [True, False])
def test_caller_that_never_reads_is_disconnected_but_a_slow_reader_is_not(
    reads: bool, worker: ModelWorker
) -> None:
    async def work() -> None:
        _, connection, transport = connected_to(worker)
        connection.data_received(LIVEZ)
        transport.num_unsent = 100_000
        connection.pause_writing()
        for _ in range(20):
            await asyncio.sleep(TIMEOUT_S / 10)
            transport.num_unsent -= 1000 if reads else 0
        assert transport.is_aborted is not reads
        connection.connection_lost(None)

    run(work())


@pytest.mark.parametrize("ends_by", ["caller", "server"])
def test_a_closing_connection_does_not_wait_forever_for_its_caller_to_read(
    worker: ModelWorker, ends_by: str
) -> None:
    """The end of the service waits for such a connection."""

    async def work() -> None:
        asked, connection, transport = connected_to(worker)
        is_by_caller = ends_by == "caller"
        connection.data_received(
            LIVEZ[:-2] + b"connection: close\r\n\r\n" if is_by_caller else LIVEZ
        )
        transport.num_unsent = 100
        await turns()
        for one in list(asked.state.connections):
            one.shutdown()
        assert transport.is_closing()
        await asyncio.sleep(2 * TIMEOUT_S)
        assert transport.is_aborted
        connection.connection_lost(None)

    run(work())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", None), (LIVEZ[:20], b"408"), (b"\r\n", b"408"), (POST + b"content-le", b"408")],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_late_request_head_is_refused_and_an_idle_connection_is_closed(
    sent: bytes, status: bytes | None, is_first: bool, worker: ModelWorker
) -> None:
    async def work() -> None:
        _, connection, transport = connected_to(worker)
        if not is_first:
            connection.data_received(LIVEZ)
            await turns()
        num_before = len(transport.written)
        for piece in range(len(sent)):  # slow bytes do not buy time
            connection.data_received(sent[piece : piece + 1])
        await asyncio.sleep(TIMEOUT_S / 2)
        assert not transport.is_closing()
        assert not transport.has_eof
        await asyncio.sleep(TIMEOUT_S if is_first or sent else 1.0)
        said = transport.written[num_before:]
        if status:
            assert said.startswith(b"HTTP/1.1 " + status)
            assert metric(worker, 'slipway_errors_total{error="header_timeout"}') == 1
            assert transport.has_eof
        else:
            assert not said
            assert transport.is_closing()
        connection.connection_lost(None)

    run(work())


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nx: ",
        POST + b"transfer-encoding: chunked\r\n\r\n1;",
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
)
def test_endless_heads_chunk_extensions_and_trailers_are_refused(
    begin: bytes, worker: ModelWorker
) -> None:
    async def work() -> None:
        _, connection, transport = connected_to(worker)
        connection.data_received(begin)
        await turns()
        for _ in range(5):
            connection.data_received(b"a" * (MAX_HEAD_BYTES // 4))
            await turns()
        assert transport.statuses() == ([b"431"] if begin.startswith(b"GET") else [b"405"])
        assert transport.has_eof
        connection.connection_lost(None)

    run(work())


def test_a_body_may_exceed_the_size_limit_of_heads(worker: ModelWorker) -> None:
    """Control: bytes that the application receives do not count."""

    async def work() -> None:
        _, connection, transport = connected_to(worker)
        connection.data_received(POST + b"content-length: 1000000\r\n\r\n")
        for _ in range(10):
            connection.data_received(b"a" * 100_000)
            await turns()
        assert transport.statuses() == [b"405"]
        assert transport.is_reading()
        connection.connection_lost(None)

    run(work())


def test_connection_is_closed_if_the_body_of_a_refused_request_never_arrives(
    worker: ModelWorker,
) -> None:
    """Later bytes could belong to its body."""

    async def work() -> None:
        _, connection, transport = connected_to(worker)
        connection.data_received(POST + b"content-length: 1000\r\n\r\n" + LIVEZ)
        await asyncio.sleep(TIMEOUT_S)
        connection.data_received(LIVEZ)
        await turns()
        assert transport.statuses() == [b"405"]
        assert transport.has_eof
        connection.connection_lost(None)

    run(work())


def test_connections_above_the_limit_are_refused_and_few_of_them_linger(
    worker: ModelWorker,
) -> None:
    async def work() -> None:
        asked = Asked(worker)
        served = [asked.connect() for _ in range(3)]
        refused = [asked.connect() for _ in range(MAX_LINGERING + 5)]
        for _, transport in refused:
            assert transport.statuses() == [b"503"]
            assert b'"too_many_connections"' in transport.written
        assert [transport.is_closing() for _, transport in refused] == (
            [False] * MAX_LINGERING + [True] * 5
        )
        refused[0][0].data_received(LIVEZ)
        await turns()
        assert refused[0][1].statuses() == [b"503"]
        await asyncio.sleep(LINGER_S + 0.1)
        assert all(transport.is_closing() for _, transport in refused)
        for connection, _ in refused:
            connection.connection_lost(None)
        served.pop()[0].connection_lost(None)
        late, transport = asked.connect()
        late.data_received(LIVEZ)
        await turns()
        assert transport.statuses() == [b"200"]
        for connection, _ in [*served, (late, transport)]:
            connection.connection_lost(None)
        assert not asked.limits.connections
        assert not asked.limits._num_lingering

    run(work())


def test_new_connection_above_the_limit_replaces_the_longest_idle_one(
    worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        asked = Asked(worker)
        silent, first, second = [asked.connect() for _ in range(3)]
        for connection, _ in (first, second, first):  # so the second is idle longer
            connection.data_received(LIVEZ)
            await turns()
        early = asked.connect()
        assert early[1].statuses() == [b"503"]  # the second may be about to send
        monkeypatch.setattr(connections, "MIN_IDLE_S", 0.0)
        third = asked.connect()
        assert second[1].is_closing()
        assert not first[1].is_closing()
        second[0].connection_lost(None)
        first[0].data_received(LIVEZ[:20])  # its next request begins
        refused = asked.connect()
        assert refused[1].statuses() == [b"503"]
        first[0].data_received(LIVEZ[20:])
        third[0].data_received(LIVEZ)
        await turns()
        assert first[1].statuses() == [b"200"] * 3
        assert third[1].statuses() == [b"200"]
        for connection, _ in (silent, first, early, third, refused):
            connection.connection_lost(None)
        assert not asked.limits.connections
        assert not asked.limits.idle

    run(work())


def test_endless_chunk_extensions_of_an_unanswered_request_are_refused(
    worker: ModelWorker,
) -> None:
    async def work() -> None:
        asked, connection, transport = connected_to(worker)
        slow(asked, 0.05)
        connection.data_received(LIVEZ + POST + b"transfer-encoding: chunked\r\n\r\n1;")
        for _ in range(5):
            connection.data_received(b"a" * (MAX_HEAD_BYTES // 4))
        await asyncio.sleep(0.2)
        assert transport.statuses() == [b"200", b"431"]
        connection.connection_lost(None)

    run(work())


def test_suspended_process_causes_no_timeouts() -> None:
    """Timeouts count checks, and a late check is one check."""

    async def work() -> None:
        limits = ConnectionLimits(1, 0.1, 1, lambda refusal, *_: Response(refusal.status, b""))
        connection = limits(uvicorn.Config(behind, log_config=None), ServerState(), {})
        transport = Transport()
        connection.connection_made(transport)
        limits_tick, limits.timeout_s = limits._tick, 1000  # no further checks
        for _ in range(3):
            limits_tick()
        assert not transport.is_closing()
        for _ in range(10):
            limits_tick()
        assert transport.is_closing()
        connection.connection_lost(None)

    run(work())
