"""The service of `bench.monitoring_overhead`: workers switch monitoring on and off in turns."""

import asyncio

from bench.monitoring_turns import take_turns
from slipway.serving import service
from slipway.serving.worker import ModelWorker

Slipway = service.Slipway  # the service of `bentoml serve`


class InTurns(ModelWorker):
    """A worker that switches its monitoring on and off in turns."""

    def start(self) -> None:
        """Start the worker and its turns."""
        super().start()
        self._turns = asyncio.get_running_loop().create_task(take_turns(self))

    async def stop(self) -> None:
        """Write the turns, then stop the worker."""
        self._turns.cancel()
        await asyncio.wait([self._turns])
        await super().stop()


service.ModelWorker = InTurns  # type: ignore[attr-defined]  # created on first use
