"""Two real services on one real PostgreSQL share a rollout and lose no request."""

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.inputs.images import array_from_bytes
from slipway.serving.rollout.records.database import read_recorded
from slipway.traffic.postgres import DATABASE_URL
from tests import plain_http
from tests.serving.bundles import CONTRACT
from tests.serving.monitoring.postgres import cluster
from tests.serving.rolling import (
    PICTURES,
    PNG,
    failing_classifier,
    scaled_classifier,
    write_candidate,
)
from tests.serving.server import ROOT, Server, environment, running, until

LIMIT = 150  # of the first value, from which on the failing model answers NaN
GOOD, BAD = (
    next(one for one in PICTURES if (array_from_bytes(one, CONTRACT).flat[0] >= LIMIT) == is_bad)
    for is_bad in (False, True)
)


def rollout_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = plain_http.get(server.url + "/rollout").json()
    return found


def phase_at(server: Server) -> str | None:
    candidate = rollout_of(server)["candidate"]
    return candidate and str(candidate["phase"])


def num_workers(server: Server) -> int:
    return len(rollout_of(server)["workers"])


def version_at(server: Server, payload: bytes = GOOD) -> str:
    answer = plain_http.post(server.url + "/predict", content=payload, headers=PNG)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model_version"])


@pytest.mark.nightly(seconds=150)
def test_two_services_follow_one_rollout_and_an_alarm_in_one_returns_both(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [certified / name for name in "abc"]
    for folder in folders:
        shutil.copytree(certified / "bundle", folder / "bundle")
        shutil.copy(certified / "certificate.json", folder)
    new = write_candidate(certified / "new", scaled_classifier(2))
    failing = write_candidate(certified / "failing", failing_classifier(LIMIT))
    first, second = (load_bundle(path).version for path in (certified / "bundle", new))
    with cluster() as postgres:
        monkeypatch.setenv(DATABASE_URL, postgres.url)
        # The first row of the warm-up is below LIMIT.
        options: dict[str, Any] = {"database_url": postgres.url, "max_batch_size": 1}

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            """Run a command with the state of the first service."""
            done = [sys.executable, "-m", "slipway.serving.rollout", *arguments]
            variables = environment(folders[0], **options)
            return subprocess.run(
                done, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300
            )

        def started_canary(a: Server, b: Server) -> None:
            done = command("canary", str(failing), "--steps", "100", "--hold-requests", "10000")
            assert done.returncode == 0, done.stderr
            until(lambda: [phase_at(server) for server in (a, b)] == ["running"] * 2, seconds=90)

        def returned(server: Server) -> bool:
            assert version_at(server, BAD) == second  # the stable model answers for the candidate
            return phase_at(server) is None

        with (
            running(folders[0], **options) as a,
            running(folders[1], **options) as b,
        ):
            for server in (a, b):
                server.wait(seconds=120)
            until(lambda: [num_workers(server) for server in (a, b)] == [2, 2], seconds=90)
            assert [version_at(server) for server in (a, b)] == [first, first]
            done = command("--reason", "more data", "deploy", str(new))
            assert "swapped: all 2 workers have loaded and checked it" in done.stdout, done.stderr
            until(lambda: [version_at(server) for server in (a, b)] == [second, second])

            started_canary(a, b)
            until(lambda: returned(b), seconds=90)
            until(lambda: phase_at(a) is None)

            # The same without the database: the service that sees the fault returns alone.
            hang, go_on = (
                partial(postgres.send, number) for number in (signal.SIGSTOP, signal.SIGCONT)
            )
            for fault, end_fault in ((hang, go_on), (postgres.stop, postgres.start)):
                started_canary(a, b)
                fault()
                until(lambda: returned(b), seconds=90)
                assert phase_at(a) == "running"
                assert "SLIPWAY_DATABASE_URL cannot be used" in command("promote").stderr
                end_fault()
                until(lambda: phase_at(a) is None, seconds=90)

            # A new service serves the model of the others at once.
            with running(folders[2], **options) as c:
                c.wait(seconds=120)
                assert version_at(c) == second
                until(lambda: num_workers(c) == 3)
            assert {version_at(server) for server in (a, b)} == {second}
        entries = read_recorded(certified).entries
        whats = Counter(entry.what for entry in entries)
        assert (whats["rolled_back"], whats["swapped"], whats["proposed"]) == (3, 1, 4)
        assert (whats["started"], whats["stopped"]) == (3, 3)
        (proposed, *_) = (entry for entry in entries if entry.what == "proposed")
        assert proposed.reason == "deploy by command: more data"
        assert time.time() > entries[-1].time
