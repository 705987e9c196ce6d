"""The service of `bench.tracing_overhead`: it switches access log and traces on and off in turns.

Its worker writes the turns to the file BENCH_TURNS when it stops.
"""

import asyncio
import json
import os
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from slipway.serving import service
from slipway.serving.worker import ModelWorker
from slipway.system import files

FILE = "BENCH_TURNS"
TURN_S = 0.1
ORDER = (True, False, False, True)  # a machine that gets slower favours neither
THREADS = ("slipway-access-log", "slipway-tracing")

Slipway = service.Slipway  # the service of `bentoml serve`


class Turn(NamedTuple):
    """Answers and seconds of processor time of one turn."""

    is_on: bool
    answered: int
    process_s: float  # of the whole process without the threads of the two
    beside_s: float  # of these threads, which work off the turns before, too


class InTurns(ModelWorker):
    """A worker that switches its access log and its traces on and off in turns."""

    def start(self) -> None:
        """Start the worker and its turns."""
        super().start()
        self._turns = asyncio.get_running_loop().create_task(self._take_turns())

    async def stop(self) -> None:
        """Write the turns, then stop the worker."""
        self._turns.cancel()
        await asyncio.wait([self._turns])
        await super().stop()

    async def _take_turns(self) -> None:
        await self.loaded()
        on, turns = self._readers, list[Turn]()
        try:
            for is_on in cycle(ORDER):
                self._readers = on if is_on else ()
                before = self._now()
                await asyncio.sleep(TURN_S)
                answered, process, beside = (
                    after - earlier for after, earlier in zip(self._now(), before, strict=True)
                )
                turns.append(Turn(is_on, int(answered), process - beside, beside))
        finally:
            self._readers = on
            files.write_text(Path(os.environ[FILE]), json.dumps(turns))

    def _now(self) -> tuple[float, float, float]:
        return self.metrics._answers["stable"].total, time.process_time(), seconds_beside()


def seconds_beside() -> float:
    """Seconds of processor time of the threads that write lines and export spans, so far."""
    clocks = [
        time.pthread_getcpuclockid(one.ident)
        for one in threading.enumerate()
        if one.name in THREADS and one.ident
    ]
    return sum(map(time.clock_gettime, clocks))


service.ModelWorker = InTurns  # type: ignore[attr-defined]  # created on first use
