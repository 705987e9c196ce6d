"""An exchange reads and answers as uvicorn's own does, without a scope and without messages."""

import asyncio
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from serving.app import Application
from serving.guard.connections import Connection
from serving.guard.exchange import Exchange
from serving.http.responses import (
    RETRY_AFTER,
    Refusal,
    Response,
    error_response,
    json_response,
    send_response,
)
from serving.http.routes import Request
from serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, full_worker

ANSWERS = [
    json_response({"label": "cat"}),
    Response(200, "ä".encode(), content_type="text/plain; charset=utf-8"),
    error_response(Refusal("not_found", "there is nothing here"), "abc.1"),
    Response(200, b""),
    Response(429, b"{}", headers=(RETRY_AFTER,)),
    Response(200, b"{}", headers=(("cache-control", "max-age=60"), ("connection", "close"))),
]
DEFAULT = [(b"date", b"today"), (b"server", b"uvicorn")]


class Transport(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 3000), "peername": ("127.0.0.1", 50000)})
        self.written, self.is_closed, self.is_aborted = b"", False, False
        self.is_reading_paused = False
        self.num_unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


def cycle_of(
    transport: Transport, method: str, *, keep_alive: bool
) -> tuple[RequestResponseCycle, list[str]]:
    """uvicorn's, which waits for an answer, and what is told when it has it."""
    ended: list[str] = []
    scope: Any = {"type": "http", "method": method, "path": "/predict"}
    logger = logging.getLogger("test")
    cycle = RequestResponseCycle(
        scope, transport, FlowControl(transport), logger, logger, False, DEFAULT, asyncio.Event(), False, keep_alive,
        lambda: ended.append("ended"),
    )  # fmt: skip
    return cycle, ended


def exchange_of(
    transport: Transport, method: str = "POST", *, keep_alive: bool = True, expects: bool = False
) -> tuple[Exchange, list[str]]:
    """Ours."""
    ended: list[str] = []

    def end(exchange: Exchange) -> None:
        transport.close()
        ended.append("ended")

    connection: Any = SimpleNamespace(
        transport=transport,
        flow=FlowControl(transport),
        server_state=SimpleNamespace(default_headers=DEFAULT),
        on_response_complete=lambda: ended.append("ended"),
        end=end,
    )
    exchange = Exchange(connection, keep_alive=keep_alive, expects_100_continue=expects)
    receive: Any = exchange.receive
    exchange.request = Request("abc.1", method, "/predict", b"", {}, receive, 0.0)
    return exchange, ended


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("response", ANSWERS)
def test_an_answer_is_the_same_to_the_byte_as_uvicorns(
    response: Response, keep_alive: bool, method: str
) -> None:
    ours, its = Transport(), Transport()

    async def work() -> None:
        cycle, its_end = cycle_of(its, method, keep_alive=keep_alive)
        send: Any = cycle.send
        await send_response(response, "abc.1", send, with_body=method != "HEAD")
        exchange, our_end = exchange_of(ours, method, keep_alive=keep_alive)
        exchange.answer(response)
        assert exchange.response_complete
        assert our_end == its_end == ["ended"]

    asyncio.run(work())
    assert headers_and_body(ours) == headers_and_body(its)
    assert ours.is_closed is its.is_closed


def headers_and_body(transport: Transport) -> tuple[bytes, list[bytes], bytes]:
    """Status line, headers in any order, body."""
    head, _, body = transport.written.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, sorted(headers), body


def test_nothing_is_written_to_a_caller_that_is_gone() -> None:
    async def work() -> None:
        transport = Transport()
        exchange, ended = exchange_of(transport)
        exchange.disconnected = True
        exchange.answer(ANSWERS[0])
        assert not transport.written
        assert not ended

    asyncio.run(work())


def test_nothing_is_written_to_a_connection_that_is_closed_although_others_waited_behind() -> None:
    """uvloop would raise."""

    async def work() -> None:
        transport = Transport()
        exchange, ended = exchange_of(transport)
        transport.close()
        exchange.answer(ANSWERS[0])
        assert not transport.written
        assert not ended

    asyncio.run(work())


@pytest.mark.parametrize(
    "header", [("x-name", "a\r\nset-cookie: b"), ("x name", "a"), ("x-name", "a\0")]
)
def test_a_header_that_would_end_before_its_end_is_never_written(header: tuple[str, str]) -> None:
    async def work() -> None:
        transport = Transport()
        exchange, _ = exchange_of(transport)
        with pytest.raises(RuntimeError, match="no header can be"):
            exchange.answer(Response(200, b"{}", headers=(header,)))
        assert not transport.written
        assert not exchange.response_complete  # so its connection ends

    asyncio.run(work())


def test_a_body_that_is_there_is_read_without_waiting_and_one_that_comes_in_pieces_as_it_comes() -> (
    None
):
    async def work() -> None:
        whole, _ = exchange_of(Transport())
        whole.take(b"abc")
        whole.has_all()
        reading = whole.receive()
        with pytest.raises(StopIteration) as ended:  # it never gave the event loop a turn
            reading.send(None)
        assert ended.value.value == {"type": "http.request", "body": b"abc", "more_body": False}

        parts, _ = exchange_of(Transport())
        waiting = asyncio.create_task(parts.receive())
        await asyncio.sleep(0)
        parts.take(b"ab")
        first: Any = await waiting
        assert (first["body"], first["more_body"]) == (b"ab", True)
        parts.disconnected = True
        parts.message_event.set()
        assert await parts.receive() == {"type": "http.disconnect"}

    asyncio.run(work())


def test_a_caller_that_waits_to_be_asked_is_asked_when_its_body_is_read() -> None:
    async def work() -> None:
        transport = Transport()
        exchange, _ = exchange_of(transport, expects=True)
        waiting = asyncio.create_task(exchange.receive())
        await asyncio.sleep(0)
        assert transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
        exchange.has_all()
        await waiting

    asyncio.run(work())


def connected(make_settings: MakeSettings, **variables: Any) -> tuple[Connection, Transport]:
    """A connection of a service whose model is not loaded: `/livez` is answered."""
    return connected_to(full_worker(make_settings(**variables)))


def connected_to(worker: ModelWorker) -> tuple[Connection, Transport]:
    """A connection of that service."""
    config = uvicorn.Config(app=behind, log_config=None, timeout_keep_alive=1)
    connection = Connection(
        worker, Application(behind, worker), config=config, server_state=ServerState(), app_state={}
    )
    transport = Transport()
    connection.connection_made(transport)
    return connection, transport


def test_an_answer_waits_for_a_caller_that_reads_slowly(make_settings: MakeSettings) -> None:
    async def work() -> None:
        connection, transport = connected(make_settings)
        connection.flow.pause_writing()
        connection.data_received(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.sleep(0.01)
        assert not transport.written
        connection.flow.resume_writing()
        await asyncio.sleep(0.01)
        assert transport.written.startswith(b"HTTP/1.1 200 OK")

    asyncio.run(work())


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def turns(number: int = 5) -> None:
    """Of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_requests_sent_at_once_are_answered_one_after_the_other(
    make_settings: MakeSettings,
) -> None:
    async def work() -> None:
        connection, transport = connected(make_settings)
        ids = [b"first", b"second", b"third"]
        connection.data_received(
            b"".join(LIVEZ[:-2] + b"x-request-id: " + name + b"\r\n\r\n" for name in ids)
        )
        await turns(10)
        assert [
            line.split(b" ")[1]
            for line in transport.written.split(b"\r\n")
            if line.startswith(b"x-request-id")
        ] == ids
        assert not connection.tasks
        connection.connection_lost(None)

    asyncio.run(work())


def test_an_answered_request_leaves_no_ring_behind(make_settings: MakeSettings) -> None:
    """Bodies would stay in memory until Python next searches for rings."""

    async def work() -> None:
        connection, _ = connected(make_settings)
        gc.disable()
        try:
            connection.data_received(LIVEZ)
            await turns()
            former = weakref.ref(connection.cycle)
            connection.data_received(LIVEZ)
            await turns()
            assert former() is None
        finally:
            gc.enable()
        connection.connection_lost(None)

    asyncio.run(work())


def test_no_more_is_read_while_requests_wait(make_settings: MakeSettings) -> None:
    """A caller that sends without end would have them pile up here."""

    async def work() -> None:
        connection, transport = connected(make_settings)
        connection.data_received(LIVEZ * 3)
        seen = {}
        for _ in range(20):
            seen[len(connection.pipeline)] = transport.is_reading_paused
            await turns(1)
        assert seen == {2: True, 1: True, 0: False}
        connection.connection_lost(None)

    asyncio.run(work())


def test_requests_whose_turn_never_came_leave_no_ring_behind(make_settings: MakeSettings) -> None:
    async def work() -> None:
        connection, _ = connected(make_settings)
        gc.disable()
        try:
            connection.data_received(LIVEZ * 3)
            waiting = [weakref.ref(cycle) for cycle, _ in connection.pipeline]
            connection.connection_lost(None)
            await turns()
            del connection
            assert [reference() for reference in waiting] == [None, None]
        finally:
            gc.enable()

    asyncio.run(work())


@pytest.mark.process
def test_a_body_has_its_time_from_when_it_is_read(make_settings: MakeSettings) -> None:
    """Behind other requests it is left in the caller's hands until these are answered, which may take longer."""

    async def work() -> None:
        connection, transport = connected(make_settings, request_timeout_s=0.2)
        respond = connection._application.respond

        async def slow(request: Request) -> Response | None:
            await asyncio.sleep(0.15)
            return await respond(request)

        connection._application.respond = slow  # type: ignore[assignment, method-assign]
        connection.data_received(
            LIVEZ * 4 + b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\na"
        )
        while b"HTTP/1.1 405 " not in transport.written:
            assert not transport.is_closed
            await asyncio.sleep(0.01)
        assert transport.written.count(b"HTTP/1.1 200 ") == 4
        while not transport.is_closed:  # the rest never came
            await asyncio.sleep(0.01)
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(work(), 10))


@pytest.mark.process
@pytest.mark.parametrize("reads", [True, False])
def test_a_caller_that_reads_nothing_is_cut_and_a_slow_one_is_not(
    reads: bool, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        connection, transport = connected(make_settings, request_timeout_s=0.6)
        transport.num_unsent = 100_000
        connection.pause_writing()
        for _ in range(9):
            await asyncio.sleep(0.1)
            transport.num_unsent -= 1000 if reads else 0
        assert transport.is_aborted is not reads
        connection.resume_writing()
        transport.is_aborted = False
        await asyncio.sleep(0.8)
        assert not transport.is_aborted
        connection.connection_lost(None)

    asyncio.run(work())


def test_a_closed_connection_does_not_wait_for_good_for_its_caller_to_read(
    make_settings: MakeSettings,
) -> None:
    """Also with less left than would hold up the next answer. The end of the service waits for it, too."""

    async def work(ending: bool) -> None:
        connection, transport = connected(make_settings, request_timeout_s=0.1)
        connection.data_received(LIVEZ if ending else LIVEZ[:-2] + b"connection: close\r\n\r\n")
        transport.num_unsent = 100
        await turns()
        if ending:
            connection.shutdown()
        assert transport.is_closed
        await asyncio.sleep(0.2)
        assert transport.is_aborted
        connection.connection_lost(None)

    asyncio.run(work(ending=False))
    asyncio.run(work(ending=True))


def test_a_request_that_is_cancelled_ends_its_connection(make_settings: MakeSettings) -> None:
    """As when the service has to end before it is answered."""

    async def never(request: Request) -> None:
        await asyncio.sleep(60)

    async def work() -> None:
        connection, transport = connected(make_settings)
        connection._application.respond = never  # type: ignore[assignment, method-assign]
        connection.data_received(LIVEZ)
        await turns()
        [task] = connection.tasks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transport.is_closed
        assert not connection.tasks
        connection.connection_lost(None)

    asyncio.run(work())


@pytest.mark.process
@pytest.mark.parametrize(("piece", "status"), [(b"", None), (LIVEZ[:20], b"408")])
def test_a_connection_ends_when_nothing_more_comes(
    piece: bytes, status: bytes | None, make_settings: MakeSettings
) -> None:
    """Silently where nothing was begun; one timer serves all its waits, long and short."""

    async def work() -> None:
        connection, transport = connected(
            make_settings, request_timeout_s=2
        )  # beside one second that an idle connection is kept
        connection.data_received(LIVEZ)
        await turns()
        answered = len(transport.written)
        if piece:
            connection.data_received(piece)
        await asyncio.sleep(0.6)
        assert not transport.is_closed
        await asyncio.sleep(2 if piece else 0.8)
        said = transport.written[answered:]
        if status:
            assert said.startswith(b"HTTP/1.1 " + status)
        else:
            assert not said
            assert transport.is_closed
        connection.connection_lost(None)

    asyncio.run(work())


@pytest.mark.process
def test_a_connection_whose_body_ended_after_its_answer_is_not_kept_for_good(
    make_settings: MakeSettings,
) -> None:
    """As when a body is too large, or for no path: it is answered at once, and the rest still comes."""

    async def work() -> None:
        connection, transport = connected(make_settings)
        connection.data_received(
            b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"
        )
        await turns()
        assert transport.written.startswith(b"HTTP/1.1 404 ")
        connection.data_received(b"abc")
        await asyncio.sleep(0.6)
        was_closed = transport.is_closed
        await asyncio.sleep(0.8)
        assert (was_closed, transport.is_closed) == (False, True)
        connection.connection_lost(None)

    asyncio.run(work())
