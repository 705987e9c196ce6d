"""Turns with and without monitoring, within one worker.

A worker writes its turns to the file BENCH_TURNS. BENCH_ORDER is the repeated order of turns with
(1) and without monitoring (0), each of BENCH_TURN_SECONDS. The monitoring's own thread runs during
all of them.
"""

import asyncio
import json
import os
import time
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, cast

from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.worker import ModelWorker
from slipway.system import files

FILE, ORDER, SECONDS = "BENCH_TURNS", "BENCH_ORDER", "BENCH_TURN_SECONDS"


class Turn(NamedTuple):
    """Work and processor time of one turn."""

    is_monitored: bool
    seconds: float
    answered: int
    loop_seconds: float  # of processor time, of the event loop's thread
    monitor_seconds: float  # of processor time, of the monitoring's thread


async def take_turns(worker: ModelWorker) -> None:
    """Switch the monitoring on and off until cancelled, then write the turns."""
    await worker.loaded()
    (monitor,) = (one for one in worker.observers.all if isinstance(one, TrafficMonitor))
    everyone, clock = (
        worker.observers.all,
        time.pthread_getcpuclockid(cast(int, monitor._thread.ident)),
    )
    answers = worker.metrics._answers["stable"]

    def now() -> tuple[float, float, float, float]:
        return time.perf_counter(), answers.total, time.thread_time(), time.clock_gettime(clock)

    turns = []
    try:
        for is_monitored in cycle(digit == "1" for digit in os.environ[ORDER]):
            worker.observers.all = everyone if is_monitored else ()
            before = now()
            await asyncio.sleep(float(os.environ[SECONDS]))
            wall, answered, loop, monitoring = (
                after - earlier for after, earlier in zip(now(), before, strict=True)
            )
            turns.append(Turn(is_monitored, wall, int(answered), loop, monitoring))
    finally:
        worker.observers.all = everyone  # each is closed at the end
        files.write_text(Path(os.environ[FILE]), json.dumps(turns))
