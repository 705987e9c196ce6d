"""What is served: the page for people, and the model card."""

import re

from serving.inference import Inference
from serving.page import render_page
from serving.responses import Response, json_response
from serving.routes import READING, Operation, Request, Route, Routes, always
from serving.schemas import ANYTHING, TEXT

_INDEX = Operation("The page for people.", answers={"text/html": TEXT})
_MODEL = Operation("The model card, with the certificate.", answers={"application/json": ANYTHING}, errors=("not_ready",))
_SANE_HOST = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")


def routes(inference: Inference) -> Routes:
    """`/` and `/model`."""

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
        "/": Route(READING, index, "caller", always(_INDEX)),
        "/model": Route(READING, model, "caller", always(_MODEL)),
    }
