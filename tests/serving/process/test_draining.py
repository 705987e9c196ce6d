"""From SIGTERM to the end, against real processes: told in time, nobody loses a request."""

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

from serving.load_test.load import (
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
from tests.serving.server import free_port, running

pytestmark = pytest.mark.process
PNG = {"content-type": "image/png"}
IMAGE = http_request(body=picture())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    return tmp_path


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_after_sigterm_it_is_not_ready_at_once_and_answers_until_the_drain_is_over(
    folder: Path, num_workers: int, is_nightly: bool
) -> None:
    with running(folder, drain_s=2.5, workers=num_workers) as server:
        server.wait()
        with (
            httpx.Client(base_url=server.url) as before,
            httpx.Client(base_url=server.url) as at_once,
        ):
            assert before.get("/readyz").status_code == at_once.get("/livez").status_code == 200
            told = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            while at_once.get("/readyz").status_code == 200:
                assert (
                    not is_nightly or time.monotonic() - told < 0.5
                )  # 0.1 s on a machine that does nothing else
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
        assert not is_nightly or time.monotonic() - told < 2.5, (
            "the machine is too slow to see it drain"
        )
        assert server.process.wait(20) == 0
        assert time.monotonic() - told > 2.5


def test_without_a_drain_it_ends_at_once_and_the_next_server_can_take_its_port(
    folder: Path,
) -> None:
    """The twin: what the drain is for."""
    with running(folder, drain_s=0, workers=2) as server:
        server.wait()
        run(closed_loop(server.url, lambda number: IMAGE, 8, num_requests=100))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            plain_http.get(server.url + "/livez")
        url = httpx.URL(server.url)
        socket.create_server((url.host, url.port or 80)).close()


def test_ctrl_c_does_not_drain(folder: Path) -> None:
    with running(folder, drain_s=60) as server:
        server.wait()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0


def test_a_second_sigterm_ends_it_at_once(folder: Path) -> None:
    with running(folder, drain_s=60, workers=2) as server:
        server.wait()
        killed = server.workers()
        server.process.send_signal(signal.SIGTERM)
        server.wait("/readyz", 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in killed)


def test_one_that_is_not_ready_ends_without_a_drain(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")  # without its certificate
    with running(tmp_path, drain_s=60) as server:
        server.wait("/livez")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_sigterm_at_any_moment_of_the_start_ends_it(folder: Path, pause: float) -> None:
    with running(folder, workers=2) as server:
        deadline = time.monotonic() + 30
        while not server.workers() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(pause)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) in (0, -signal.SIGTERM)


def test_requests_in_flight_are_answered_and_the_port_is_closed_before_the_end(
    tmp_path: Path,
) -> None:
    """Between the close of the port and the end of the process, new callers are refused: nobody is left to hang."""
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


class Following:
    """A client that asks each replica every 50 ms whether it is ready, sends to those that are, and never sends anything twice."""

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
) -> Following:
    """Two replicas behind a client that follows their readiness; each in its turn is ended and started anew, until so many were sent."""
    ports, stacks = [free_port(), free_port()], [ExitStack(), ExitStack()]

    @contextmanager
    def replica(number: int) -> Any:
        folder = root / f"replica{number}"
        folder.mkdir(exist_ok=True)
        certify(folder / "certificate.json", write_bundle(folder / "bundle"))
        with running(folder, port=ports[number], **settings) as server:
            server.wait()
            yield server

    async def main() -> Following:
        for number, stack in enumerate(stacks):
            await asyncio.to_thread(stack.enter_context, replica(number))
        client = Following([f"http://127.0.0.1:{port}" for port in ports])
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
def test_a_rolling_restart_of_two_replicas_under_load_fails_nobody(
    tmp_path: Path, num_requests: int
) -> None:
    client = rolling_restart(tmp_path, num_requests, drain_s=1, workers=1)
    assert by_status(client.answers) == {200: len(client.answers)}
    assert client.num_unserved == 0
    assert len(client.answers) >= num_requests


@pytest.mark.nightly
def test_without_a_drain_the_same_restart_loses_requests(tmp_path: Path) -> None:
    """The twin: the client sees what it should not."""
    client = rolling_restart(tmp_path, 1000, num_callers=16, pause=0.0, drain_s=0)
    assert by_status(client.answers)[REFUSED] > 0


def test_the_control_of_the_server_is_reached_by_nobody_else(folder: Path) -> None:
    """BentoML's process manager takes commands on a TCP port: anybody on the machine could start programs as its user."""
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
