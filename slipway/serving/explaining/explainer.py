"""Explains the prediction for one item by running the model on changed copies of the item.

An explanation takes up to 1,024 further rows, fewer if the model is slow. So each worker explains
one request at a time, behind live traffic (slipway/serving/explaining/background.py). These rows do
not count as predictions and no observer sees them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.predictor.explaining.explanation import (
    ROWS,
    explain_item,
    require_explainable,
    rows_within,
)
from slipway.predictor.model import AnsweredRow, InvalidAnswerError
from slipway.serving.explaining.background import BackgroundRows
from slipway.serving.http.responses import RETRY_AFTER, Refusal
from slipway.serving.models.live_model import LiveModel
from slipway.serving.requests.payload import Payload
from slipway.system.errors import UnavailableError

_TRIES = 3  # measurements of a row's time, because other work can slow down any one of them


class Explainer:
    """Explains one request at a time, within `budget_s` seconds of the model's time."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._is_busy = False

    async def explain(self, live: LiveModel, payload: Payload) -> dict[str, Any]:
        """Predict one item and explain the prediction.

        Returns the response's JSON fields, with `explanation` but without the request id. Raises
        Refusal if `payload` has several items or the model gives no valid answer.
        """
        with self._alone(), live:
            inputs = (await live.decoder.decode(*payload.items)).inputs
            if len(inputs) != 1:
                message = f"the request has {len(inputs)} items, expected one"
                raise Refusal("not_one_item", f"{message}: send one request for each")
            try:
                explained = await self._explain(live, inputs[0])
                return explained | {"model_version": live.model.version}
            except InvalidAnswerError as error:
                raise Refusal(
                    "invalid_answer", f"{error}; this request has no explanation"
                ) from None

    async def _explain(self, live: LiveModel, item: NDArray[Any]) -> dict[str, Any]:
        rows = BackgroundRows(live.batcher, live.model.max_batch_size)
        try:
            require_explainable(live.model.input_kind)
        except UnavailableError as error:
            raise Refusal("not_found", f"{error}; use /predict") from None
        own, most_rows = await self._predict(rows, item)
        manifest, place = live.model.bundle.manifest, live.model.explained_place(own.outputs)
        answer = live.model.answer(own.outputs, own.score)
        for remark in manifest.input.remarks(item[np.newaxis]):
            answer |= remark
        explanation = await explain_item(manifest, item, own.outputs, place, rows.run, most_rows)
        return answer | {"explanation": explanation}

    async def _predict(self, rows: BackgroundRows, item: NDArray[Any]) -> tuple[AnsweredRow, int]:
        """Run the model on the unchanged item.

        Returns its prediction, and the number of changed copies that fit into the time budget.
        """
        seconds = float("inf")
        for _ in range(_TRIES):
            answers, taken = await rows.submit(item[np.newaxis])
            seconds = min(seconds, taken)
            if seconds * ROWS[0] <= self._budget_s:
                break
        return answers[0], rows_within(seconds, self._budget_s)

    def require_idle(self) -> None:
        """Raise Refusal while another request is being explained."""
        if self._is_busy:
            message = (
                "this worker is explaining another request, and does one at a time; "
                "try again, or use /predict, which does not wait"
            )
            raise Refusal("explain_busy", message, headers=(RETRY_AFTER,))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.require_idle()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
