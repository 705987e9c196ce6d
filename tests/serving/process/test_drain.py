"""Real processes from SIGTERM to their end: clients that check readiness lose no request."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.load_test.load import (
    REFUSED,
    Answer,
    Callers,
    by_status,
    closed_loop,
    http_request,
    run,
)
from tests import plain_http
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.server import free_port, running, until

pytestmark = pytest.mark.process
# From the end of the drain to the end of a server with nothing in flight, on an idle machine.
MAX_END_S = 2.0
PNG = {"content-type": "image/png"}
IMAGE = http_request(body=picture())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    return tmp_path


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_server_after_sigterm_is_not_ready_but_predicts_until_drained(
    folder: Path, num_workers: int, is_nightly: bool
) -> None:
    with running(folder, drain_s=2.5, workers=num_workers) as server:
        server.wait()
        with (
            httpx.Client(base_url=server.url) as before,
            httpx.Client(base_url=server.url) as at_once,
        ):
            assert before.get("/readyz").status_code == at_once.get("/livez").status_code == 200
            signalled = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            while at_once.get("/readyz").status_code == 200:
                assert (
                    not is_nightly or time.monotonic() - signalled < 0.5
                )  # 0.1 s on a machine that does nothing else
            # Under load a signal may reach one worker later than the other.
            url = server.url + "/readyz"
            while not is_nightly and any(plain_http.get(url).status_code == 200 for _ in range(8)):
                time.sleep(0.02)
            for _ in range(10):  # new connections, to each of the workers
                ready = plain_http.get(server.url + "/readyz")
                assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
                assert "shutting down" in ready.json()["error"]["message"]
                answer = plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            kept = before.post("/predict", content=picture(), headers=PNG)
            assert (kept.status_code, kept.headers["connection"]) == (200, "close")
            assert plain_http.get(server.url + "/livez").status_code == 200
            assert "slipway_ready 0.0" in plain_http.get(server.url + "/metrics").text
        assert not is_nightly or time.monotonic() - signalled < 2.5, (
            "the machine is too slow to see it drain"
        )
        assert server.process.wait(20) == 0
        ended = time.monotonic() - signalled - 2.5
        assert 0 < ended < (MAX_END_S if is_nightly else 20)


@pytest.mark.nightly(seconds=5)
def test_server_without_a_drain_time_ends_at_once_and_frees_its_port(
    folder: Path,
) -> None:
    """Control: shows the effect of the drain."""
    with running(folder, drain_s=0, workers=2) as server:
        server.wait()
        run(closed_loop(server.url, lambda number: IMAGE, 8, num_requests=100))
        url = httpx.URL(server.url)
        # Connections without a request are not in flight: silent, idle and in the middle of a head.
        with ExitStack() as idle:
            for sent in (b"", b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /livez HTT"):
                connection = socket.create_connection((url.host, url.port or 80))
                idle.enter_context(connection).sendall(sent)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            plain_http.get(server.url + "/livez")
        socket.create_server((url.host, url.port or 80)).close()


@pytest.mark.parametrize(
    "is_ready", [True, pytest.param(False, marks=pytest.mark.nightly(seconds=5))]
)
def test_ctrl_c_ends_a_server_without_draining_or_errors(folder: Path, is_ready: bool) -> None:
    with running(folder, drain_s=60) as server:
        server.wait() if is_ready else until(lambda: bool(server.workers()))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert "Aborted" not in server.log.read_text()


@pytest.mark.nightly(seconds=7)
def test_a_second_sigterm_ends_a_server_at_once(folder: Path) -> None:
    with running(folder, drain_s=60, workers=2) as server:
        server.wait()
        killed = server.workers()
        server.process.send_signal(signal.SIGTERM)
        server.wait("/readyz", 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in killed)


@pytest.mark.nightly(seconds=7)
def test_a_server_that_is_not_ready_ends_without_draining(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")  # without its certificate
    with running(tmp_path, drain_s=60) as server:
        server.wait("/livez")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("pause", [0.0, pytest.param(0.3, marks=pytest.mark.nightly(seconds=5))])
def test_sigterm_at_any_moment_of_the_start_ends_the_server(folder: Path, pause: float) -> None:
    with running(folder, workers=2) as server:
        deadline = time.monotonic() + 30
        while not server.workers() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(pause)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) in (0, -signal.SIGTERM)


def test_ending_server_completes_requests_in_flight_and_closes_its_port_first(
    tmp_path: Path,
) -> None:
    """After the port closes, new callers are refused at once instead of hanging."""
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", slow_classifier(24)))
    with running(tmp_path, drain_s=1, max_wait_s=60, num_threads=1, request_timeout_s=60) as server:
        server.wait()

        async def main() -> list[Answer]:
            callers = Callers(server.url)
            asked = [asyncio.create_task(callers.ask(number, IMAGE)) for number in range(200)]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*asked)
            callers.close()
            return answers

        answers = run(main())
        assert by_status(answers) == {200: 200}
        assert server.process.wait(20) == 0


class ReadinessClient:
    """A client that checks readiness every 50 ms, uses ready replicas, and never retries."""

    def __init__(self, urls: list[str]) -> None:
        self._replicas = {url: Callers(url) for url in urls}
        self._ready: set[str] = set()
        self._is_over = False
        self.num_unserved = 0  # there was no ready replica to send it to
        self.num_moved = 0  # there was nobody to connect to: nothing was sent

    @property
    def answers(self) -> list[Answer]:
        return [answer for callers in self._replicas.values() for answer in callers.answers]

    async def watch(self) -> None:
        ready = http_request("/readyz", method="GET", headers=[("connection", "close")])
        while not self._is_over:
            for url in self._replicas:
                answer = await Callers(url).ask(0, ready)
                (self._ready.add if answer.status == 200 else self._ready.discard)(url)
            await asyncio.sleep(0.05)

    async def send(self, number_of: Callable[[], int], pause: float) -> None:
        while not self._is_over:
            number = number_of()
            ready = sorted(self._ready)
            if ready:
                await self._replicas[ready[number % len(ready)]].ask(number, IMAGE)
            else:
                self.num_unserved += 1
            await asyncio.sleep(pause)

    def end(self) -> None:
        self._is_over = True
        for callers in self._replicas.values():
            callers.close()


def rolling_restart(
    root: Path, num_requests: int, num_callers: int = 8, pause: float = 0.02, **settings: Any
) -> ReadinessClient:
    """Restart two replicas in turn under load, until `num_requests` were sent."""
    ports, stacks = [free_port(), free_port()], [ExitStack(), ExitStack()]

    @contextmanager
    def replica(number: int) -> Any:
        folder = root / f"replica{number}"
        folder.mkdir(exist_ok=True)
        certify(folder / "certificate.json", write_bundle(folder / "bundle"))
        with running(folder, port=ports[number], **settings) as server:
            server.wait()
            yield server

    async def main() -> ReadinessClient:
        for number, stack in enumerate(stacks):
            await asyncio.to_thread(stack.enter_context, replica(number))
        client = ReadinessClient([f"http://127.0.0.1:{port}" for port in ports])
        numbers = iter(range(1 << 62))
        tasks = [asyncio.create_task(client.watch())]
        await asyncio.sleep(0.3)
        tasks += [
            asyncio.create_task(client.send(lambda: next(numbers), pause))
            for _ in range(num_callers)
        ]
        restarted = 0
        while restarted < 2 or len(client.answers) < num_requests:
            stack = stacks[restarted % 2]
            await asyncio.to_thread(stack.close)  # SIGTERM, and a clean end
            await asyncio.to_thread(stack.enter_context, replica(restarted % 2))
            await asyncio.sleep(0.3)
            restarted += 1
        client.end()
        await asyncio.gather(*tasks)
        return client

    try:
        return run(main())  # type: ignore[no-any-return]
    finally:
        for stack in stacks:
            stack.close()


@pytest.mark.nightly
@pytest.mark.parametrize("num_requests", [500, 3000])
def test_a_rolling_restart_of_two_replicas_under_load_fails_no_request(
    tmp_path: Path, num_requests: int
) -> None:
    # Long enough for the client to notice on a busy machine, too.
    client = rolling_restart(tmp_path, num_requests, drain_s=3, workers=1)
    assert by_status(client.answers) == {200: len(client.answers)}
    assert client.num_unserved == 0
    assert len(client.answers) >= num_requests


@pytest.mark.nightly
def test_rolling_restart_without_a_drain_time_loses_requests(tmp_path: Path) -> None:
    """Control: the client loses requests."""
    client = rolling_restart(tmp_path, 1000, num_callers=16, pause=0.0, drain_s=0)
    assert by_status(client.answers)[REFUSED] > 0


def test_the_control_socket_of_the_server_is_not_reachable(folder: Path) -> None:
    """BentoML's process manager would accept commands on a TCP port from any local user."""
    with running(folder) as server:
        server.wait()
        sockets = {
            os.readlink(path)
            for path in Path(f"/proc/{server.process.pid}/fd").iterdir()
            if path.is_symlink()
        }
        listening = [
            line.split()
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        ]
        own = {
            int(fields[1].partition(":")[2], 16)
            for fields in listening
            if f"socket:[{fields[9]}]" in sockets
        }
        assert own == {httpx.URL(server.url).port}
