"""The description of the API: OpenAPI for tools, a page for people, and what BentoML's own client asks for."""

import re

from serving.api_docs.docs_page import POLICY, render_docs
from serving.api_docs.openapi import openapi
from serving.api_docs.schemas import ANYTHING, TEXT
from serving.http.responses import Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.worker import ModelWorker

PASSED_ON = ("/schema.json",)  # BentoML answers: what bentoml.SyncHTTPClient asks for
_SANE_HOST = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")
_DOCS = Operation("This page.", answers={"text/html": TEXT})
_DOCUMENT = Operation(
    "The description of the API, OpenAPI 3.0.", answers={"application/json": ANYTHING}
)
_SCHEMA = Operation(
    "BentoML's description, for its own client.", answers={"application/json": ANYTHING}
)


def routes(worker: ModelWorker, others: Routes) -> Routes:
    """`/docs`, `/docs.json` and `/schema.json`, which describe themselves and all `others`."""

    described: dict[
        str | None, tuple[dict[str, object], Response]
    ] = {}  # of the last version alone: it takes some milliseconds

    async def document(request: Request) -> Response:
        return describe()[1]

    async def docs(request: Request) -> Response:
        host = request.headers.get(b"host", b"")
        address = host.decode() if _SANE_HOST.fullmatch(host) else "127.0.0.1:3000"
        callers = (
            "HOST:PORT" if worker.settings.admin_port else None
        )  # a worker does not know its server's port
        return Response(
            200,
            render_docs(describe()[0], address, callers),
            "text/html; charset=utf-8",
            (("content-security-policy", POLICY),),
        )

    def describe() -> tuple[dict[str, object], Response]:
        model = worker.model
        bundle, version = (model.bundle.manifest, model.version) if model else (None, None)
        if version not in described:
            content = openapi(others | own, bundle, version, worker.caller_check)
            described.clear()
            described[version] = (content, json_response(content))
        return described[version]

    own = {
        "/docs": Route(READING, docs, "operator", always(_DOCS)),
        "/docs.json": Route(READING, document, "operator", always(_DOCUMENT)),
        **dict.fromkeys(PASSED_ON, Route(READING, None, "caller", always(_SCHEMA))),
    }
    return own
