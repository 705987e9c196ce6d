"""`POST /predict`: images or rows in, what the model says of them out."""

import json
import shlex
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from serving.api_docs.description import example_row
from serving.api_docs.schemas import payload_content, prediction_content
from serving.http.responses import Refusal, Response, finite_json_response
from serving.http.routes import Operation, Request, Route, Routes
from serving.requests.payload import Payload
from serving.requests.reading import receive_payload
from serving.worker import ModelWorker
from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import input_kind

_OF_ANY_INPUT = (
    "malformed_body", "length_required", "body_too_large", "unsupported_media_type", "body_timeout", "deadline_exceeded", "queue_full",
    "not_ready", "model_failed", "invalid_answer",
)  # fmt: skip
_OF_IMAGES = (
    "missing_field",
    "unknown_field",
    "too_many_items",
    "not_a_file",
    "empty",
    "undecodable",
    "truncated",
    "pixel_bomb",
    "transform_failed",
)
_OF_ROWS = (
    "malformed_json", "too_many_rows", "not_a_row", "no_rows", "unknown_column", "missing_value", "type_violation", "unknown_category",
    "out_of_range",
)  # fmt: skip


def routes(worker: ModelWorker) -> Routes:
    """`/predict`."""
    max_bytes, max_items = worker.settings.max_body_bytes, worker.settings.max_items

    def predict(request: Request) -> Awaitable[Response]:
        kind = worker.require_model().input_kind
        received = receive_payload(request, max_bytes, max_items, kind, worker.require_room)
        return predict_within_deadline(worker, request, received, finite_json_response)

    return {"/predict": Route(("POST",), predict, "caller", describe_predict)}


def describe_predict(bundle: Bundle | None) -> Operation:
    """What the description of the API says of `/predict`."""
    takes = payload_content(bundle)
    errors: tuple[str, ...]
    if bundle and isinstance(bundle.input, ColumnContract):
        row = json.dumps(example_row(bundle.input), ensure_ascii=False)
        summary, errors = "What the model says of one row, or of several.", _OF_ROWS
        example = f"-H 'content-type: application/json' -d {shlex.quote(row)}"
    elif bundle and not isinstance(bundle.input, ImageContract):
        content_type = input_kind(bundle.input.kind).content_type
        summary, errors = f"What the model says of one input of the kind {bundle.input.kind}.", ()
        example = f"-H 'content-type: {content_type}' --data-binary @FILE"
    else:
        summary, errors, example = (
            "What the model says of one image, or of several.",
            _OF_IMAGES,
            "-F image=@picture.png",
        )
    return Operation(summary, takes, prediction_content(bundle), (*_OF_ANY_INPUT, *errors), example)


async def predict_within_deadline(
    worker: ModelWorker,
    request: Request,
    received: Awaitable[Callable[[], Payload | Awaitable[Payload]]],
    encode: Callable[[dict[str, Any]], Response | Awaitable[Response]],
) -> Response:
    """What the model says of a request, read and encoded in the form of an endpoint; Refusal when its time is over.

    `received` gives a function that parses the body once it has arrived. It is called inside: a request that is refused because there
    is too much to do costs no more than the bytes that it brings, and a caller that sends slowly holds no place. Parsing and encoding
    that would hold up the event loop are waited for.
    """
    code, message = "body_timeout", "the request's body did not arrive within"
    try:
        with worker.deadlines.deadline():
            parse = await received
            code, message = "deadline_exceeded", "there was no answer within"
            with worker.admit() as place:
                asked = parse()
                del parse  # and the body with it
                if not isinstance(asked, Payload):
                    asked = await asked
                has_read = perf_counter()
                answer = await worker.predict_inside(place, asked, request.id)
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
    worker.metrics.predicted(
        ended - request.started, read_s=has_read - request.started, encode_s=ended - encoding
    )
    return response
