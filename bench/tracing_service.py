"""The service of `bench.tracing_overhead`: a worker switches traces and access log off in turns.

BENCH_TURNS, BENCH_ORDER and BENCH_TURN_SECONDS are those of bench/monitoring_turns.py.
"""

import asyncio
import json
import os
import time
from itertools import cycle
from pathlib import Path

from bench.monitoring_turns import FILE, ORDER, SECONDS, Turn
from slipway.serving import service
from slipway.serving.worker import ModelWorker
from slipway.system import files

Slipway = service.Slipway  # the service of `bentoml serve`


class InTurns(ModelWorker):
    """A worker that reports its requests in some turns and not in others."""

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
        everyone, answers = self._on_response, self.metrics._answers["stable"]

        def now() -> tuple[float, float, float, float]:
            return time.perf_counter(), answers.total, time.thread_time(), time.process_time()

        turns = []
        try:
            for is_on in cycle(digit == "1" for digit in os.environ[ORDER]):
                self._on_response = everyone if is_on else ()
                before = now()
                await asyncio.sleep(float(os.environ[SECONDS]))
                wall, answered, loop, process = (
                    after - earlier for after, earlier in zip(now(), before, strict=True)
                )
                turns.append(Turn(is_on, wall, int(answered), loop, process))
        finally:
            self._on_response = everyone
            files.write_text(Path(os.environ[FILE]), json.dumps(turns))


service.ModelWorker = InTurns  # type: ignore[attr-defined]  # created on first use
