"""Garbage collection skips long-lived objects, and threads switch quickly."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from slipway.serving.models.model import ServedModel
from slipway.serving.process.worker_process import (
    SWITCH_INTERVAL_S,
    set_switch_interval,
    silence_libraries,
)
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker

CODE = """
import gc
import numpy, pydantic
before = len(gc.get_objects())
from slipway.serving.process.worker_process import freeze_gc
freeze_gc()
assert gc.get_freeze_count() > 0.9 * before, (gc.get_freeze_count(), before)
assert len(gc.get_objects()) < 0.1 * before, (len(gc.get_objects()), before)
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() == 1
"""


def test_garbage_collection_skips_frozen_objects_and_frees_new_cycles(root: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", CODE], check=True, cwd=root
    )  # in another process, because it is permanent


TURNS = """
import threading, time
from slipway.serving.process.worker_process import SWITCH_INTERVAL_S, set_switch_interval

def longest_wait():
    is_over, waits = threading.Event(), []

    def compute():
        while not is_over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(50):
        before = time.perf_counter()
        time.sleep(0)  # releases the interpreter and waits for it again
        waits.append(time.perf_counter() - before)
    is_over.set()
    thread.join()
    return sorted(waits)[25]

long = longest_wait()
set_switch_interval()
short = longest_wait()
assert long > 4 * SWITCH_INTERVAL_S, long
assert short < long / 2, (short, long)
"""


@pytest.mark.nightly
def test_busy_thread_delays_other_threads_by_the_switch_interval_only(root: Path) -> None:
    subprocess.run([sys.executable, "-c", TURNS], check=True, cwd=root)


def test_set_switch_interval_sets_the_interpreters_interval() -> None:
    before = sys.getswitchinterval()
    try:
        set_switch_interval()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_uvicorn_prepares_lines_of_its_access_log_only_if_they_are_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    async def has_access_log() -> bool:
        return HttpToolsProtocol(config, ServerState(), {}).access_log

    caplog.set_level(level, "uvicorn.access")
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    config = uvicorn.Config(application, log_config=None)
    assert asyncio.run(has_access_log())
    silence_libraries()
    assert asyncio.run(has_access_log()) == (level == logging.INFO)


def test_settle_runs_once_between_loading_and_the_first_request(
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
