"""The service that `bench.watching_overhead` asks: the real one, whose workers take turns with the watching and without it."""

import asyncio

from bench.watching_turns import take_turns
from serving import service
from serving.worker import ModelWorker

Slipway = service.Slipway  # what `bentoml serve` is told to serve


class InTurns(ModelWorker):
    """It watches in turns."""

    def start(self) -> None:
        """And begin to take turns."""
        super().start()
        self._turns = asyncio.get_running_loop().create_task(take_turns(self))

    async def stop(self) -> None:
        """When the turns are written."""
        self._turns.cancel()
        await asyncio.wait([self._turns])
        await super().stop()


service.ModelWorker = InTurns  # type: ignore[attr-defined]  # a worker makes one when it is first asked for
