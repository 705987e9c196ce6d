"""How a connection ends: with answers to all that was sent in whole, in their order, and so that the caller can read them."""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from serving.app import Application
from serving.guard.connections import LINGER_S, MAX_HEADER_BYTES, Connection
from serving.http.responses import Response, json_response
from serving.http.routes import Request
from serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, full_worker, metric

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = LIVEZ[:-2] + b"connection: close\r\n\r\n"
CHUNKED = b"POST /livez HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE_S = 0.05
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"], name="run")
def _run(request: pytest.FixtureRequest) -> Run:
    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(
            loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None
        ) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run


@dataclass
class Listening:
    """A worker's connections, and what is behind them."""

    worker: ModelWorker
    application: Application
    state: ServerState
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answers(self, sent: bytes, *, ends: bool = False) -> bytes:
        """All that comes; ConnectionResetError where the connection was reset."""
        reader, writer = await self.connect()
        try:
            writer.write(sent)
            if ends:
                writer.write_eof()
            return await reader.read()
        finally:
            writer.close()

    async def until_nobody_is_there(self) -> None:
        while self.state.connections or self.state.tasks:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(
    make_settings: MakeSettings, pause_s: float = PAUSE_S, **variables: Any
) -> AsyncIterator[Listening]:
    """Without a model: `/livez` is answered, after `pause_s`."""
    worker, state = full_worker(make_settings(**variables)), ServerState()
    application = Application(behind, worker)
    respond = application.respond

    async def slow(request: Request, *others: Any) -> Response | None:
        await asyncio.sleep(pause_s)
        return await respond(request, *others)

    application.respond = slow  # type: ignore[assignment, method-assign]
    config = uvicorn.Config(app=application, log_config=None, timeout_keep_alive=1)

    def connection() -> Connection:
        return Connection(worker, application, config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield Listening(worker, application, state, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for left in list(state.connections):
            left.transport.abort()


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("left_over", [b"", LIVEZ[:20]])
def test_a_caller_that_ends_its_side_has_an_answer_to_all_that_it_sent_in_whole(
    run: Run, make_settings: MakeSettings, number: int, left_over: bytes
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            received = await service.answers(LIVEZ * number + left_over, ends=True)
            assert statuses(received) == [200] * number
            assert b"\r\nconnection: close\r\n" in received.rpartition(b"HTTP/1.1 ")[2]
            await service.until_nobody_is_there()

    run(work())


def test_a_large_body_before_the_end_of_the_callers_side_is_answered(
    run: Run, make_settings: MakeSettings
) -> None:
    """Reading was paused in between."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            body = b"x" * 500_000

            async def length(request: Request) -> Response:
                num_bytes, is_more = 0, True
                while is_more:
                    message: Any = await request.receive()
                    num_bytes, is_more = num_bytes + len(message["body"]), message["more_body"]
                    await asyncio.sleep(PAUSE_S)
                return json_response(num_bytes)

            service.application.respond = length  # type: ignore[assignment, method-assign]
            head = b"POST /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            received = await service.answers(head + body, ends=True)
            assert statuses(received) == [200]
            assert received.endswith(b"\r\n500000")

    run(work())


def test_a_caller_that_ends_within_a_body_is_gone(run: Run, make_settings: MakeSettings) -> None:
    """The twin: nobody could say what it asked; the connection and its request end at once."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            gone = []

            async def reading(request: Request) -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                gone.append(request.path)

            service.application.respond = reading  # type: ignore[assignment, method-assign]
            assert (
                await service.answers(
                    b"POST /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\na",
                    ends=True,
                )
                == b""
            )
            await service.until_nobody_is_there()
            assert gone == ["/livez"]

    run(work())


def test_a_caller_that_is_gone_altogether_keeps_no_connection(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            _, writer = await service.connect()
            writer.write(LIVEZ)
            await asyncio.sleep(PAUSE_S / 2)
            writer.close()
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (CHUNKED + b"no number\r\n", 400),
        (LIVEZ.replace(b"1.1", b"2.0"), 400),
        (b"GET /livez HTTP/1.1\r\nx: " + b"a" * MAX_HEADER_BYTES, 431),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_what_is_wrong_behind_good_requests_is_refused_after_their_answers(
    run: Run, make_settings: MakeSettings, wrong: bytes, status: int, number: int, ends: bool
) -> None:
    """Else the caller takes the refusal for the answer to its good request."""

    async def work() -> None:
        async with listening(make_settings) as service:
            assert statuses(await service.answers(LIVEZ * number + wrong + LIVEZ, ends=ends)) == [
                *[200] * number,
                status,
            ]
            code = "malformed_request" if status == 400 else "headers_too_large"
            assert metric(service.worker, f'slipway_errors_total{{error="{code}"}}') == 1
            await service.until_nobody_is_there()

    run(work())


def test_what_is_wrong_behind_a_last_request_changes_nothing_about_its_answer(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            assert statuses(await service.answers(LAST + b"GARBAGE\r\n\r\n")) == [200]
            await service.until_nobody_is_there()

    run(work())


BODY = bytes(3_000_000)
EARLY = [
    b"POST /nope HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    % len(BODY),
    b"POST /nope HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY),
]


@pytest.mark.parametrize("head", EARLY)
def test_a_caller_that_is_still_sending_its_last_request_reads_the_answer(
    run: Run, make_settings: MakeSettings, head: bytes
) -> None:
    """A connection that is closed while bytes are unread is reset, and the answer is lost with it."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            assert statuses(await service.answers(head + BODY)) == [404]
            await service.until_nobody_is_there()

    run(work())


def test_a_caller_that_sends_further_requests_behind_its_last_reads_the_answer(
    run: Run, make_settings: MakeSettings
) -> None:
    """As while the service drains: it ends connections whose callers did not ask for that."""

    async def work() -> None:
        async with listening(make_settings) as service:
            service.worker.drain()
            assert statuses(await service.answers(LIVEZ * 50_000)) == [200]
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.process
def test_a_caller_that_never_stops_sending_its_last_request_is_cut(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            reader, writer = await service.connect()
            writer.write(EARLY[0])
            assert statuses(await reader.read()) == [404]
            loop = asyncio.get_running_loop()
            began = loop.time()
            while not writer.transport.is_closing():  # nobody takes it any more
                writer.write(b"x")
                await asyncio.sleep(0.02)
            assert LINGER_S / 2 < loop.time() - began < 10 * LINGER_S
            assert not service.state.connections

    run(work())


def test_a_whole_last_request_is_not_lingered_over(run: Run, make_settings: MakeSettings) -> None:
    """The twin: most connections that end do so at once."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            assert statuses(await service.answers(LAST)) == [200]
            loop = asyncio.get_running_loop()
            began = loop.time()
            await service.until_nobody_is_there()
            with socket.create_connection(("127.0.0.1", service.port)) as connection:
                connection.setblocking(False)
                await loop.sock_sendall(connection, LAST)
                while await loop.sock_recv(connection, 65536):
                    pass
                await service.until_nobody_is_there()
            assert loop.time() - began < LINGER_S / 2

    run(work())


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_caller_of_http_1_0_is_never_asked_for_its_body(
    run: Run, make_settings: MakeSettings, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not know of `100 Continue`, and would take it for the answer (RFC 9110, section 10.1.1). On both ways to the application."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:

            async def reading(request: Request, *others: Any) -> Response:
                await request.receive()
                return json_response({})

            service.application.respond = reading  # type: ignore[assignment, method-assign]
            for version, first in ((b"1.0", 200), (b"1.1", 100)):
                head = b"POST /livez HTTP/%s\r\nhost: localhost\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
                assert statuses(await service.answers(head % version + b"text"))[0] == first

    if is_logged:
        caplog.set_level(logging.INFO, "uvicorn.access")
    run(work())


UPGRADE = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_request_for_another_protocol_is_answered_as_the_ordinary_one_that_it_is(
    run: Run, make_settings: MakeSettings, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            received = await service.answers(
                (LIVEZ[:-2] + UPGRADE) * 2
                + LIVEZ.replace(b"/livez", b"/nope")[:-2]
                + UPGRADE
                + LAST
            )
            assert statuses(received) == [200, 200, 404, 200]
            assert received.count(b"\r\nx-request-id: ") == 4
            assert received.count(b'{"error":{"code":"not_found",') == 1
            assert metric(service.worker, 'slipway_requests_total{code="200",route="/livez"}') == 3

    if is_logged:
        caplog.set_level(logging.INFO, "uvicorn.access")
    run(work())
