"""Unusual and hostile clients of the real process get an error response, or are disconnected."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.http.connections import LINGER_S, MAX_LINGERING
from slipway.serving.http.framing import MAX_HEAD_BYTES
from slipway.serving.http.responses import ERRORS
from tests import plain_http
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.ready_service import ready_service
from tests.serving.server import Server, running, until

pytestmark = pytest.mark.process
TIMEOUT_S = 0.5
MAX_CONNECTIONS = 40
PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(
        tmp_path_factory.mktemp("connections"),
        request_timeout_s=TIMEOUT_S,
        max_connections=MAX_CONNECTIONS,
        idle_timeout_s=1,
    ) as server:
        yield server


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port or 80))
    connection.settimeout(10)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Return all bytes until the service closes the connection, or raise TimeoutError."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass  # it closed while we were still sending
    return received


def error_in(received: bytes) -> dict[str, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"code", "message", "field", "request_id"}
    assert head.startswith(b"HTTP/1.1 %d " % ERRORS[error["code"]])
    assert b"\r\nx-request-id: %s\r\n" % error["request_id"].encode() in head + b"\r\n"
    return error


def exchange(server: Server, *pieces: bytes) -> dict[str, Any]:
    """Send `pieces`, and return the error response that ends the connection."""
    return error_in(answers(server, *pieces))


def answers(server: Server, *pieces: bytes) -> bytes:
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        return rest_of(connection)


CHUNKED = (
    b"POST /predict HTTP/1.1\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n"
    b"1\r\nx\r\n0\r\n"
)
UPGRADE = (
    b"POST /predict HTTP/1.1\r\ncontent-type: image/png\r\ncontent-length: 3\r\n"
    b"connection: upgrade\r\nupgrade: h2c\r\n\r\nabc"
)
HUGE = b"a" * (MAX_HEAD_BYTES // 2 + 1)
NEVER_A_REQUEST = [
    (400, [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]),
    (400, [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]),
    (400, [b"CONNECT x:443 HTTP/1.1\r\n\r\n"]),
    (400, [b"GET /readyz HTTP/1.1\r\nx: \0\r\n\r\n"]),
    (400, [b"POST /predict HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"]),
    (431, [b"GET /" + HUGE, HUGE]),
    (431, [b"GET /readyz HTTP/1.1\r\nx: " + HUGE, HUGE]),
    (408, [b"GET /readyz HTTP/1.1\r\nhost"]),
    (408, [b"\r\n"]),
]
REFUSED = [
    ("malformed_request", UPGRADE),
    ("url_too_long", b"GET /" + HUGE + b" HTTP/1.1\r\n\r\n"),
    ("headers_too_large", b"GET /readyz HTTP/1.1\r\n" + b"x: %s\r\n" % HUGE * 2 + b"\r\n"),
]


@pytest.mark.parametrize(("status", "pieces"), NEVER_A_REQUEST)
def test_bytes_that_are_no_request_get_a_4xx_response_and_are_closed(
    server: Server, status: int, pieces: list[bytes]
) -> None:
    received = answers(server, *pieces)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("code", "sent"), REFUSED)
def test_refused_request_head_gets_the_common_error_response(
    server: Server, code: str, sent: bytes
) -> None:
    assert exchange(server, sent)["code"] == code


def test_headers_just_below_the_limit_are_accepted(server: Server) -> None:
    assert (
        plain_http.get(
            server.url + "/readyz", headers={"x": "a" * (MAX_HEAD_BYTES - 1000)}
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "endless", [b"t: " + HUGE + b"\r\n", b"t: " + HUGE, b"1;" + HUGE, b"t: a\r\n" * 10_000]
)
def test_endless_trailers_and_chunk_sizes_end_the_connection(
    server: Server, endless: bytes
) -> None:
    sent = CHUNKED if endless.startswith(b"t") else CHUNKED.removesuffix(b"0\r\n")
    received = answers(server, sent, *[endless] * 3)
    assert received.count(b"HTTP/1.1 ") <= 1
    assert b"HTTP/1.1 2" not in received


def test_a_silent_connection_is_closed_after_the_timeout(server: Server) -> None:
    with connect(server) as connection:
        started = time.monotonic()
        assert rest_of(connection) == b""
        assert time.monotonic() - started > TIMEOUT_S * 0.8


def test_busy_service_serves_requests_that_arrived_in_time(
    server: Server,
) -> None:
    with connect(server) as connection:
        time.sleep(0.2)  # it was accepted
        os.kill(server.worker(), signal.SIGSTOP)
        try:
            connection.sendall(
                b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            time.sleep(TIMEOUT_S + 0.2)
        finally:
            os.kill(server.worker(), signal.SIGCONT)
        assert rest_of(connection).startswith(b"HTTP/1.1 200 ")


def test_slowly_dripping_headers_do_not_extend_the_timeout(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1 and so on, ")
        assert seconds_until_reset(connection) < 30


def test_endless_body_is_refused_and_its_connection_closed(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\ncontent-type: image/png\r\ncontent-length: 2000\r\n\r\n"
        )
        try:
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(TIMEOUT_S / 10)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            pytest.fail("the service kept the connection")
        received = rest_of(connection)
    assert received == b"" or error_in(received)["code"] == "body_timeout"


def test_a_connection_with_repeated_requests_stays_open(server: Server) -> None:
    """Control: deadlines apply to missing bytes, not to the connection."""
    with connect(server) as connection:
        for _ in range(6):
            connection.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"alive"}'):
                data = connection.recv(65536)
                assert data, "the service closed the connection"
                received += data
            time.sleep(TIMEOUT_S / 3)


def test_a_connection_above_the_limit_is_refused_and_earlier_ones_stay(server: Server) -> None:
    crowd = [connect(server) for _ in range(MAX_CONNECTIONS)]
    time.sleep(0.1)
    late = connect(server)
    assert error_in(rest_of(late))["code"] == "too_many_connections"
    crowd[0].sendall(b"GET /livez HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert rest_of(crowd[0]).startswith(b"HTTP/1.1 200")
    for connection in [*crowd, late]:
        connection.close()
    until(
        lambda: (
            plain_http.post(server.url + "/predict", content=picture(), headers=PNG).status_code
            == 200
        )
    )


@contextmanager
def full(server: Server) -> Iterator[None]:
    """Open as many connections as the limit allows."""
    with ExitStack() as crowd:
        for _ in range(MAX_CONNECTIONS):
            crowd.enter_context(connect(server))
        time.sleep(0.1)
        yield
    until(
        lambda: plain_http.get(server.url + "/readyz").status_code == 200
    )  # it has seen that they are gone


def seconds_until_reset(connection: socket.socket) -> float:
    """Return the seconds until the service resets the connection, or raise TimeoutError."""
    started = time.monotonic()
    while time.monotonic() - started < 30:
        try:
            connection.sendall(b"x")
        except ConnectionError:
            return time.monotonic() - started
        time.sleep(0.05)
    raise TimeoutError


def test_a_refused_caller_that_still_sends_can_read_the_reason(server: Server) -> None:
    """Closing a connection with unread bytes resets it, and the answer is lost."""
    with full(server), connect(server) as late:
        for piece in [
            b"POST /predict HTTP/1.1\r\ncontent-type: image/png\r\ncontent-length: 1000000\r\n\r\n",
            *[bytes(250_000)] * 4,
        ]:
            late.sendall(piece)
            time.sleep(0.05)
        assert error_in(late.makefile("rb").read())["code"] == "too_many_connections"


def test_a_refused_caller_that_never_closes_is_disconnected(server: Server) -> None:
    with full(server), connect(server) as late:
        assert error_in(rest_of(late))["code"] == "too_many_connections"
        assert seconds_until_reset(late) > LINGER_S / 2


PREDICT = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    b"content-length: %d\r\n\r\n%s"
)


def test_invalid_http_after_an_image_ends_the_connection(server: Server) -> None:
    received = answers(server, PREDICT % (len(picture()), picture()) + b"GARBAGE\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+) ", received) in ([b"400"], [b"200", b"400"])


def test_websocket_request_is_treated_as_an_ordinary_request(server: Server) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    refused, ready = (
        plain_http.get(server.url + path, headers=upgrade) for path in ("/predict", "/readyz")
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert refused.headers["x-request-id"] == refused.json()["error"]["request_id"]
    assert ready.status_code == 200


def test_caller_that_never_reads_its_responses_is_disconnected(server: Server) -> None:
    """Otherwise it would occupy a connection, and block the end of the service."""
    url, descriptors = httpx.URL(server.url), Path(f"/proc/{server.worker()}/fd")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((url.host, url.port or 80))
        time.sleep(0.1)
        place = {end.name for end in descriptors.iterdir()}
        connection.sendall(
            b"GET /docs HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400
        )  # answers of 14 MB
        started = time.monotonic()
        while place <= {end.name for end in descriptors.iterdir()}:
            assert time.monotonic() - started < 30 * TIMEOUT_S
            time.sleep(0.05)


def test_a_caller_that_sends_endlessly_does_not_fill_memory(server: Server) -> None:
    status = Path(f"/proc/{server.worker()}/status")

    def resident_kib() -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0])

    def discard() -> None:  # joining all answers would become slower than the service waits
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                pass

    with connect(server) as connection:
        before = resident_kib()
        receiving = threading.Thread(target=discard)
        receiving.start()
        is_over = time.monotonic() + 2
        while time.monotonic() < is_over:
            connection.sendall(b"GET /livez HTTP/1.1\r\n\r\n" * 1000)
        grown = resident_kib() - before
        connection.shutdown(socket.SHUT_RDWR)
        receiving.join()
    assert grown < 100 << 10


def test_lingering_refused_connections_are_few_and_do_not_count_against_the_limit(
    server: Server,
) -> None:
    descriptors = Path(f"/proc/{server.worker()}/fd")
    before = len(list(descriptors.iterdir()))
    with ExitStack() as refused, full(server):
        for _ in range(2 * MAX_LINGERING):
            refused.enter_context(connect(server))
        time.sleep(0.2)
        during = len(list(descriptors.iterdir()))
    assert during <= before + MAX_CONNECTIONS + MAX_LINGERING


def test_refused_connections_are_counted_in_the_metrics(server: Server) -> None:
    def counted() -> int:
        text = plain_http.get(server.url + "/metrics").text
        found = re.search(r'slipway_errors_total\{error="malformed_request"\} (\S+)', text)
        assert found
        return int(float(found.group(1)))

    before = counted()
    answers(server, b"no http\r\n\r\n")
    assert counted() == before + 1


def killed_server(folder: Path, urls: list[str], *, ready: bool) -> None:
    with running(folder) as server:
        if ready:
            server.wait()
        else:  # its worker has begun, and is not yet tied to it
            while not Path(
                f"/proc/{server.process.pid}/task/{server.process.pid}/children"
            ).read_text():
                time.sleep(0.01)
        urls.append(server.url)
        os.kill(server.process.pid, signal.SIGKILL)
        time.sleep(2)  # a zombie all this time: nobody has waited for it
        server.process.wait()


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="PR_SET_PDEATHSIG is Linux-only")
@pytest.mark.parametrize("ready", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_killed_server_leaves_no_worker_on_its_port(tmp_path: Path, ready: bool) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    urls: list[str] = []
    with pytest.raises(AssertionError):  # it did not end cleanly
        killed_server(tmp_path, urls, ready=ready)
    url, still_listens = httpx.URL(urls[0]), True
    for _ in range(100):
        time.sleep(0.05)
        try:
            socket.create_connection((url.host, url.port or 80)).close()
        except ConnectionRefusedError:
            still_listens = False
            break
    assert not still_listens
