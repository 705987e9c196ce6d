"""The end of connections on real sockets: complete requests still get responses, in order."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS
from uvicorn.server import ServerState

from slipway.serving.app import Application, connection_limits
from slipway.serving.http.connections import LINGER_S, Connection, ConnectionLimits
from slipway.serving.http.framing import MAX_HEAD_BYTES, MAX_URL_BYTES
from slipway.serving.http.responses import Response, json_response
from slipway.serving.http.routes import Request
from slipway.serving.worker import ModelWorker
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
    """The connections of a worker, and the application behind them."""

    worker: ModelWorker
    application: Application
    state: ServerState
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answers(self, sent: bytes, *, ends: bool = False) -> bytes:
        """Send requests and return all received bytes.

        Raises ConnectionResetError after a reset.
        """
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
    """Start a worker without a model, which responds to `/livez` after `pause_s` seconds."""
    worker, state = full_worker(make_settings(**variables)), ServerState()
    application = Application(behind, worker)
    respond = application.respond

    async def slow(request: Request, *others: Any) -> Response | None:
        await asyncio.sleep(pause_s)
        return await respond(request, *others)

    application.respond = slow  # type: ignore[assignment, method-assign]
    config = uvicorn.Config(app=application, log_config=None, timeout_keep_alive=1, ws="none")
    limits = connection_limits(worker)
    server = await asyncio.get_running_loop().create_server(
        lambda: limits(config, state, {}), "127.0.0.1", 0
    )
    try:
        yield Listening(worker, application, state, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for connection in list(limits.connections):
            connection.transport.abort()


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /nowhere HTTP/1.1\r\nhost: a\r\n", 404),
        (b"POST /livez HTTP/1.1\r\nhost: a\r\ncontent-type: a/b\r\ncontent-type: a/b\r\n", 400),
        (b"POST /%s HTTP/1.1\r\nhost: a\r\n" % (b"x" * (MAX_URL_BYTES + 1)), 414),
    ],
    ids=["unknown path", "doubled header", "long URL"],
)
def test_caller_that_still_sends_its_body_can_read_the_reason_of_the_refusal(
    run: Run, make_settings: MakeSettings, head: bytes, status: int
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0, max_body_bytes=20_000) as service:
            reader, writer = await service.connect()
            writer.write(head + b"content-length: 500000\r\n\r\n")
            for _ in range(10):
                await asyncio.sleep(PAUSE_S / 5)
                writer.write(b"x" * 50_000)
                await writer.drain()
            assert statuses(await reader.read()) == [status]
            writer.close()

    run(work())


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("left_over", [b"", LIVEZ[:20]])
def test_half_closed_connection_receives_responses_to_all_complete_requests(
    run: Run, make_settings: MakeSettings, number: int, left_over: bytes
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            received = await service.answers(LIVEZ * number + left_over, ends=True)
            assert statuses(received) == [200] * number
            await service.until_nobody_is_there()

    run(work())


def test_request_with_a_large_body_before_a_half_close_gets_its_response(
    run: Run, make_settings: MakeSettings
) -> None:
    """Reading pauses in between."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            body = b"x" * 500_000

            async def length(request: Request, *others: Any) -> Response:
                num_bytes, is_more = 0, True
                while is_more:
                    message: Any = await request.body()
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


def test_a_half_close_within_a_body_counts_as_a_disconnect(
    run: Run, make_settings: MakeSettings
) -> None:
    """Control: the request is incomplete, so the connection and its request end at once."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            gone = []

            async def reading(request: Request, *others: Any) -> None:
                while (await request.body())["type"] != "http.disconnect":
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


def test_a_disconnected_caller_leaves_no_connection_behind(
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


NO_HTTP = [b"GARBAGE\r\n\r\n", CHUNKED + b"no number\r\n"]
REFUSED = [
    (LIVEZ.replace(b"1.1", b"2.0"), 400),
    (b"GET /livez HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES, 431),
]


@pytest.mark.parametrize(("wrong", "status"), REFUSED)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_bad_head_is_refused_after_the_responses_to_earlier_requests(
    run: Run, make_settings: MakeSettings, wrong: bytes, status: int, number: int, ends: bool
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            received = await service.answers(LIVEZ * number + wrong + LIVEZ, ends=ends)
            assert statuses(received) == [*[200] * number, status]
            code = "malformed_request" if status == 400 else "headers_too_large"
            assert metric(service.worker, f'slipway_errors_total{{error="{code}"}}') == 1
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.parametrize("wrong", NO_HTTP)
@pytest.mark.parametrize("good", [LIVEZ, LIVEZ * 2])
def test_invalid_http_ends_the_connection_and_later_requests_get_no_response(
    run: Run, make_settings: MakeSettings, wrong: bytes, good: bytes
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            received = await service.answers(good + wrong + LIVEZ)
            assert statuses(received) == [200] * good.count(b"GET") + [400]
            assert metric(service.worker, 'slipway_errors_total{error="malformed_request"}') == 1
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.parametrize("wrong", NO_HTTP)
def test_invalid_http_after_a_request_is_refused_after_that_requests_response(
    run: Run, make_settings: MakeSettings, wrong: bytes
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            reader, writer = await service.connect()
            writer.write(LIVEZ)
            await asyncio.sleep(PAUSE_S / 2)
            writer.write(wrong + LIVEZ)
            assert statuses(await reader.read())[0] == 200
            writer.close()
            await service.until_nobody_is_there()

    run(work())


def test_bytes_after_the_last_request_do_not_change_its_response(
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
def test_caller_that_still_sends_its_last_request_can_read_the_response(
    run: Run, make_settings: MakeSettings, head: bytes
) -> None:
    """Closing a connection with unread bytes resets it, and the answer is lost."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            assert statuses(await service.answers(head + BODY)) == [404]
            await service.until_nobody_is_there()

    run(work())


def test_draining_worker_serves_one_more_request_per_connection_and_closes_it(
    run: Run, make_settings: MakeSettings
) -> None:
    """Requests that are pipelined after it may reset the connection."""

    async def work() -> None:
        async with listening(make_settings) as service:
            service.worker.drain()
            received = await service.answers(LIVEZ * 2)
            assert statuses(received) == [200]
            assert b"\r\nconnection: close\r\n" in received
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.process
def test_a_caller_that_never_stops_sending_its_last_request_is_disconnected(
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
            assert loop.time() - began < 10 * LINGER_S
            assert not service.state.connections

    run(work())


def test_a_complete_last_request_closes_the_connection_without_lingering(
    run: Run, make_settings: MakeSettings
) -> None:
    """Control: most connections end at once."""

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


def test_http_1_0_callers_never_get_100_continue(run: Run, make_settings: MakeSettings) -> None:
    """Without `100 Continue`, a caller would take it for the answer (RFC 9110, 10.1.1)."""

    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:

            async def reading(request: Request, *others: Any) -> Response:
                await request.body()
                return json_response({})

            service.application.respond = reading  # type: ignore[assignment, method-assign]
            for version, first in ((b"1.0", 417), (b"1.1", 100)):
                head = (
                    b"POST /livez HTTP/%s\r\nhost: localhost\r\nconnection: close\r\n"
                    b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n"
                )
                assert statuses(await service.answers(head % version + b"text"))[0] == first

    run(work())


UPGRADE = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_upgrade_request_is_treated_as_an_ordinary_request(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            reader, writer = await service.connect()
            for path, status in ((b"/livez", 200), (b"/nope", 404), (b"/livez", 200)):
                writer.write(LIVEZ.replace(b"/livez", path)[:-2] + UPGRADE)
                head = await reader.readuntil(b"\r\n\r\n")
                assert statuses(head) == [status]
                length = re.findall(rb"content-length: (\d+)", head)[0]
                await reader.readexactly(int(length))
            writer.close()
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.parametrize("behind", [LIVEZ, LIVEZ * 2 + b"GARBAGE\r\n\r\n"])
def test_requests_after_an_upgrade_in_one_packet_get_responses_in_order(
    run: Run, make_settings: MakeSettings, behind: bytes
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            sent = LIVEZ.replace(b"livez", b"nope")[:-2] + UPGRADE + behind
            expected = [404, *[200] * behind.count(b"GET"), *[400] * behind.count(b"GARBAGE")]
            assert statuses(await service.answers(sent, ends=True)) == expected
            await service.until_nobody_is_there()

    run(work())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST %s/models/slipway/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"GET %s/nowhere?a=b HTTP/2.0\r\n\r\n", 400),
        (b"GET %s HTTP/1.1\r\nx: " + b"a" * 2 * MAX_HEAD_BYTES, 431),
        (b"GET %s/health/live HTTP/1.1\r\n", 408),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
def test_refusals_before_the_application_have_the_error_shape_of_their_path(
    run: Run, make_settings: MakeSettings, sent: bytes, status: int, is_first: bool
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.1, request_timeout_s=0.3) as service:
            for path, kind in ((b"/v2", str), (b"/%76%32", str), (b"/v3", dict)):
                before = b"" if is_first else LIVEZ
                received = await service.answers(before + sent % path)
                assert statuses(received) == [*[200] * (not is_first), status]
                content = json.loads(received.split(b"\r\n\r\n")[-1])
                assert isinstance(content["error"], kind)

    run(work())


def test_uvicorn_servers_of_the_process_support_no_websockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for protocols in (HTTP_PROTOCOLS, WS_PROTOCOLS):
        monkeypatch.setitem(protocols, "auto", protocols["auto"])
    limits = ConnectionLimits(1, 1.0, 1, lambda refusal, *_: Response(refusal.status, b""))
    limits.replace_uvicorns_default()
    config = uvicorn.Config(app=behind, log_config=None)
    config.load()
    assert config.ws_protocol_class is None
    assert isinstance(config.http_protocol_class, ConnectionLimits)


def test_endless_pipelined_requests_are_read_only_as_fast_as_they_are_served(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.002) as service:
            reader, writer = await service.connect()
            reading = asyncio.create_task(reader.read())
            begin = asyncio.get_running_loop().time()
            num_sent = 0
            while asyncio.get_running_loop().time() - begin < 1.5 and num_sent < 40_000_000:
                writer.write(LIVEZ * 2000)
                num_sent += 2000 * len(LIVEZ)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(writer.drain(), 0.2)
            (connection,) = service.state.connections
            assert isinstance(connection, Connection)
            held = len(connection._held)
            assert held < 1_000_000
            reading.cancel()
            writer.transport.abort()

    run(work())


def test_error_for_invalid_bytes_after_a_request_follows_its_response(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings) as service:
            assert statuses(await service.answers(LIVEZ + b"GARBAGE\r\n\r\n")) == [200, 400]

    run(work())


def test_bad_chunk_of_a_refused_request_causes_no_second_response(
    run: Run, make_settings: MakeSettings
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            reader, writer = await service.connect()
            writer.write(CHUNKED.replace(b"/livez", b"/nowhere") + b"3\r\nabc\r\n")
            await asyncio.sleep(PAUSE_S)
            writer.write(b"ZZ\r\n")
            assert statuses(await reader.read()) == [404]
            writer.close()

    run(work())
