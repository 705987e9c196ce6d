"""Tests of the ordered map: order, bounded read-ahead, errors and killed workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipway.data.engine.parallel import ordered_map
from slipway.system.cores import num_cores
from slipway.system.errors import DataError, UnavailableError


def square(number: int) -> int:
    return number * number


def refuse_500(number: int) -> int:
    if number == 500:
        raise DataError("500 is refused")
    return number


def kill_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def process_of(_: int) -> int:
    return os.getpid()


def run(function: Callable[[int], int], count: int, num_workers: int) -> list[int]:
    return list(ordered_map(function, range(count), num_workers, lambda _: 1))


def test_ordered_map_returns_results_in_order() -> None:
    assert run(square, 1000, 1) == [number * number for number in range(1000)]


def test_ordered_map_computes_a_single_chunk_in_its_own_process() -> None:
    assert set(run(process_of, 200, 2)) == {os.getpid()}


@pytest.mark.process
def test_smaller_chunks_send_even_a_few_slow_items_to_the_workers() -> None:
    assert os.getpid() not in set(ordered_map(process_of, range(64), 2, lambda _: 1, chunk_items=4))
    assert set(ordered_map(process_of, range(64), 2, lambda _: 1)) == {os.getpid()}


def test_num_cores_is_at_least_one_and_at_most_the_cores_of_the_machine() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


@pytest.mark.process
def test_ordered_map_returns_results_of_several_processes_in_order() -> None:
    assert run(square, 2000, 2) == [number * number for number in range(2000)]
    assert os.getpid() not in run(process_of, 600, 2)


@pytest.mark.process
def test_an_error_in_a_worker_process_is_raised_in_the_parent() -> None:
    with pytest.raises(DataError, match="500 is refused"):
        run(refuse_500, 2000, 2)


@pytest.mark.process
def test_a_killed_worker_raises_an_error_instead_of_hanging() -> None:
    with pytest.raises(UnavailableError, match="was killed, most likely for lack of memory"):
        run(kill_itself, 600, 2)


@pytest.mark.process
def test_ordered_map_reads_only_a_few_chunks_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100_000):
            taken += 1
            yield number

    results = ordered_map(square, items(), 2, lambda _: 1)
    next(results)
    assert taken <= 6 * 256
    assert list(results)[-1] == 99_999**2


SLEEPER = """
import os, sys, time
from pathlib import Path
from slipway.data.engine.parallel import ordered_map
def work(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(60)
if __name__ == "__main__":
    list(ordered_map(work, range(600), 2, lambda _: 1))
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see processes")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script, seen = tmp_path / "sleeper.py", tmp_path / "seen"
    script.write_text(SLEEPER)
    seen.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(seen)], env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
    deadline = time.monotonic() + 60
    while len(list(seen.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(path.name) for path in seen.iterdir()]
    assert len(workers) == 2
    assert all(is_running(worker) for worker in workers)
    parent.kill()
    parent.wait()
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(worker) for worker in workers)
