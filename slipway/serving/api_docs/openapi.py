"""Builds the API's OpenAPI 3.0 document from the routes and the served bundle.

BentoML's own document has only `predict`, and lists errors that the service never returns. The
version is 3.0, because BentoML's document shares the schemas of rows, which use `nullable`.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from slipway.artifacts.bundle import Bundle
from slipway.serving.http.callers import CallerCheck
from slipway.serving.http.responses import ERRORS
from slipway.serving.http.routes import READING, Operation, Route, Routes
from slipway.serving.schemas import ERROR
from slipway.system.errors import linked

VERSION = "3.0.3"
_ERRORS_OF_EVERY_ROUTE = (
    "malformed_request",
    "not_allowed",
    "method_not_allowed",
    "header_timeout",
    "url_too_long",
    "expectation_failed",
    "headers_too_large",
    "internal",
    "too_many_connections",
)
# Before the path has arrived, an error has the general shape.
_ERRORS_BEFORE_PATHS = frozenset({"malformed_request", "header_timeout", "too_many_connections"})
ACCESS = {"open": "For anybody.", "caller": "For callers.", "operator": "For operators."}


def openapi(
    routes: Routes, bundle: Bundle | None, model_version: str | None, check: CallerCheck
) -> dict[str, Any]:
    """Return the document for these routes. `bundle` is the served manifest, None without one."""
    shapes = [route.error_shape for route in routes.values() if route.error_shape]
    return {
        "openapi": VERSION,
        "info": {
            "title": "slipway",
            "version": model_version or "no model",
            "description": linked(
                f"{_predict_summary(routes, bundle)} All errors have one shape for each protocol; "
                "docs/reference/serving.md lists their codes."
            ),
        },
        "paths": dict(_path(path, route, bundle, check) for path, route in sorted(routes.items())),
        "components": {
            "schemas": {"Error": ERROR} | {shape.name: shape.schema for shape in shapes},
            "securitySchemes": dict(check.security),
        },
    }


def _predict_summary(routes: Routes, bundle: Bundle | None) -> str:
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
        if method != "HEAD":  # implied by GET
            item[method.lower()] = _operation(method, path, route, operation, check)
    return path, item


def _operation(
    method: str, path: str, route: Route, operation: Operation, check: CallerCheck
) -> dict[str, Any]:
    is_guarded = route.access != "open"
    guards = check.errors if is_guarded else ()
    statuses = (200,) if method in READING else operation.statuses
    described: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *filter(None, path.translate(_PLAIN).split("/"))]),
        "summary": operation.summary,
        "description": ACCESS[route.access],
        "security": [{name: []} for name in check.security] if is_guarded else [],
        "responses": {
            **{str(status): _answer(operation) for status in statuses},
            **_errors(route, [*operation.errors, *guards, *_ERRORS_OF_EVERY_ROUTE]),
        },
    }
    if operation.takes and method not in READING:
        described["requestBody"] = {
            "required": operation.requires_body,
            "content": _content(operation.takes),
        }
    if operation.example and method not in READING:
        described["x-curl"] = operation.example
    return described


_PLAIN = str.maketrans({".": "_", "{": "", "}": "", "-": "_"})


def _answer(operation: Operation) -> dict[str, Any]:
    header = {
        "x-request-id": {
            "description": "the caller's id, or a generated one",
            "schema": {"type": "string"},
        }
    }
    answer: dict[str, Any] = {"description": "the answer", "headers": header}
    return answer | ({"content": _content(operation.answers)} if operation.answers else {})


def _content(schemas: Any) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


def _errors(route: Route, codes: Iterable[str]) -> dict[str, Any]:
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in codes:
        by_status[ERRORS[code]].append(code)
    return {
        str(status): {
            "description": ", ".join(by_status[status]),
            "content": {"application/json": {"schema": _error_schema(route, by_status[status])}},
        }
        for status in sorted(by_status)
    }


def _error_schema(route: Route, codes: list[str]) -> dict[str, Any]:
    general = {"$ref": "#/components/schemas/Error"}
    if route.error_shape is None:
        return general
    own = {"$ref": f"#/components/schemas/{route.error_shape.name}"}
    return own if _ERRORS_BEFORE_PATHS.isdisjoint(codes) else {"anyOf": [own, general]}
