"""Runs the rows of an explanation through the live model while no request waits.

Requests have priority. The rows run in small batches of about BATCH_SECONDS, and a batch starts
only when the queue is empty. So a request waits at most BATCH_SECONDS longer, or for one row if the
model needs more time for a single row.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.predictor.model import AnsweredRow
from slipway.serving.http.responses import Refusal
from slipway.serving.models.batching import MicroBatcher

logger = logging.getLogger("bentoml.slipway")

BATCH_SECONDS = 0.02  # duration of one batch; about one image of a small network
_POLL_SECONDS = 0.002


def predictions_first(retry_after: tuple[str, str]) -> Refusal:
    """Create the refusal of an explanation because predictions overload the worker.

    `retry_after` is the header that tells the caller when to try again.
    """
    message = (
        "predictions go first, and the service is overloaded with them; "
        f"try again in {retry_after[1]} s"
    )
    return Refusal("explain_busy", message, headers=(retry_after,))


class BackgroundRows:
    """Runs rows through `batcher` when no request waits, at most `max_batch_size` in one batch."""

    def __init__(self, batcher: MicroBatcher[AnsweredRow], max_batch_size: int) -> None:
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._batch_size = 1  # grows while batches are quick

    async def run(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Run the model on inputs (rows, ...). Returns its outputs (rows, outputs) in float32.

        Raises Refusal if the model fails or is overloaded.
        """
        outputs: list[NDArray[np.float32]] = []
        while len(outputs) < len(rows):
            while self._batcher.num_waiting:
                await asyncio.sleep(_POLL_SECONDS)
            answers, seconds = await self.submit(
                rows[len(outputs) : len(outputs) + self._batch_size]
            )
            outputs += [row.outputs for row in answers]
            if seconds > BATCH_SECONDS:
                self._batch_size = max(1, self._batch_size // 2)
            elif 2 * seconds <= BATCH_SECONDS:
                self._batch_size = min(2 * self._batch_size, self._max_batch_size)
        return np.stack(outputs)

    async def submit(self, rows: NDArray[Any]) -> tuple[Sequence[AnsweredRow], float]:
        """Queue rows like a request; return their predictions and the inference time in seconds.

        Raises Refusal if the model fails or is overloaded.
        """
        submission = self._batcher.submit(rows)
        try:
            answer = await submission.answer
            return answer, submission.ended - submission.begun
        except Refusal as refusal:  # evicted from the queue
            raise predictions_first(*refusal.headers) from None
        except Exception as error:
            logger.exception("the model failed on rows of an explanation; predictions continue")
            raise Refusal(
                "model_failed",
                "the model failed during the explanation; the service's log has the details",
            ) from error
