"""Monitoring in real processes, with killed workers, failing disks and damaged databases."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from slipway.traffic.monitoring_records import DATABASE, read_ground_truth
from tests.serving.monitoring.monitored import monitored_bundle, pictures
from tests.serving.request_log.test_logged_service import can_mount
from tests.serving.server import ROOT, Server, environment, free_port, running, until

pytestmark = pytest.mark.process
PNG = {"content-type": "image/png"}
CLIENT = httpx.Client(trust_env=False, timeout=20)
PAYLOADS = pictures(11, 200)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    CLIENT.close()


def ask(server: Server, number: int, name: str | None = None) -> int:
    headers = PNG | ({"x-request-id": name} if name else {})
    return CLIENT.post(
        server.url + "/predict", content=PAYLOADS[number % len(PAYLOADS)], headers=headers
    ).status_code


def predict_label(server: Server, number: int, name: str) -> str:
    answer = CLIENT.post(
        server.url + "/predict", content=PAYLOADS[number], headers=PNG | {"x-request-id": name}
    ).json()
    return str(answer["label"])


def require_all_answered(server: Server, num_requests: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda number: ask(server, number), range(num_requests))) == {200}


def counted(server: Server, line: str) -> float:
    found = re.search(
        rf"^{re.escape(line)} (\S+)$", CLIENT.get(server.url + "/metrics").text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


def faults(server: Server, part: str = "state") -> float:
    return counted(server, f'slipway_monitoring_errors_total{{part="{part}"}}')


def rows_in(database: Path) -> int:
    """Return the number of rows in all windows; 0 without a database."""
    with (
        suppress(sqlite3.DatabaseError),
        closing(sqlite3.connect(database, timeout=5)) as connection,
    ):
        return int(connection.execute("SELECT total(num_rows) FROM windows").fetchone()[0])
    return 0


def until_merged(database: Callable[[], Path]) -> None:
    """Wait for two merges of a worker: between them it collects all completed requests."""

    def merges() -> dict[str, int]:
        with (
            suppress(sqlite3.DatabaseError),
            closing(sqlite3.connect(database(), timeout=5)) as connection,
        ):
            return dict(connection.execute("SELECT worker, sequence FROM parts"))
        return {}

    before = merges()

    def have_merged() -> bool:
        advanced = [number - before.get(one, 0) for one, number in merges().items()]
        return any(advanced) and all(number != 1 for number in advanced)

    until(have_merged)


@contextmanager
def killed_at_the_end(folder: Path, **settings: object) -> Iterator[Server]:
    """Start a server, and end it with SIGKILL after the block."""
    port, log = free_port(), folder / "service.log"
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "slipway.serving.service:Slipway",
        "--port",
        str(port),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(folder, **settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Server(process, f"http://127.0.0.1:{port}", log)
        server.wait()
        yield server
    finally:
        process.kill()
        process.wait()


def copied(database: Path, folder: Path) -> Path:
    """Copy a database from another process' mount: SQLite resolves /proc/PID/root to our own."""
    folder.mkdir(exist_ok=True)
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):  # not begun yet, or not in use
            shutil.copy(f"{database}{suffix}", folder / f"{database.name}{suffix}")
    (folder / f"{database.name}-shm").unlink(missing_ok=True)
    return folder / database.name


@pytest.mark.nightly
def test_rows_of_two_workers_count_once_even_if_workers_are_killed(tmp_path: Path) -> None:
    monitored_bundle(tmp_path)
    database = tmp_path / "state" / DATABASE
    with killed_at_the_end(tmp_path, workers=2, window_rows=300) as server:
        until(lambda: counted(server, "slipway_ready") == 2)
        require_all_answered(server, 400)
        until(lambda: rows_in(database) == 400)
        assert counted(server, 'slipway_monitored_rows_total{outcome="monitored"}') == 400
        until(lambda: counted(server, 'slipway_drift_windows_total{verdict="clean"}') == 1)

        answered = 0
        for number in range(150):
            if number == 75:
                os.kill(server.worker(), signal.SIGKILL)
            with suppress(httpx.TransportError):  # in the killed worker
                answered += ask(server, number) == 200
        until(lambda: rows_in(database) >= 400 + answered - 75)
        until(lambda: counted(server, "slipway_ready") == 2)
        until_merged(lambda: database)
        before = rows_in(database)
        assert (
            400 + answered - 75 <= before <= 400 + answered
        )  # the killed worker may lose its last seconds; no row counts twice
    with killed_at_the_end(tmp_path, workers=2, window_rows=300) as server:
        names = [f"id-{number}" for number in range(100)]
        labels = [predict_label(server, number, name) for number, name in enumerate(names)]
        until(lambda: rows_in(database) == before + 100)
        items = [
            {"request_id": name, "ground_truth": label}
            for name, label in zip(names, labels, strict=True)
        ]
        response = CLIENT.post(server.url + "/feedback", json={"feedback": items})
        assert response.status_code in (
            200,
            202,
        )  # the other worker may still hold the last predictions
        until(lambda: counted(server, 'slipway_feedback_total{outcome="joined"}') == 100)
        until(lambda: counted(server, 'slipway_feedback_quality{metric="accuracy"}') == 1)
    assert len(list(read_ground_truth(tmp_path / "state"))) == 100
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.nightly
def test_locked_damaged_or_removed_database_fails_no_request_and_recovers(
    tmp_path: Path,
) -> None:
    monitored_bundle(tmp_path)
    state = tmp_path / "state"
    with running(tmp_path) as server:
        server.wait()
        require_all_answered(server, 20)
        until(lambda: rows_in(state / DATABASE) == 20)

        with closing(
            sqlite3.connect(state / DATABASE, isolation_level=None)
        ) as other:  # another process locks it
            other.execute("BEGIN IMMEDIATE")
            before = faults(server)
            require_all_answered(server, 50)
            until(lambda: faults(server) > before)
            other.execute("ROLLBACK")
        until(lambda: rows_in(state / DATABASE) == 70)  # delayed rows are stored

        (state / "restored").write_bytes(b"no database at all" * 500)  # restored from a bad backup
        for name in (f"{DATABASE}-wal", f"{DATABASE}-shm"):
            (state / name).unlink()
        before = faults(server)
        (state / "restored").rename(state / DATABASE)
        require_all_answered(server, 50)
        until(lambda: faults(server) > before)
        until(lambda: rows_in(state / DATABASE) == 50, 30)
        aside = [
            path.name
            for path in state.iterdir()
            if re.fullmatch(rf"{DATABASE}\.\d{{8}}T[\d.]+Z", path.name)
        ]
        assert len(aside) == 1
        assert aside[0] in server.log.read_text()

        for path in state.glob(f"{DATABASE}*"):  # an operator removes it
            path.unlink()
        require_all_answered(server, 30)
        until(lambda: rows_in(state / DATABASE) == 30)


def test_read_only_or_full_disk_fails_no_request_and_loses_no_row(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no right to mount a file system here")
    monitored_bundle(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    on_a_disk = (
        "unshare",
        "-m",
        "bash",
        "-c",
        f'mount -t tmpfs -o ro,size=64k none {disk} && exec "$@"',
        "bash",
    )
    with running(tmp_path, under=on_a_disk, state=disk / "state") as server:
        server.wait()
        entered = Path(f"/proc/{server.process.pid}/root{disk}/state") / DATABASE

        def remount(options: str) -> None:
            subprocess.run(
                [
                    "nsenter",
                    "-t",
                    str(server.process.pid),
                    "-m",
                    "mount",
                    "-o",
                    f"remount,{options}",
                    disk,
                ],
                check=True,
            )

        require_all_answered(server, 50)
        until(lambda: faults(server) > 0)  # read-only
        remount("rw,size=64k")
        before = faults(server)
        require_all_answered(server, 50)
        until(lambda: faults(server) > before)  # full
        remount("rw,size=16m")
        require_all_answered(server, 50)
        until(lambda: rows_in(copied(entered, tmp_path / "copy")) == 150)  # none lost, none doubled
        before = faults(server)
        until_merged(lambda: copied(entered, tmp_path / "copy"))
        assert faults(server) == before
        log = server.log.read_text()
        assert "Read-only file system" in log
        assert log.count("monitoring: merging failed") <= 3  # once per failure, not per round
