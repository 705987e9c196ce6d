"""The search for reference cycles does not walk over what stays, and that is settled before the first request; threads take short turns."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from serving.models.model import ServedModel
from serving.process.interpreter import TURN_S, take_short_turns
from serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker

CODE = """
import gc
import numpy, pydantic
before = len(gc.get_objects())
from serving.process.interpreter import put_aside_what_stays
put_aside_what_stays()
assert gc.get_freeze_count() > 0.9 * before, (gc.get_freeze_count(), before)
assert len(gc.get_objects()) < 0.1 * before, (len(gc.get_objects()), before)
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() == 1
"""


def test_what_is_there_is_walked_over_no_more_and_new_cycles_are_found(root: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", CODE], check=True, cwd=root
    )  # in a process of its own: it is for good


TURNS = """
import threading, time
from serving.process.interpreter import TURN_S, take_short_turns

def longest_wait():
    is_over, waits = threading.Event(), []

    def compute():
        while not is_over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(50):
        before = time.perf_counter()
        time.sleep(0)  # gives the interpreter away, and asks for it again
        waits.append(time.perf_counter() - before)
    is_over.set()
    thread.join()
    return sorted(waits)[25]

long = longest_wait()
take_short_turns()
short = longest_wait()
assert long > 4 * TURN_S, long
assert short < long / 2, (short, long)
"""


@pytest.mark.nightly
def test_a_thread_that_computes_keeps_another_waiting_for_a_short_turn(root: Path) -> None:
    subprocess.run([sys.executable, "-c", TURNS], check=True, cwd=root)


def test_short_turns_are_the_interpreters_own_setting() -> None:
    before = sys.getswitchinterval()
    try:
        take_short_turns()
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    finally:
        sys.setswitchinterval(before)


def test_it_is_settled_once_when_the_model_is_there_and_takes_no_request_yet(
    make_settings: MakeSettings,
) -> None:
    seen: list[ServedModel | None] = []

    async def main() -> None:
        worker: ModelWorker = full_worker(make_settings(), settle=lambda: seen.append(worker.model))
        worker.start()
        await worker.loaded()
        assert worker.model is not None
        await worker.swap(worker.model)
        await worker.stop()

    asyncio.run(main())
    assert seen == [None]
