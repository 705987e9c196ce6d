"""`POST /predict`: images or rows in, what the model says of them out."""

import asyncio
from time import perf_counter

from serving.inference import Inference
from serving.reading import read_payload
from serving.responses import Refusal, Response, json_response
from serving.routes import Request, Route, Routes


def routes(inference: Inference) -> Routes:
    """`/predict`."""

    settings = inference.settings

    async def predict(request: Request) -> Response:
        kind = inference.require_model().bundle.manifest.input.kind
        code, message = "body_timeout", "the request's body did not arrive within"
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                payload = await read_payload(request.headers, request.receive, settings.max_body_bytes, settings.max_items, kind)
                read = perf_counter()
                code, message = "deadline_exceeded", "there was no answer within"
                answer = await inference.predict(payload, request.id)
        except TimeoutError:
            raise Refusal(code, f"{message} {settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)") from None
        encoding = perf_counter()
        response = json_response(answer | {"request_id": request.id})
        ended = perf_counter()
        inference.monitoring.stage("read", read - request.started)
        inference.monitoring.stage("encode", ended - encoding)
        inference.monitoring.predicted(ended - request.started)
        return response

    return {"/predict": Route(("POST",), predict, "caller")}
