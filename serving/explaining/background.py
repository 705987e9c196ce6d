"""Further rows for a model that is serving: they go when nobody waits, and in batches that are over in no time.

Live requests go first. They share the model with at most one small batch of these rows, so each waits for it at most `BATCH_SECONDS`
longer than it would have, or one row where a single one takes more.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.http.responses import Refusal
from serving.models.batching import MicroBatcher
from serving.models.model import AnsweredRow

logger = logging.getLogger("bentoml.slipway")

BATCH_SECONDS = (
    0.02  # what a batch of these rows may take: about as long as one picture takes a small network
)
_LOOK_AGAIN_SECONDS = 0.002


def predictions_first(retry_after: tuple[str, str]) -> Refusal:
    """What is said instead of an explanation while there are more predictions to make than can be made. It fails no prediction."""
    message = f"predictions go first, and more are asked for than can be answered; try again in {retry_after[1]} s"
    return Refusal("explain_busy", message, headers=(retry_after,))


class BackgroundRows:
    """Runs rows through `batcher` behind everything else; never more than `max_batch_size` at once."""

    def __init__(self, batcher: MicroBatcher[AnsweredRow], max_batch_size: int) -> None:
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._batch_size = 1  # grows while batches are quick

    async def run(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """(rows, outputs) of (rows, ...) inputs, in their order; Refusal if the model fails on them."""
        outputs: list[NDArray[np.float32]] = []
        while len(outputs) < len(rows):
            while self._batcher.num_waiting:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            answers, seconds = await self.submit(
                rows[len(outputs) : len(outputs) + self._batch_size]
            )
            outputs += [row.outputs for row in answers]
            self._adapt(seconds)
        return np.stack(outputs)

    async def submit(self, rows: NDArray[Any]) -> tuple[Sequence[AnsweredRow], float]:
        """What the model says of rows, in line with everybody else, and the seconds it took; Refusal if it fails, or has too much to do."""
        submission = self._batcher.submit(rows)
        try:
            return await submission.answer, submission.infer_seconds
        except Refusal as refusal:  # sent out of the queue again
            raise predictions_first(*refusal.headers) from None
        except Exception as error:
            logger.exception("the model failed on rows of an explanation")
            raise Refusal(
                "model_failed",
                "the model failed on what is to be explained; the log of the service has the details",
            ) from error

    def _adapt(self, seconds: float) -> None:
        if seconds > BATCH_SECONDS:
            self._batch_size = max(1, self._batch_size // 2)
        elif 2 * seconds <= BATCH_SECONDS:
            self._batch_size = min(2 * self._batch_size, self._max_batch_size)
