"""Merging the metric files of dead workers, which are real processes."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from slipway.serving.metrics.worker_files import WorkersCollector, merged
from tests.conftest import ROOT
from tests.file_operations import is_possible, killed_at

COUNT = """
import sys
from prometheus_client import CollectorRegistry, Counter, Histogram
registry = CollectorRegistry()
asked = Counter("asked", "Asked.", ["code"], registry=registry)
waited = Histogram("waited", "Waited.", buckets=(1, 2), registry=registry)
asked.labels("200").inc(int(sys.argv[1]))
asked.labels(sys.argv[1]).inc()
waited.observe(1.5)
if len(sys.argv) > 2:
    print("counted", flush=True)
    sys.stdin.read()
"""


def worker(directory: Path, count: int, *more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    command = [sys.executable, "-c", COUNT, str(count), *more]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def exposition(directory: Path) -> set[str]:
    registry = CollectorRegistry()
    registry.register(WorkersCollector(directory))
    return {line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"}


def test_files_of_dead_workers_are_merged_into_one_per_kind_without_loss(
    tmp_path: Path,
) -> None:
    alive = worker(tmp_path, 1000, "wait")
    assert alive.stdin
    assert alive.stdout
    assert alive.stdout.readline() == "counted\n"
    for number in range(1, 5):
        worker(tmp_path, number).communicate()
        if number == 2:
            with merged(tmp_path):  # some are added up already when others die
                pass
    before = exposition(tmp_path)
    assert 'asked_total{code="200"} 1010.0' in before
    assert "waited_count 5.0" in before
    with ThreadPoolExecutor(8) as threads:  # as many workers are asked at once

        def read() -> set[str]:
            with merged(tmp_path):
                return exposition(tmp_path)

        assert all(found.result() == before for found in [threads.submit(read) for _ in range(8)])
    assert {path.name for path in tmp_path.glob("*.db")} == {
        f"{kind}_{number}.db" for kind in ("counter", "histogram") for number in (0, alive.pid)
    }
    alive.communicate()


def test_empty_files_of_starting_or_dead_workers_do_not_fail_a_scrape(
    tmp_path: Path,
) -> None:
    worker(tmp_path, 7).communicate()
    dead = worker(tmp_path, 1)
    dead.communicate()
    for kind in ("counter", "histogram"):
        (tmp_path / f"{kind}_{dead.pid}.db").write_bytes(b"")
        (tmp_path / f"{kind}_{os.getpid()}.db").touch()
    (tmp_path / f"gauge_livesum_{os.getpid()}.db").touch()
    for _ in range(2):
        with merged(tmp_path):
            assert 'asked_total{code="200"} 7.0' in exposition(tmp_path)
    assert not list(tmp_path.glob(f"*{dead.pid}*"))


def test_a_scrape_without_dead_workers_writes_nothing(tmp_path: Path) -> None:
    alive = worker(tmp_path, 7, "wait")
    assert alive.stdout
    assert alive.stdout.readline() == "counted\n"
    with merged(tmp_path):
        assert {path.name for path in tmp_path.glob("*.db")} == {
            f"counter_{alive.pid}.db",
            f"histogram_{alive.pid}.db",
        }
    alive.communicate()


def test_concurrent_scrapes_do_not_block_each_other(tmp_path: Path) -> None:
    with merged(tmp_path), merged(tmp_path), pytest.raises(ZeroDivisionError), merged(tmp_path):
        raise ZeroDivisionError


@pytest.mark.process
@pytest.mark.skipif(not is_possible, reason="system calls are traced on Linux on x86-64 only")
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_scraper_killed_between_file_operations_loses_and_duplicates_nothing(
    tmp_path: Path, times: int
) -> None:
    counted = tmp_path / "counted"
    counted.mkdir()
    for number in (1, 2, 3):
        worker(counted, number).communicate()
        if number == 1:
            with merged(counted):  # there is a sum already when the others die
                pass
    expected = exposition(counted)
    operations: list[str] = []
    directory = tmp_path / "killed"

    def scrape() -> None:
        with merged(directory):
            pass

    while True:
        shutil.copytree(counted, directory)
        operation = killed_at(len(operations) + 1, scrape)
        for _ in range(times - 1):
            killed_at(len(operations) + 1, scrape)  # the one that finds this is killed, too
        with merged(directory):
            assert exposition(directory) == expected, (
                f"killed before {operation}, the {len(operations) + 1}th operation"
            )
        assert {path.name for path in directory.iterdir()} == {
            "counter_0.db",
            "histogram_0.db",
            "dead_workers.lock",
        }
        shutil.rmtree(directory)
        if operation is None:
            break
        operations.append(operation)
    assert Counter(operations)["rename"] >= 4
    assert Counter(operations)["unlink"] >= 4


def test_a_scrape_without_dead_workers_completes_the_merge_of_a_killed_scraper(
    tmp_path: Path,
) -> None:
    worker(tmp_path, 5).communicate()
    expected = exposition(tmp_path)
    for path in list(tmp_path.glob("*.db")):
        path.rename(path.with_suffix(".dead"))  # taken, and not added up yet
    with merged(tmp_path):
        assert exposition(tmp_path) == expected
