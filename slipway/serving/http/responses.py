"""HTTP responses, and the common format of all error responses.

An error is `{"error": {"code", "message", "field", "request_id"}}`. ERRORS maps every error code to
its HTTP status; handlers use only these codes.
"""

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import Send

from slipway.system.errors import linked

# docs/reference/serving.md explains each error; a test compares the two lists.
ERRORS = {
    "malformed_request": 400,
    "malformed_body": 400,
    "malformed_json": 400,
    "key_missing": 401,
    "key_unknown": 401,
    "not_allowed": 403,
    "foreign_origin": 403,
    "not_found": 404,
    "unknown_model": 404,
    "method_not_allowed": 405,
    "header_timeout": 408,
    "body_timeout": 408,
    "rollout_refused": 409,
    "length_required": 411,
    "body_too_large": 413,
    "too_many_items": 413,
    "too_many_rows": 413,
    "url_too_long": 414,
    "unsupported_media_type": 415,
    "expectation_failed": 417,
    "unknown_host": 421,
    "missing_field": 422,
    "unknown_field": 422,
    "not_a_file": 422,
    "empty": 422,
    "undecodable": 422,
    "truncated": 422,
    "pixel_bomb": 422,
    "not_a_row": 422,
    "no_rows": 422,
    "unknown_column": 422,
    "missing_value": 422,
    "type_violation": 422,
    "unknown_category": 422,
    "out_of_range": 422,
    "transform_failed": 422,
    "tensor_mismatch": 422,
    "rollout_invalid": 422,
    "unknown_label": 422,
    "not_one_item": 422,
    "explain_busy": 429,
    "feedback_full": 429,
    "queue_full": 429,
    "rate_limited": 429,
    "headers_too_large": 431,
    "internal": 500,
    "model_failed": 500,
    "invalid_answer": 500,
    "not_ready": 503,
    "feedback_unavailable": 503,
    "too_many_connections": 503,
    "deadline_exceeded": 504,
}
# Made once: json.dumps would create an encoder for each response.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
RETRY_AFTER = ("retry-after", "1")  # seconds
JSON = "application/json"
# Defaults of every response: not cached, not sniffed, and without scripts or embedded content.
SECURITY_HEADERS: tuple[tuple[str, str], ...] = (
    ("cache-control", "no-store"),
    ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-content-type-options", "nosniff"),
)
# Defaults of all but JSON, in which a browser follows no links. Each header takes 0.4 us.
PAGE_HEADERS = (*SECURITY_HEADERS, ("referrer-policy", "no-referrer"))


class Refusal(Exception):  # noqa: N818 - a response to the caller, not a fault of ours
    """Raised to refuse a request. The application turns it into an error response.

    `code` is a key of ERRORS, and `field` names the invalid part of the request, if any.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        message = linked(message)
        super().__init__(message)
        self.code = code
        self.status = ERRORS[code]
        self.message = message
        self.field = field
        self.headers = headers


class ClientDisconnectedError(Exception):
    """The client disconnected before its request was complete."""


@dataclass(slots=True)  # a frozen one takes four times as long to create
class Response:
    """A complete HTTP response. Treat it as immutable."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = field(default=())


def json_response(
    content: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    """Encode `content` as JSON. Raises ValueError for NaN and infinities."""
    return Response(status, _encode(content).encode(), headers=headers)


def finite_json_response(content: Any) -> Response:
    """Encode `content` as JSON, ten times as fast as `json_response`.

    Every number must be finite: NaN and infinities would silently become null.
    """
    return Response(200, orjson.dumps(content))


def error_response(refusal: Refusal, request_id: str) -> Response:
    return json_response(
        {"error": describe_refusal(refusal, request_id)}, refusal.status, refusal.headers
    )


def describe_refusal(refusal: Refusal, request_id: str) -> dict[str, str | None]:
    return {
        "code": refusal.code,
        "message": refusal.message,
        "field": refusal.field,
        "request_id": request_id,
    }


async def send_response(
    response: Response, request_id: str, send: Send, *, with_body: bool = True, is_last: bool = True
) -> None:
    """Send a response. `with_body=False` leaves out the body, as HEAD requires.

    With `is_last=False` the response stays open, and the caller must end it with an empty message.
    """
    await send(
        {
            "type": "http.response.start",
            "status": response.status,
            "headers": encoded_headers(response, request_id),
        }
    )
    await send(
        {
            "type": "http.response.body",
            "body": response.body if with_body else b"",
            "more_body": not is_last,
        }
    )


def response_bytes(response: Response, request_id: str) -> bytes:
    """Serialise a response as HTTP/1.1 bytes, with the header `connection: close`."""
    status = HTTPStatus(response.status)
    headers = [*encoded_headers(response, request_id), (b"connection", b"close")]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (
        status,
        status.phrase.encode(),
        b"".join(lines),
        response.body,
    )


def encoded_headers(response: Response, request_id: str) -> list[tuple[bytes, bytes]]:
    own = [
        (b"content-type", response.content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(response.body)),
    ]
    if response.content_type == JSON and not response.headers:
        return [*own, *_SECURITY_HEADERS, (b"x-request-id", request_id.encode("latin-1"))]
    return security_headers([*own, *_encoded(response.headers)], request_id)


def security_headers(own: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Return a response's `own` headers with `x-request-id` and the security headers they lack."""
    values = dict(own)
    is_json = values.get(b"content-type") == JSON.encode()
    every = _SECURITY_HEADERS if is_json else _PAGE_HEADERS
    defaults = [header for header in every if header[0] not in values]
    return [*own, *defaults, (b"x-request-id", request_id.encode("latin-1"))]


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


_SECURITY_HEADERS, _PAGE_HEADERS = _encoded(SECURITY_HEADERS), _encoded(PAGE_HEADERS)
