"""The description of the whole API, OpenAPI 3.0, made from the routes and typed by the contract of the bundle that is served.

BentoML's own knows `predict` alone, and errors that the front never gives. 3.0 and not 3.1, since the schemas of rows are shared with
BentoML's description, which has `nullable`.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from serving.api_docs.schemas import ERROR
from serving.http.callers import CallerCheck
from serving.http.responses import ERRORS
from serving.http.routes import READING, Operation, Route, Routes
from slipway.artifacts.bundle import Bundle

VERSION = "3.0.3"
_OF_EVERY_ROUTE = (
    "malformed_request", "header_timeout", "url_too_long", "expectation_failed", "headers_too_large", "internal", "too_many_connections",
)  # fmt: skip
ACCESS = {"open": "For anybody.", "caller": "For callers.", "operator": "For operators."}


def openapi(
    routes: Routes, bundle: Bundle | None, model_version: str | None, check: CallerCheck
) -> dict[str, Any]:
    """The document for these routes; `bundle` is the manifest of the model that is served, or None while there is none."""
    shapes = [route.error_shape for route in routes.values() if route.error_shape]
    return {
        "openapi": VERSION,
        "info": {
            "title": "slipway",
            "version": model_version or "no model",
            "description": f"{_about(routes, bundle)} Errors have one shape, and a code that docs/serving.md lists.",
        },
        "paths": dict(_path(path, route, bundle, check) for path, route in sorted(routes.items())),
        "components": {
            "schemas": {"Error": ERROR} | {shape.name: shape.schema for shape in shapes},
            "securitySchemes": dict(check.security),
        },
    }


def _about(routes: Routes, bundle: Bundle | None) -> str:
    """What most callers come for."""
    predict = routes.get("/predict")
    return predict.describe(bundle).summary if predict and predict.describe else ""


def _path(
    path: str, route: Route, bundle: Bundle | None, check: CallerCheck
) -> tuple[str, dict[str, Any]]:
    operation = route.describe(bundle) if route.describe else Operation("")
    item: dict[str, Any] = {}
    for part, name in (("/*/", "name"), ("/*", "below")):
        if part in path:
            path = path.replace(part, part.replace("*", f"{{{name}}}"))
            item.setdefault("parameters", []).append(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            )
    for method in route.methods:
        if method != "HEAD":  # goes without saying beside GET
            item[method.lower()] = _operation(method, path, route, operation, check)
    return path, item


def _operation(
    method: str, path: str, route: Route, operation: Operation, check: CallerCheck
) -> dict[str, Any]:
    is_guarded = route.access != "open"
    guards = check.errors if is_guarded else ()
    described: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *filter(None, path.translate(_PLAIN).split("/"))]),
        "summary": operation.summary,
        "description": ACCESS[route.access],
        "security": [{name: []} for name in check.security] if is_guarded else [],
        "responses": {
            "200": _answer(operation),
            **_errors(route, [*operation.errors, *guards, *_OF_EVERY_ROUTE]),
        },
    }
    if operation.takes and method not in READING:
        described["requestBody"] = {"required": True, "content": _content(operation.takes)}
    if operation.example and method not in READING:
        described["x-curl"] = operation.example
    return described


_PLAIN = str.maketrans({".": "_", "{": "", "}": "", "-": "_"})


def _answer(operation: Operation) -> dict[str, Any]:
    header = {
        "x-request-id": {
            "description": "the caller's, or one that was made",
            "schema": {"type": "string"},
        }
    }
    answer: dict[str, Any] = {"description": "the answer", "headers": header}
    return answer | ({"content": _content(operation.answers)} if operation.answers else {})


def _content(schemas: Any) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


def _errors(route: Route, codes: Iterable[str]) -> dict[str, Any]:
    """By status, which several codes may share."""
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in codes:
        by_status[ERRORS[code]].append(code)
    name = route.error_shape.name if route.error_shape else "Error"
    shape = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {
        str(status): {"description": ", ".join(by_status[status]), "content": shape}
        for status in sorted(by_status)
    }
