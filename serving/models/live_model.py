"""A model that takes requests, with the decoder and the queue that are its own, and its end: it loses none of them.

Whoever swaps models lets new requests go to the other one and retires this one, which then waits for those that are inside.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from serving.models.batching import MicroBatcher
from serving.models.model import AnsweredRow, ServedModel
from serving.requests.decoding import Decoder
from serving.requests.payload import Payload
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind


class LiveModel:
    """A warm model behind its decoder and its queue."""

    def __init__(
        self,
        model: ServedModel,
        max_rows: int,
        on_batch: Callable[[int, float, float], None],
        slot: str = "stable",
    ) -> None:
        self.model = model
        self.slot = slot  # its place in a rollout, one of SLOTS
        self.batcher: MicroBatcher[AnsweredRow] = MicroBatcher(
            model.answer_rows, model.max_batch_size, on_batch, model.quick_rows
        )
        contract = model.bundle.manifest.input
        make: Callable[[InputContract, int], Decoder]
        make = input_kind(contract.kind).load_part("decoder")
        self.decoder = make(contract, max_rows)
        self._num_inside = 0
        self._empty: asyncio.Event | None = None  # once it is waited for

    def reader(self, payload: Payload) -> Callable[[], NDArray[Any]] | None:
        """What decodes a payload's only item when its batch is put together; None where it has to be decoded before."""
        if self.batcher.quick_rows:
            return self.decoder.reader(payload.items)
        return None

    def __enter__(self) -> None:
        """One request begins, from its bytes to its answer: until it is over this model does not end."""
        self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        """It is over."""
        self._num_inside -= 1
        if self._empty and not self._num_inside:
            self._empty.set()

    async def retire(self) -> None:
        """Finish what is inside, then end the threads. Nothing may begin here any more."""
        self._empty = asyncio.Event()
        if self._num_inside:
            await self._empty.wait()
        await self.batcher.close()
        self.decoder.close()
