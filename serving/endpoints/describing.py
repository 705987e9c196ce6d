"""What is served: the model card, and BentoML's description of its API."""

from serving.inference import Inference
from serving.responses import Response, json_response
from serving.routes import READING, Request, Route, Routes

PASSED_ON = ("/docs.json", "/schema.json")  # BentoML answers: OpenAPI, and what bentoml.SyncHTTPClient asks for


def routes(inference: Inference) -> Routes:
    """`/model`, and what is passed on to BentoML."""

    async def model(request: Request) -> Response:
        return json_response(inference.card())

    return {"/model": Route(READING, model, "caller"), **dict.fromkeys(PASSED_ON, Route(READING, None, "caller"))}
