"""Serves `/docs.json` (OpenAPI), `/docs` (a page) and `/schema.json` (for BentoML's client).

The page is rendered here, without scripts.
"""

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from slipway.serving.api_docs.openapi import ACCESS, openapi
from slipway.serving.app import all_routes
from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Response, json_response
from slipway.serving.http.routes import READING, Operation, Request, Route, Routes, always
from slipway.serving.schemas import ANYTHING, TEXT
from slipway.serving.worker import ModelWorker

_TEMPLATE = Template(Path(__file__).with_name("docs.html").read_text(encoding="utf-8"))
_STYLE = _TEMPLATE.template.partition("<style>")[2].partition("</style>")[0]
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
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
        headers = (("content-security-policy", _POLICY),)
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


def render_docs(
    document: dict[str, Any], address: str, callers_address: str | None = None
) -> bytes:
    """Render an OpenAPI document as a UTF-8 HTML page.

    The example commands use `address` (host:port). If the service has a second port for operators,
    `callers_address` is the address of the routes for callers.
    """
    found = [
        (path, method, item[method])
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    ]
    sections = "\n".join(
        _section(path, method.upper(), operation, _address(operation, address, callers_address))
        for path, method, operation in found
    )
    contents = "\n".join(
        f'<li><a href="#{escape(o["operationId"])}">{_title(path, method.upper())}</a></li>'
        for path, method, o in found
    )
    error = _json(document["components"]["schemas"]["Error"])
    version = escape(document["info"]["version"])
    return _TEMPLATE.substitute(
        version=version, contents=contents, sections=sections, error=error
    ).encode()


def _address(operation: dict[str, Any], address: str, callers_address: str | None) -> str:
    if callers_address and operation["description"] == ACCESS["caller"]:
        return callers_address
    return address


def _section(path: str, method: str, operation: dict[str, Any], address: str) -> str:
    parts = [
        f'<section id="{escape(operation["operationId"])}"><h2>{_title(path, method)}</h2>',
        f"<p>{escape(operation['summary'])} <small>{escape(operation['description'])}</small></p>",
        f"<pre>{escape(_command(path, method, operation, address))}</pre>",
    ]
    taken = operation.get("requestBody", {}).get("content", {})
    answered = next(iter(operation["responses"].values())).get("content", {})
    parts += [_schema("Request", name, part["schema"]) for name, part in taken.items()]
    parts += [_schema("Response", name, part["schema"]) for name, part in answered.items()]
    rows = "".join(
        f"<tr><td>{status}</td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
        if status != "200"
    )
    return "\n".join(
        [*parts, f"<details><summary>Errors</summary><table>{rows}</table></details>", "</section>"]
    )


def _title(path: str, method: str) -> str:
    return f"<code>{escape(method)} {escape(path)}</code>"


def _command(path: str, method: str, operation: dict[str, Any], address: str) -> str:
    key = ["-H", '"authorization: Bearer $KEY"'] if operation["security"] else []
    verb = ["-X", method] if method != "GET" and "x-curl" not in operation else []
    return " ".join(
        ["curl", *verb, *key, *filter(None, [operation.get("x-curl")]), f"http://{address}{path}"]
    )


def _schema(word: str, media_type: str, schema: dict[str, Any]) -> str:
    summary = f"<summary>{word} <code>{escape(media_type)}</code></summary>"
    return f"<details>{summary}<pre>{_json(schema)}</pre></details>"


def _json(content: Any) -> str:
    return escape(json.dumps(content, indent=2, ensure_ascii=False))


EXTENSION = Extension("api_docs", lambda worker: Hooks(routes=routes(worker)))
