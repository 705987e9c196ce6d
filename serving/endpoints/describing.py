"""What is served: the page for people, the model card, and BentoML's description of its API."""

import re

from serving.inference import Inference
from serving.page import render_page
from serving.responses import Response, json_response
from serving.routes import READING, Request, Route, Routes

PASSED_ON = ("/docs.json", "/schema.json")  # BentoML answers: OpenAPI, and what bentoml.SyncHTTPClient asks for
_SANE_HOST = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")


def routes(inference: Inference) -> Routes:
    """`/`, `/model`, and what is passed on to BentoML."""

    async def index(request: Request) -> Response:
        host = request.headers.get(b"host", b"")
        model = inference.model
        address = host.decode() if _SANE_HOST.fullmatch(host) else "127.0.0.1:3000"
        page = render_page(model.bundle.manifest.input if model else None, address)
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return Response(200, page, "text/html; charset=utf-8", (("content-security-policy", policy),))

    async def model(request: Request) -> Response:
        return json_response(inference.card())

    return {
        "/": Route(READING, index, "caller"),
        "/model": Route(READING, model, "caller"),
        **dict.fromkeys(PASSED_ON, Route(READING, None, "caller")),
    }
