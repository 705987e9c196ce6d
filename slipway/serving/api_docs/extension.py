"""Serves `/docs.json` (OpenAPI), `/docs` (a page) and `/schema.json` (for BentoML's client)."""

import re

from slipway.serving.api_docs.docs_page import POLICY, render_docs
from slipway.serving.api_docs.openapi import openapi
from slipway.serving.app import all_routes
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Response, json_response
from slipway.serving.http.routes import READING, Operation, Request, Route, Routes, always
from slipway.serving.schemas import ANYTHING, TEXT
from slipway.serving.worker import ModelWorker

_VALID_HOST = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")
_DOCS = Operation("This page.", answers={"text/html": TEXT})
_DOCUMENT = Operation("OpenAPI 3.0 document of the API.", answers={"application/json": ANYTHING})
_SCHEMA = Operation(
    "BentoML's description, for its own client.", answers={"application/json": ANYTHING}
)


class ApiDocs:
    """Builds a worker's OpenAPI document, and caches it until the model version changes."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._cache: tuple[str | None, dict[str, object], Response] | None = None

    async def document(self, request: Request) -> Response:
        return self._describe()[1]

    async def page(self, request: Request) -> Response:
        host = request.headers.get(b"host", b"")
        address = host.decode() if _VALID_HOST.fullmatch(host) else "127.0.0.1:3000"
        # On the operators' port, a worker does not know the main port.
        callers_address = "HOST:PORT" if self._worker.settings.admin_port else None
        page = render_docs(self._describe()[0], address, callers_address)
        headers = (("content-security-policy", POLICY),)
        return Response(200, page, "text/html; charset=utf-8", headers)

    def _describe(self) -> tuple[dict[str, object], Response]:
        model = self._worker.model
        bundle, version = (model.bundle.manifest, model.version) if model else (None, None)
        if self._cache is None or self._cache[0] != version:  # takes some milliseconds
            routes = all_routes(self._worker)
            document = openapi(routes, bundle, version, self._worker.caller_check)
            self._cache = version, document, json_response(document)
        return self._cache[1:]


def routes(worker: ModelWorker) -> Routes:
    """Return the routes `/docs.json`, `/docs` and `/schema.json`."""
    docs = ApiDocs(worker)
    return {
        "/docs": Route(READING, docs.page, "operator", always(_DOCS)),
        "/docs.json": Route(READING, docs.document, "operator", always(_DOCUMENT)),
        "/schema.json": Route(READING, None, "caller", always(_SCHEMA)),  # BentoML answers it
    }


EXTENSION = Extension("api_docs", lambda worker: Hooks(routes=routes(worker)))
