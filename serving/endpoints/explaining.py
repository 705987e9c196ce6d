"""`POST /explain`: what `/predict` takes, one image or row; the answer, and what it rests on."""

import asyncio
from dataclasses import replace

from serving.api_docs.schemas import ANYTHING
from serving.endpoints.predicting import describe_predict
from serving.http.responses import Refusal, Response, json_response
from serving.http.routes import Operation, Request, Route, Routes
from serving.requests.reading import receive_payload
from serving.worker import ModelWorker
from slipway.artifacts.bundle import Bundle


def routes(worker: ModelWorker) -> Routes:
    """`/explain`."""

    async def explain(request: Request) -> Response:
        settings, kind = worker.settings, worker.require_model().bundle.manifest.input.kind
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                parse = await receive_payload(
                    request,
                    settings.max_body_bytes,
                    settings.max_items,
                    kind,
                    worker.require_leisure,
                )
                code, message = (
                    "deadline_exceeded",
                    "live requests go first, and there was no explanation within",
                )
                worker.require_leisure()
                answer = await worker.explain(parse(), request.id)
        except TimeoutError:
            raise Refusal(
                code, f"{message} {settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            ) from None
        return json_response(answer | {"request_id": request.id})

    return {"/explain": Route(("POST",), explain, "caller", _describe)}


def _describe(bundle: Bundle | None) -> Operation:
    predict = describe_predict(bundle)
    summary = (
        "What the model says of one image or row, and which places or columns its answer rests on."
    )
    errors = (
        *(code for code in predict.errors if code != "queue_full"),
        "not_one_item",
        "explain_busy",
    )
    return replace(predict, summary=summary, answers={"application/json": ANYTHING}, errors=errors)
