"""Adds `POST /explain`, which returns the response of `/predict` with an explanation."""

import asyncio
import logging
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from slipway.artifacts.bundle import Bundle
from slipway.serving.endpoints.predict import describe_predict
from slipway.serving.explaining.background import predictions_first
from slipway.serving.explaining.explainer import Explainer
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Refusal, Response, json_response
from slipway.serving.http.routes import Operation, Request, Route, Routes
from slipway.serving.models.live_model import LiveModel
from slipway.serving.requests.payload import Payload, receive_payload
from slipway.serving.schemas import ANYTHING, ImageApi, input_api
from slipway.serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")


class _Explanations:
    """Explains one request at a time. Refuses explanations while the worker is overloaded."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._explainer = Explainer(worker.settings.request_timeout_s / 2)

    def require_capacity(self) -> None:
        """Raise Refusal if the worker is overloaded or another explanation is running."""
        admission = self._worker.admission
        if admission.is_overloaded_now():
            raise predictions_first(admission.retry_after())
        self._explainer.require_idle()

    async def explain(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """Return the response's JSON fields, explanation included, without the request id.

        Raises Refusal if the worker is busy or the answer cannot be explained.
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
            return await self._explainer.explain(live, payload)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error(
                    "request %s: model %s: %s", request_id, live.model.version, refusal.message
                )
            raise


def explain_routes(worker: ModelWorker) -> Routes:
    """Return the route `/explain`, which explains the prediction for one image, row or text."""
    explanations, settings = _Explanations(worker), worker.settings

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
                    explanations.require_capacity,
                )
                code, message = (
                    "deadline_exceeded",
                    "live requests go first, and there was no explanation within",
                )
                explanations.require_capacity()
                answer = await explanations.explain(parse(), request.id)
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
