"""Renders the page at `/docs`, which documents the API, on the server, without scripts."""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from slipway.serving.api_docs.openapi import ACCESS

_TEMPLATE = Template(Path(__file__).with_name("docs.html").read_text(encoding="utf-8"))
_STYLE = _TEMPLATE.template.partition("<style>")[2].partition("</style>")[0]
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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
