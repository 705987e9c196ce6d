"""`POST /predict`: images or rows in, what the model says of them out."""

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from serving.inference import Inference
from serving.payload import Payload
from serving.reading import read_payload
from serving.responses import Refusal, Response, json_response
from serving.routes import Request, Route, Routes


def routes(inference: Inference) -> Routes:
    """`/predict`."""
    settings = inference.settings

    async def predict(request: Request) -> Response:
        kind = inference.require_model().bundle.manifest.input.kind

        async def read() -> Payload:
            return await read_payload(request.headers, request.receive, settings.max_body_bytes, settings.max_items, kind)

        def encode(answer: dict[str, Any]) -> Response:
            return json_response(answer | {"request_id": request.id})

        return await predict_within_deadline(inference, request, read, encode)

    return {"/predict": Route(("POST",), predict, "caller")}


async def predict_within_deadline(
    inference: Inference, request: Request, read: Callable[[], Awaitable[Payload]], encode: Callable[[dict[str, Any]], Response]
) -> Response:
    """What the model says of a request, read and encoded in the form of an endpoint; Refusal when its time is over."""
    code, message = "body_timeout", "the request's body did not arrive within"
    try:
        with inference.deadlines.deadline():
            payload = await read()
            has_read = perf_counter()
            code, message = "deadline_exceeded", "there was no answer within"
            answer = await inference.predict(payload, request.id)
    except TimeoutError:
        raise Refusal(code, f"{message} {inference.settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)") from None
    encoding = perf_counter()
    response = encode(answer)
    ended = perf_counter()
    inference.monitoring.stage("read", has_read - request.started)
    inference.monitoring.stage("encode", ended - encoding)
    inference.monitoring.predicted(ended - request.started)
    return response
