"""JSON Schemas, as OpenAPI 3.0 has them, of what the service takes and answers, typed by a bundle's contract."""

from typing import Any

from serving.api_docs.description import row_schema
from serving.http.responses import ERRORS
from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import input_kind

BINARY = {"type": "string", "format": "binary"}
TEXT = {"type": "string"}
ANYTHING = {"type": "object", "additionalProperties": True}
ERROR_FIELDS: dict[str, Any] = {
    "code": {"type": "string", "enum": sorted(ERRORS)},
    "message": TEXT,
    "field": {
        "type": "string",
        "nullable": True,
        "description": "what was wrong, such as image, age or rows[3].age",
    },
    "request_id": TEXT,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": list(ERROR_FIELDS), "properties": ERROR_FIELDS}
    },
}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_OUTLIER = {"outlier_score": {"type": "number", "minimum": 0}, "is_outlier": {"type": "boolean"}}
_NAMED = {"model_version": TEXT, "request_id": TEXT}


def prediction_content(bundle: Bundle | None) -> dict[str, Any]:
    """What `/predict` answers: one flat answer, or a list of them."""
    fields = _prediction_fields(bundle)
    one, several = (
        _object(fields | _NAMED),
        _object({"predictions": {"type": "array", "items": _object(fields)}} | _NAMED),
    )
    return {"application/json": {"oneOf": [one, several]}}


def payload_content(bundle: Bundle | None) -> dict[str, Any]:
    """What `/predict` takes, by media type."""
    if bundle and isinstance(bundle.input, ColumnContract):
        row = row_schema(bundle.input)
        rows = _object({"rows": {"type": "array", "items": row, "minItems": 1}}) | {
            "additionalProperties": False
        }
        return {"application/json": {"oneOf": [row, rows]}}
    if bundle and not isinstance(bundle.input, ImageContract):
        return {input_kind(bundle.input.kind).content_type: BINARY}
    form = _object({"image": {"type": "array", "items": BINARY, "minItems": 1}}) | {
        "additionalProperties": False
    }
    return {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": form}


def _prediction_fields(bundle: Bundle | None) -> dict[str, Any]:
    if bundle is None:
        return {}
    if bundle.output.kind == "value":
        interval = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 2,
            "maxItems": 2,
            "nullable": True,
        }
        return {"value": {"type": "number"}, "interval": interval} | _OUTLIER
    label = {"type": "string", "enum": bundle.output.labels}
    probabilities = _object(dict.fromkeys(bundle.output.labels, _SHARE))
    return {
        "label": label,
        "probabilities": probabilities,
        "prediction_set": {"type": "array", "items": label},
    } | _OUTLIER


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    """All of them are there."""
    return (
        {"type": "object", "required": list(fields), "properties": fields}
        if fields
        else {"type": "object"}
    )
