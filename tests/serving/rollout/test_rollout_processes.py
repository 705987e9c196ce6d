"""Rollouts in real processes: several workers, workers that die, and commands."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.serving.rollout import commands
from slipway.serving.rollout.reports import read_reports
from slipway.serving.rollout.state import read_rollout
from slipway.serving.settings import Settings
from tests import plain_http
from tests.serving.conftest import MakeSettings
from tests.serving.rolling import Callers, scaled_classifier, scaled_probabilities, write_candidate
from tests.serving.server import ROOT, Server, environment, running, until

pytestmark = pytest.mark.process


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m slipway.serving.rollout` as an operator does."""
    done = [sys.executable, "-m", "slipway.serving.rollout", *arguments]
    return subprocess.run(
        done, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=120
    )


def workers(settings: Settings) -> dict[int, str | None]:
    return {
        report.process: report.serving for report in read_reports(settings.state) if report.is_alive
    }


def swapped(settings: Settings, bundle: Path) -> None:
    commands.propose(settings, "deploy", bundle)
    rollout, late = commands.wait(settings, 30)
    assert (rollout.candidate, late) == (None, [])


def resident_mib(process: int) -> float:
    return (
        int(Path(f"/proc/{process}/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 2**20
    )


def p99_ms(latencies: list[float]) -> float:
    return float(np.percentile(latencies, 99)) * 1e3


class TimedCallers(Callers):
    """Callers that also record the duration of each request."""

    def __init__(
        self, client: httpx.AsyncClient, expected: dict[str, Any], num_callers: int
    ) -> None:
        self.latencies: list[float] = []
        super().__init__(client, expected, num_callers)

    async def _post(self, row: int) -> httpx.Response:
        started = time.perf_counter()
        response = await super()._post(row)
        self.latencies.append(time.perf_counter() - started)
        return response


@pytest.mark.nightly
@pytest.mark.parametrize(("num_swaps", "num_requests"), [(10, 500), (60, 7000)])
@pytest.mark.timeout(300)
def test_swaps_of_a_real_service_under_load_lose_no_request(
    certified: Path, make_settings: MakeSettings, num_swaps: int, num_requests: int
) -> None:
    """S8: no failure, right answers, the same p99, and no memory growth after five swaps."""
    settings = make_settings()
    bundles = {
        factor: write_candidate(certified / str(factor), scaled_classifier(factor))
        for factor in (2, 3)
    }
    expected = {
        load_bundle(bundle).version: scaled_probabilities(factor)
        for factor, bundle in bundles.items()
    }
    expected[load_bundle(settings.bundle).version] = scaled_probabilities(1)

    async def main(server: Server) -> None:
        limits = httpx.Limits(max_connections=4)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            quiet = TimedCallers(client, expected, 4)
            await asyncio.sleep(3)
            await quiet.end()
            callers = TimedCallers(client, expected, 4)
            memory = []
            for number in range(num_swaps):
                await asyncio.to_thread(swapped, settings, bundles[2 + number % 2])
                memory.append(resident_mib(server.worker()))
            while len(callers.statuses) < num_requests:
                await asyncio.sleep(0.1)
            await callers.end()
        assert (set(callers.statuses), callers.wrong, quiet.wrong) == ({200}, 0, 0)
        assert set(callers.versions) == set(expected)
        assert memory[-1] <= memory[4] + 10
        assert p99_ms(callers.latencies) <= max(
            4 * p99_ms(quiet.latencies), 50
        )  # bench/swapping.py has the figure
        assert (
            f'slipway_swaps_total{{outcome="swapped"}} {num_swaps}.0'
            in plain_http.get(server.url + "/metrics").text
        )

    with running(certified) as server:
        server.wait()
        asyncio.run(main(server))


def test_rollout_commands_reach_all_workers_and_restarted_ones(
    certified: Path, new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    version = load_bundle(new_bundle).version
    with running(certified, workers=2) as server:
        server.wait()
        until(lambda: len(workers(settings)) == 2)
        done = command(certified, "deploy", str(new_bundle))
        assert (done.returncode, done.stderr) == (0, "")
        assert (
            done.stdout == f"{version} swapped: all 2 workers have loaded and checked it "
            f"(state: {settings.state})\n"
        )
        assert set(workers(settings).values()) == {version}
        dead = next(iter(workers(settings)))
        os.kill(dead, signal.SIGKILL)
        (settings.bundle / "bundle.json").unlink()  # as in the middle of a repro
        until(lambda: len(workers(settings)) == 2 and dead not in workers(settings))
        until(lambda: set(workers(settings).values()) == {version})
        shown = json.loads(command(certified, "status").stdout)
        assert (shown["stable"], shown["candidate"]) == (version, None)
        assert (
            'slipway_swaps_total{outcome="swapped"} 1.0'
            in plain_http.get(server.url + "/metrics").text
        )
        assert f"rollout: model {version} swapped" in server.log.read_text()


def test_death_of_a_worker_with_a_canary_rolls_the_canary_back(
    certified: Path, new_bundle: Path, make_settings: MakeSettings
) -> None:
    """The worker that replaces it does not load the candidate again."""
    settings = make_settings()
    stable = load_bundle(settings.bundle).version
    with running(certified) as server:
        server.wait()
        until(lambda: len(workers(settings)) == 1)
        done = command(certified, "canary", str(new_bundle), "--steps", "50,100")
        assert done.returncode == 0, done.stderr
        assert "it answers 50 % of the live requests, step 1 of 2" in done.stdout
        (first,) = workers(settings)
        os.kill(first, signal.SIGKILL)
        until(lambda: read_rollout(settings.state).candidate is None)
        event = read_rollout(settings.state).events[-1]
        assert (event.what, event.reason) == ("rolled_back", f"worker {first} died with it")
        until(lambda: set(workers(settings).values()) == {stable})
        server.wait()


def test_refused_rollout_command_prints_one_line_and_exits_with_1(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2), metrics={})
    with running(certified) as server:
        server.wait()
        until(lambda: len(workers(settings)) == 1)
        done = command(certified, "deploy", str(bundle))
        assert (done.returncode, done.stdout) == (1, "")
        assert "was refused: worker" in done.stderr
        assert "its bundle has no accuracy" in done.stderr
        assert "Traceback" not in done.stderr
        until(lambda: "its bundle has no accuracy" in server.log.read_text())
