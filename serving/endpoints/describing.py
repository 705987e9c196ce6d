"""What is served: the model card."""

from serving.inference import Inference
from serving.responses import Response, json_response
from serving.routes import READING, Operation, Request, Route, Routes, always
from serving.schemas import ANYTHING

_MODEL = Operation("The model card, with the certificate.", answers={"application/json": ANYTHING}, errors=("not_ready",))


def routes(inference: Inference) -> Routes:
    """`/model`."""

    async def model(request: Request) -> Response:
        return json_response(inference.card())

    return {"/model": Route(READING, model, "caller", always(_MODEL))}
