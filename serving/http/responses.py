"""Every answer the service gives, and the one shape of every error.

An error is `{"error": {"code", "message", "field", "request_id"}}`; ERRORS lists all codes with
their status, so that no handler invents one.
"""

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import Send

# docs/serving.md says when each is given; a test compares the two.
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
_encode = json.JSONEncoder(
    allow_nan=False, ensure_ascii=False, separators=(",", ":")
).encode  # json.dumps would make one each time
RETRY_AFTER = ("retry-after", "1")  # seconds
# In every answer that does not say otherwise: it is for its caller alone, is what it says it is, and runs and embeds nothing.
GUARDING: tuple[tuple[str, str], ...] = (
    ("cache-control", "no-store"),
    ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault of ours
    """A request that gets an error instead of an answer."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = ERRORS[code]
        self.message = message
        self.field = field
        self.headers = headers


class ClientGoneError(Exception):
    """The caller hung up before its request was complete: there is nobody to answer."""


@dataclass(slots=True)  # frozen, it would take four times as long to make
class Response:
    """A complete answer. Nobody changes it."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = field(default=())


def json_response(
    content: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    """`content` as JSON; ValueError for NaN and infinities, which JSON cannot hold."""
    return Response(status, _encode(content).encode(), headers=headers)


def finite_json_response(content: Any) -> Response:
    """The same of numbers that are known to be finite, in a tenth of the time; any other would silently become null."""
    return Response(200, orjson.dumps(content))


def error_response(refusal: Refusal, request_id: str) -> Response:
    """The one shape of every error."""
    return json_response(
        {"error": describe_refusal(refusal, request_id)}, refusal.status, refusal.headers
    )


def describe_refusal(refusal: Refusal, request_id: str) -> dict[str, str | None]:
    """The fields of an error, for the caller."""
    return {
        "code": refusal.code,
        "message": refusal.message,
        "field": refusal.field,
        "request_id": request_id,
    }


async def send_response(
    response: Response, request_id: str, send: Send, *, with_body: bool = True, is_last: bool = True
) -> None:
    """Send a whole response; `with_body` is false for HEAD. An empty message has to follow where it is not the last."""
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
    """A whole response as it goes over the wire, the last one of its connection."""
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
    """All headers of an answer."""
    own = [
        (b"content-type", response.content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(response.body)),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers),
    ]
    return (
        guarded_headers(own, request_id)
        if response.headers
        else [*own, *_GUARDING, (b"x-request-id", request_id.encode("latin-1"))]
    )


def guarded_headers(own: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """An answer's `own` headers, and those of GUARDING that it lacks."""
    named = {name for name, _ in own}
    return [
        *own,
        *(header for header in _GUARDING if header[0] not in named),
        (b"x-request-id", request_id.encode("latin-1")),
    ]


_GUARDING = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in GUARDING]
