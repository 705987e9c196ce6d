"""`POST /explain`: the answer to one image or row, and what it rests on, found by asking the model about changed copies of it.

That takes up to 1,024 further rows, so each worker explains one request at a time, behind live traffic
(serving/explaining/background.py), and asks fewer where the model is slow. Nothing of it counts as a prediction: no observer is offered it.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.explaining import columns, occlusion, pictures, shapley
from serving.explaining.background import BackgroundRows
from serving.http.responses import RETRY_AFTER, Refusal
from serving.models.live_model import LiveModel
from serving.models.model import AnsweredRow, InvalidAnswerError
from serving.requests.decoding import Decoded
from serving.requests.payload import Payload
from slipway.inputs.columns import ColumnContract

# Asked about in one explanation at most, the first that the time allows: few steps, so that noise changes nothing.
ROWS = (1024, 256, 64, 16, 4)
_TRIES = 3  # of how long a row takes: other work slows any one of them


class Explainer:
    """One worker's explanations, one at a time. `budget_s` is how long the model may take for one, in seconds."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._is_busy = False

    async def explain(self, live: LiveModel, payload: Payload) -> dict[str, Any]:
        """The answer to one item and its `explanation`, without request id; Refusal if there is none."""
        with self._alone(), live:
            decoded = await live.decoder.decode(*payload.items)
            _require_one(decoded)
            try:
                return await self._explain(live, decoded.inputs[0]) | {
                    "model_version": live.model.version
                }
            except InvalidAnswerError as error:
                raise Refusal(
                    "invalid_answer", f"{error}; this request has no explanation"
                ) from None

    async def _explain(self, live: LiveModel, item: NDArray[Any]) -> dict[str, Any]:
        rows = BackgroundRows(live.batcher, live.model.max_batch_size)
        own, most_rows = await self._own(rows, item)
        answer = live.model.answer(own.outputs, own.score)
        contract, output = live.model.bundle.manifest.input, live.model.bundle.manifest.output
        asked = _Asked(
            rows, 0 if output.kind == "value" else int(np.argmax(own.outputs)), own.outputs
        )
        if isinstance(contract, ColumnContract):
            explanation = await _of_row(asked, item, contract, most_rows)
        else:
            explanation = await _of_image(asked, item, most_rows)
        of = "value" if output.kind == "value" else answer["label"]
        return answer | {
            "explanation": {"kind": explanation.pop("kind"), "of": of, "answer": asked.own}
            | explanation
            | {"rows": asked.num_rows}
        }

    async def _own(self, rows: BackgroundRows, item: NDArray[Any]) -> tuple[AnsweredRow, int]:
        """The answer to the item itself, and how many copies of it can be asked about."""
        seconds = float("inf")
        for _ in range(_TRIES):
            answers, taken = await rows.submit(item[np.newaxis])
            seconds = min(seconds, taken)
            if seconds * ROWS[0] <= self._budget_s:
                break
        return answers[0], next(
            (num_rows for num_rows in ROWS if num_rows * seconds <= self._budget_s), ROWS[-1]
        )

    def require_idle(self) -> None:
        """Refusal while another request is explained."""
        if self._is_busy:
            message = "this worker is explaining another request, and does one at a time; try again, or use /predict, which is not held up"
            raise Refusal("explain_busy", message, headers=(RETRY_AFTER,))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.require_idle()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


class _Asked:
    """The one output that is explained: the probability of the predicted label, or the value."""

    def __init__(self, rows: BackgroundRows, output: int, outputs: NDArray[np.float32]) -> None:
        self._rows = rows
        self._output = output
        self.own = float(outputs[output])
        self.num_rows = 0  # asked about beside the item itself

    async def __call__(self, inputs: NDArray[Any]) -> NDArray[np.float64]:
        """(rows,) the output for each of (rows, ...) inputs; InvalidAnswerError if one is not finite."""
        self.num_rows += len(inputs)
        outputs = (await self._rows.run(inputs))[:, self._output].astype(np.float64)
        if not np.isfinite(outputs).all():
            raise InvalidAnswerError(
                "the model answered NaN or an infinity to a changed copy of this request"
            )
        return outputs


async def _of_image(asked: _Asked, pixels: NDArray[np.uint8], most_rows: int) -> dict[str, Any]:
    side = occlusion.side_for(most_rows, len(pixels))
    copies = await asyncio.to_thread(occlusion.covered, pixels, side)
    changes = (asked.own - await asked(copies)).reshape(side, side)
    overlay = await asyncio.to_thread(pictures.overlay, pixels, changes)
    return {
        "kind": "occlusion",
        "changes": changes.tolist(),
        "input_png": await asyncio.to_thread(pictures.png_base64, pixels),
        "overlay_png": await asyncio.to_thread(pictures.png_base64, overlay),
    }


async def _of_row(
    asked: _Asked, vector: NDArray[np.float32], contract: ColumnContract, most_rows: int
) -> dict[str, Any]:
    usual, positions = columns.usual_vector(contract), columns.positions_of(contract)
    distances = columns.distances(vector, usual, positions)
    furthest = np.argsort(-distances, kind="stable")[: max(1, most_rows)]
    players = np.sort(furthest[distances[furthest] > 0])
    places = [positions[player] for player in players]
    if len(players):
        without_one = columns.blended(vector, usual, places, ~np.eye(len(players), dtype=bool))
        changes = asked.own - await asked(without_one)
    else:
        changes = np.zeros(0)
    planned = shapley.plan(len(players), most_rows, _seed(vector))
    contributions = None
    if planned is not None:
        worths = await asked(columns.blended(vector, usual, places, planned.coalitions))
        contributions = planned.contributions(worths)
    (usual_answer,) = await asked(usual[np.newaxis])
    described = [_unchanged(column.name) for column in contract.columns]
    for number, player in enumerate(players):
        described[player] |= {
            "change": float(changes[number]),
            "contribution": float(contributions.values[number]) if contributions else None,
            "standard_error": float(contributions.standard_errors[number])
            if contributions
            else None,
        }
    return {
        "kind": "columns",
        "usual_answer": float(usual_answer),
        "method": planned.method if planned else "changes_only",
        "orders": planned.num_orders if planned else None,
        "columns": described,
        "left_out": int((distances > 0).sum()) - len(players),
    }


def _unchanged(name: str) -> dict[str, Any]:
    """A column that is as usual: it changes nothing and contributes nothing."""
    return {"name": name, "change": 0.0, "contribution": 0.0, "standard_error": 0.0}


def _seed(vector: NDArray[np.float32]) -> int:
    """Of the row itself: the same row is explained alike each time."""
    return int.from_bytes(hashlib.sha256(vector.tobytes()).digest()[:8])


def _require_one(decoded: Decoded) -> None:
    if len(decoded.inputs) != 1:
        raise Refusal(
            "not_one_item",
            f"the request has {len(decoded.inputs)} items, expected one: send one request for each",
        )
