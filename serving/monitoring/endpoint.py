"""`POST /feedback`: what turned out to be true of what was predicted."""

import asyncio
import json
import shlex
from dataclasses import replace

from serving.api_docs.schemas import ANYTHING, TEXT
from serving.http.responses import Refusal, Response, json_response
from serving.http.routes import Operation, Request, Route, Routes
from serving.monitoring.feedback import ACCEPTED_TRUTHS, Feedback
from serving.requests.reading import read_json
from serving.worker import ModelWorker
from slipway.artifacts.bundle import Bundle

_TRUTH = {
    "type": "object",
    "required": ["request_id", "truth"],
    "properties": {"request_id": TEXT, "truth": {}},
}
_SEVERAL = {
    "type": "object",
    "required": ["feedback"],
    "properties": {"feedback": {"type": "array", "items": _TRUTH}},
}
_ERRORS = (
    "malformed_json", "unsupported_media_type", "body_too_large", "body_timeout", "deadline_exceeded", "feedback_full",
    "feedback_unavailable",
)  # fmt: skip
_OPERATION = Operation(
    "What turned out to be true of a prediction, or of several.",
    takes={"application/json": {"oneOf": [_TRUTH, _SEVERAL]}},
    answers={"application/json": ANYTHING},
    errors=_ERRORS,
)


def feedback_routes(worker: ModelWorker, taker: Feedback | None) -> Routes:
    """`/feedback`; `taker` is None if monitoring is off."""

    async def feedback(request: Request) -> Response:
        manifest = worker.require_model().bundle.manifest
        settings = worker.settings
        if taker is None:
            raise Refusal(
                "feedback_unavailable", "this service takes no feedback: SLIPWAY_WATCH is false"
            )
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                body = await read_json(request, settings.max_body_bytes, ACCEPTED_TRUTHS)
                code, message = "deadline_exceeded", "the feedback was not written down within"
                status, answer = await taker.tell(body, manifest)
        except TimeoutError:
            raise Refusal(
                code, f"{message} {settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)"
            ) from None
        return json_response(answer | {"request_id": request.id}, status)

    return {"/feedback": Route(("POST",), feedback, "caller", _describe)}


def _describe(bundle: Bundle | None) -> Operation:
    labels = bundle.output.labels if bundle else ["7"]
    truth = json.dumps(
        {"request_id": "9b2f6c1d8e7a4053", "truth": labels[0] if labels else 3.25},
        ensure_ascii=False,
    )
    return replace(
        _OPERATION, example=f"-H 'content-type: application/json' -d {shlex.quote(truth)}"
    )
