"""The error shape of the Open Inference Protocol: `error` is a text, not an object."""

from serving.api_docs.schemas import ERROR_FIELDS, TEXT
from serving.http.responses import Refusal, Response, describe_refusal, json_response
from serving.http.routes import ErrorShape

_FIELDS = {"error": TEXT} | {
    name: schema for name, schema in ERROR_FIELDS.items() if name != "message"
}


def _respond(refusal: Refusal, request_id: str) -> Response:
    described = describe_refusal(refusal, request_id)
    return json_response(
        {"error": described.pop("message"), **described}, refusal.status, refusal.headers
    )


ERROR_SHAPE = ErrorShape(
    "ProtocolError",
    {"type": "object", "required": list(_FIELDS), "properties": _FIELDS},
    _respond,
)
