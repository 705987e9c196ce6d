"""The endpoint `POST /predict`, which receives images or rows and returns predictions."""

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from slipway.artifacts.bundle import Bundle
from slipway.serving.http.responses import Refusal, Response, finite_json_response
from slipway.serving.http.routes import Operation, Request, Route, Routes
from slipway.serving.requests.bodies import BODY_ERRORS
from slipway.serving.requests.payload import Payload, receive_payload
from slipway.serving.schemas import ImageApi, InputApi, input_api, prediction_content
from slipway.serving.worker import ModelWorker

ERRORS = (*BODY_ERRORS, "queue_full", "not_ready", "model_failed", "invalid_answer")


def routes(worker: ModelWorker) -> Routes:
    """Return the route `/predict`."""
    max_bytes, max_items = worker.settings.max_body_bytes, worker.settings.max_items

    def predict(request: Request) -> Awaitable[Response]:
        kind = worker.require_model().input_kind
        received = receive_payload(
            request, max_bytes, max_items, kind, worker.admission.require_room
        )
        return predict_within_deadline(worker, request, received, finite_json_response)

    return {"/predict": Route(("POST",), predict, "caller", describe_predict)}


def describe_predict(bundle: Bundle | None) -> Operation:
    """Return the OpenAPI description of `/predict` for a bundle."""
    api: InputApi | type[ImageApi] = input_api(bundle.input) if bundle else ImageApi
    errors = (*ERRORS, *api.errors)
    return Operation(api.summary, api.content(), prediction_content(bundle), errors, api.curl())


async def predict_within_deadline(
    worker: ModelWorker,
    request: Request,
    received: Awaitable[Callable[[], Payload | Awaitable[Payload]]],
    encode: Callable[[dict[str, Any]], Response | Awaitable[Response]],
) -> Response:
    """Predict within the deadline, with the parser and the encoder of an endpoint.

    `received` awaits the body and returns a function that parses it. The parser runs after
    admission, so a refused request costs only its bytes, and a slow sender does not occupy a place.
    Parsing and encoding may be awaitable, if they would block the event loop. Raises Refusal after
    the deadline.
    """
    trace = request.trace
    code, message = "body_timeout", "the request's body did not arrive within"
    try:
        with worker.deadlines.deadline():
            parse = await received
            code, message = "deadline_exceeded", "there was no answer within"
            with worker.admit() as place:
                asked = parse()
                del parse  # frees the body
                if not isinstance(asked, Payload):
                    asked = await asked
                has_read = perf_counter()
                if trace is not None:
                    trace.times += (request.started, has_read)
                answer = await worker.predict_inside(place, asked, request.id, trace)
            encoding = perf_counter()
            response = encode(answer)
            if not isinstance(response, Response):
                response = await response
    except TimeoutError:
        raise Refusal(
            code,
            f"{message} {worker.settings.request_timeout_s:g} s (SLIPWAY_REQUEST_TIMEOUT_S)",
        ) from None
    ended = perf_counter()
    if trace is not None:
        trace.times += (encoding, ended)
    worker.metrics.predicted(
        ended - request.started, read_s=has_read - request.started, encode_s=ended - encoding
    )
    return response
