"""Adds `POST /explain`, which returns the response of `/predict` with an explanation.

An explanation takes up to 1,024 further rows, fewer if the model is slow. So each worker explains
one request at a time. These rows do not count as predictions and no observer sees them.

Requests have priority. The rows run in small batches of about BATCH_SECONDS, and a batch starts
only when the queue is empty. So a request waits at most BATCH_SECONDS longer, or for one row if the
model needs more time for a single row.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Bundle
from slipway.predictor.explaining.explanation import (
    ROWS,
    explain_item,
    require_explainable,
    rows_within,
)
from slipway.predictor.model import AnsweredRow, InvalidAnswerError
from slipway.serving.endpoints.predict import describe_predict
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import RETRY_AFTER, Refusal, Response, json_response
from slipway.serving.http.routes import Operation, Request, Route, Routes
from slipway.serving.models.batching import MicroBatcher
from slipway.serving.models.live_model import LiveModel
from slipway.serving.requests.payload import Payload, receive_payload
from slipway.serving.schemas import ANYTHING, ImageApi, input_api
from slipway.serving.worker import ModelWorker
from slipway.system.errors import UnavailableError

BATCH_SECONDS = 0.02  # duration of one batch; about one image of a small network
_POLL_SECONDS = 0.002
_TRIES = 3  # measurements of a row's time, because other work can slow down any one of them
logger = logging.getLogger("bentoml.slipway")


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


class Explainer:
    """Explains one request at a time. Refuses explanations while the worker is overloaded."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._budget_s = worker.settings.request_timeout_s / 2  # of the model's time
        self._is_busy = False

    def require_capacity(self) -> None:
        """Raise Refusal if the worker is overloaded or another explanation is running."""
        admission = self._worker.admission
        if admission.is_overloaded_now():
            raise predictions_first(admission.retry_after())
        self._require_idle()

    async def explain(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """Predict one item and explain the prediction.

        Returns the response's JSON fields, explanation included, without the request id. Raises
        Refusal if the worker is busy, `payload` has several items or the model gives no valid
        answer.
        """
        worker = self._worker
        stable = worker.require_live()
        self.require_capacity()
        if worker.router is None:
            return await self._explain_with(stable, payload, request_id)
        return await worker.router.explain(
            request_id,
            worker.require_live,
            lambda live: self._explain_with(live, payload, request_id),
        )

    async def _explain_with(
        self, live: LiveModel, payload: Payload, request_id: str
    ) -> dict[str, Any]:
        try:
            with self._alone(), live:
                return await self._explain_payload(live, payload)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error(
                    "request %s: model %s: %s", request_id, live.model.version, refusal.message
                )
            raise

    async def _explain_payload(self, live: LiveModel, payload: Payload) -> dict[str, Any]:
        inputs = (await live.decoder.decode(*payload.items)).inputs
        if len(inputs) != 1:
            message = f"the request has {len(inputs)} items, expected one"
            raise Refusal("not_one_item", f"{message}: send one request for each")
        try:
            require_explainable(live.model.input_kind)
        except UnavailableError as error:
            raise Refusal("not_found", f"{error}; use /predict") from None
        try:
            explained = await self._explain_item(live, inputs[0])
        except InvalidAnswerError as error:
            raise Refusal("invalid_answer", f"{error}; this request has no explanation") from None
        return explained | {"model_version": live.model.version}

    async def _explain_item(self, live: LiveModel, item: NDArray[Any]) -> dict[str, Any]:
        rows = BackgroundRows(live.batcher, live.model.max_batch_size)
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

    def _require_idle(self) -> None:
        if self._is_busy:
            message = (
                "this worker is explaining another request, and does one at a time; "
                "try again, or use /predict, which does not wait"
            )
            raise Refusal("explain_busy", message, headers=(RETRY_AFTER,))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._require_idle()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def explain_routes(worker: ModelWorker) -> Routes:
    """Return the route `/explain`, which explains the prediction for one image, row or text."""
    explainer, settings = Explainer(worker), worker.settings

    async def explain(request: Request) -> Response:
        kind = worker.require_model().bundle.manifest.input.kind
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                parse = await receive_payload(
                    request,
                    settings.max_body_bytes,
                    settings.max_items,
                    kind,
                    explainer.require_capacity,
                )
                code, message = (
                    "deadline_exceeded",
                    "live requests go first, and there was no explanation within",
                )
                explainer.require_capacity()
                answer = await explainer.explain(parse(), request.id)
        except TimeoutError:
            raise Refusal(
                code, f"{message} {settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            ) from None
        return json_response(answer | {"request_id": request.id})

    return {"/explain": Route(("POST",), explain, "caller", _describe)}


def _describe(bundle: Bundle | None) -> Operation:
    predict = describe_predict(bundle)
    summary = "The answer to one image, row or text, with its explanation."
    errors = (
        *(code for code in predict.errors if code != "queue_full"),
        "not_one_item",
        "explain_busy",
    )
    takes = (input_api(bundle.input) if bundle else ImageApi).content(max_items=1)
    answers = {"application/json": ANYTHING}
    return replace(predict, summary=summary, takes=takes, answers=answers, errors=errors)


EXTENSION = Extension("explaining", lambda worker: Hooks(routes=explain_routes(worker)))
