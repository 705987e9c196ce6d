"""A model with its own decoder and queue, which can be retired without losing requests.

To swap models, first send new requests to the new model, then call `retire` on the old one, which
completes its remaining requests.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.predictor.model import AnsweredRow
from slipway.serving.models.batching import MicroBatcher
from slipway.serving.models.model import ServedModel
from slipway.serving.requests.decoding import Decoder
from slipway.serving.requests.payload import Payload


class LiveModel:
    """A warmed-up model with its decoder and its queue of requests."""

    def __init__(
        self,
        model: ServedModel,
        max_rows: int,
        on_batch: Callable[[int, float, float], None],
        slot: str = "stable",
    ) -> None:
        self.model = model
        self.slot = slot  # one of SLOTS during a rollout
        self.batcher: MicroBatcher[AnsweredRow] = MicroBatcher(
            model.answer_rows, model.max_batch_size, on_batch, model.quick_rows
        )
        contract = model.bundle.manifest.input
        make: Callable[[InputContract, int], Decoder]
        make = input_kind(contract.kind).load_part("decoder")
        self.decoder = make(contract, max_rows)
        self._num_inside = 0
        self._empty: asyncio.Event | None = None  # set once `retire` waits

    def reader(self, payload: Payload) -> Callable[[], NDArray[Any]] | None:
        """Return a function that decodes a small payload when its batch begins.

        None if the payload needs a thread, or if the model is not quick.
        """
        if self.batcher.quick_rows:
            return self.decoder.reader(payload.items)
        return None

    def __enter__(self) -> None:
        """Begin a request, which `retire` waits for."""
        self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        self._num_inside -= 1
        if self._empty and not self._num_inside:
            self._empty.set()

    async def retire(self) -> None:
        """Wait until all requests have ended, then end the threads.

        No request may begin afterwards.
        """
        self._empty = asyncio.Event()
        if self._num_inside:
            await self._empty.wait()
        await self.batcher.close()
        self.decoder.close()
