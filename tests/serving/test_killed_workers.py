"""A worker that is killed under load loses only the requests that it was processing."""

import asyncio
import itertools
import os
import re
import signal
import socket
import statistics
import time
from pathlib import Path

import httpx
import pytest

from slipway.serving.load_test.load import (
    REFUSED,
    Callers,
    by_status,
    closed_loop,
    http_request,
    run,
)
from tests import plain_http
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import Server, running

pytestmark = pytest.mark.nightly
IMAGE = http_request(body=picture())
NUM_CALLERS = 8
BACK_S = 5.0  # usually
UNWRITTEN_S = (
    0.3  # counts are written twenty times a second, later on a machine that does much else
)
LATE_S = 20.0  # on a machine that does much else


def metric(server: Server, line: str) -> float:
    found = re.search(
        rf"^{re.escape(line)} (\S+)$",
        plain_http.get(server.url + "/metrics", timeout=LATE_S).text,
        re.MULTILINE,
    )
    return float(found.group(1)) if found else 0.0


class Killed:
    """Callers that continue while the workers are killed, one after the other."""

    def __init__(self, server: Server, num_kills: int) -> None:
        self._server, self._num_kills = server, num_kills
        self.callers = Callers(server.url)
        self.kills: list[float] = []  # perf_counter seconds
        self.back: list[float] = []  # seconds until all workers were ready again
        self.pids: set[int] = set()

    async def run(self) -> None:
        numbers, is_over = itertools.count(), asyncio.Event()

        async def call() -> None:
            while not is_over.is_set():
                await self.callers.ask(next(numbers), IMAGE)
                await asyncio.sleep(0.005)

        tasks = [asyncio.create_task(call()) for _ in range(NUM_CALLERS)]
        await asyncio.sleep(0.5)
        for number in range(self._num_kills):
            await self._kill(number)
        is_over.set()
        await asyncio.gather(*tasks)
        self.callers.close()

    async def _kill(self, number: int) -> None:
        workers = self._server.workers()
        assert len(workers) == 2
        self.pids.update(workers)
        self.kills.append(time.perf_counter())
        os.kill(workers[number % 2], signal.SIGKILL)
        # Until the server has noticed that it died, it is among the workers, and counted as ready.
        while (
            workers[number % 2] in self._server.workers()
            or await asyncio.to_thread(metric, self._server, "slipway_ready") < 2
        ):
            assert time.perf_counter() - self.kills[-1] < LATE_S, self._server.log.read_text()
            await asyncio.sleep(0.05)
        self.back.append(time.perf_counter() - self.kills[-1])
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("num_kills", [2, 20])
def test_killed_workers_lose_only_requests_in_flight_and_restart_soon(
    tmp_path: Path, num_kills: int
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path, workers=2) as server:
        server.wait()
        killed = Killed(server, num_kills)
        run(killed.run())
        answers = killed.callers.answers
        seen = by_status(answers)
        assert set(seen) <= {200, REFUSED}
        assert seen[200] > 20 * num_kills
        for began, ended in itertools.pairwise([*killed.kills, time.perf_counter()]):
            lost = [
                answer
                for answer in answers
                if answer.status == REFUSED and began <= answer.due + answer.seconds < ended
            ]
            assert len(lost) <= NUM_CALLERS
            assert all(
                answer.due < began + 0.1 for answer in lost
            )  # all of them were asked before, or as it died
        assert statistics.median(killed.back) < BACK_S
        # The counts of a dead worker stay, except those it had not written; none is invented.
        time.sleep(0.5)
        counted = metric(server, 'slipway_requests_total{code="200",route="/predict"}')
        in_its_last_moments = sum(
            any(kill - UNWRITTEN_S < answer.due <= kill for kill in killed.kills)
            for answer in answers
        )
        assert seen[200] - in_its_last_moments <= counted <= seen[200] + seen[REFUSED]
        assert metric(server, "slipway_ready") == 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in killed.pids)
    url = httpx.URL(server.url)
    socket.create_server((url.host, url.port or 80)).close()


def test_killed_worker_among_several_is_restarted_in_a_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BentoML itself would not restart it there, until the last worker has died."""
    monkeypatch.setenv("BENTOML_CONTAINERIZED", "true")
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path, workers=2) as server:
        server.wait()
        killed = Killed(server, 1)
        run(killed.run())
        assert killed.back[0] < LATE_S


def test_killed_single_worker_is_restarted(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path) as server:
        server.wait()
        first = server.workers()
        os.kill(first[0], signal.SIGKILL)
        server.wait("/readyz", seconds=LATE_S)
        assert server.workers() != first
        assert by_status(
            run(closed_loop(server.url, lambda number: IMAGE, 4, num_requests=100))
        ) == {200: 100}
