"""Workers that counted and died, as processes of their own."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.metrics.dead_workers import WorkersCollector, settled
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


def test_what_dead_workers_counted_is_in_one_file_of_each_kind_and_none_of_it_is_lost(
    tmp_path: Path,
) -> None:
    alive = worker(tmp_path, 1000, "wait")
    assert alive.stdin
    assert alive.stdout
    assert alive.stdout.readline() == "counted\n"
    for number in range(1, 5):
        worker(tmp_path, number).communicate()
        if number == 2:
            with settled(tmp_path):  # some are added up already when others die
                pass
    before = exposition(tmp_path)
    assert 'asked_total{code="200"} 1010.0' in before
    assert "waited_count 5.0" in before
    with ThreadPoolExecutor(8) as threads:  # as many workers are asked at once

        def read() -> set[str]:
            with settled(tmp_path):
                return exposition(tmp_path)

        assert all(found.result() == before for found in [threads.submit(read) for _ in range(8)])
    assert {path.name for path in tmp_path.glob("*.db")} == {
        f"{kind}_{number}.db" for kind in ("counter", "histogram") for number in (0, alive.pid)
    }
    alive.communicate()


def test_a_worker_that_begins_or_died_at_its_beginning_has_an_empty_file_and_costs_no_scrape(
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
        with settled(tmp_path):
            assert 'asked_total{code="200"} 7.0' in exposition(tmp_path)
    assert not list(tmp_path.glob(f"*{dead.pid}*"))


def test_without_dead_workers_nothing_is_written(tmp_path: Path) -> None:
    alive = worker(tmp_path, 7, "wait")
    assert alive.stdout
    assert alive.stdout.readline() == "counted\n"
    with settled(tmp_path):
        assert {path.name for path in tmp_path.glob("*.db")} == {
            f"counter_{alive.pid}.db",
            f"histogram_{alive.pid}.db",
        }
    alive.communicate()


def test_a_reader_is_not_in_the_way_of_another(tmp_path: Path) -> None:
    with settled(tmp_path), settled(tmp_path), pytest.raises(ZeroDivisionError), settled(tmp_path):
        raise ZeroDivisionError


@pytest.mark.process
@pytest.mark.skipif(not is_possible, reason="system calls are watched on Linux on x86-64 alone")
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_scraper_killed_between_two_file_operations_counts_nothing_twice_and_loses_nothing(
    tmp_path: Path, times: int
) -> None:
    counted = tmp_path / "counted"
    counted.mkdir()
    for number in (1, 2, 3):
        worker(counted, number).communicate()
        if number == 1:
            with settled(counted):  # there is a sum already when the others die
                pass
    expected = exposition(counted)
    operations: list[str] = []
    directory = tmp_path / "killed"

    def scrape() -> None:
        with settled(directory):
            pass

    while True:
        shutil.copytree(counted, directory)
        operation = killed_at(len(operations) + 1, scrape)
        for _ in range(times - 1):
            killed_at(len(operations) + 1, scrape)  # the one that finds this is killed, too
        with settled(directory):
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


def test_what_a_killed_scraper_left_is_read_by_one_that_finds_no_dead_workers(
    tmp_path: Path,
) -> None:
    worker(tmp_path, 5).communicate()
    expected = exposition(tmp_path)
    for path in list(tmp_path.glob("*.db")):
        path.rename(path.with_suffix(".dead"))  # taken, and not added up yet
    with settled(tmp_path):
        assert exposition(tmp_path) == expected
