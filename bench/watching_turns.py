"""Turns with the watching and without it, within one worker.

BENCH_TURNS is the file that a worker writes its turns to, BENCH_ORDER says of each, again and again, whether it is watched (1) or not
(0), and BENCH_TURN_SECONDS how long it takes. The watching's own thread goes on beside all of them.
"""

import asyncio
import json
import os
import time
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, cast

from serving.monitoring.watcher import Watcher
from serving.worker import ModelWorker
from slipway.system import files

FILE, ORDER, SECONDS = "BENCH_TURNS", "BENCH_ORDER", "BENCH_TURN_SECONDS"


class Turn(NamedTuple):
    """What was done meanwhile."""

    is_watched: bool
    seconds: float
    answered: int
    loop_seconds: float  # of processor time, of the event loop's thread
    watching_seconds: float  # the same of the watching's


async def take_turns(worker: ModelWorker) -> None:
    """Switch the watching on and off until this is cancelled, and write the turns."""
    await worker.loaded()
    (watcher,) = (one for one in worker.observers.all if isinstance(one, Watcher))
    everyone, clock = (
        worker.observers.all,
        time.pthread_getcpuclockid(cast(int, watcher._thread.ident)),
    )
    answers = worker.metrics._answers["stable"]

    def now() -> tuple[float, int, float, float]:
        return time.perf_counter(), answers.total, time.thread_time(), time.clock_gettime(clock)

    turns = []
    try:
        for is_watched in cycle(digit == "1" for digit in os.environ[ORDER]):
            worker.observers.all = everyone if is_watched else ()
            before = now()
            await asyncio.sleep(float(os.environ[SECONDS]))
            wall, answered, loop, watching = (
                after - earlier for after, earlier in zip(now(), before, strict=True)
            )
            turns.append(Turn(is_watched, wall, int(answered), loop, watching))
    finally:
        worker.observers.all = everyone  # each is closed at the end
        files.write_text(Path(os.environ[FILE]), json.dumps(turns))
