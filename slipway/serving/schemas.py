"""Builds JSON Schemas and descriptions of inputs and responses from a bundle's contracts.

`/model`, the page at `/` and the OpenAPI document use them. Schemas follow OpenAPI 3.0. Fitted
statistics that only the network needs (means, scales, quantiles) are left out.
"""

import io
import json
import shlex
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter

from slipway.artifacts.bundle import Bundle, LoadedBundle
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract, decode_row
from slipway.kinds.registry import input_kind
from slipway.serving.http.responses import ERRORS

BINARY = {"type": "string", "format": "binary"}
TEXT = {"type": "string"}
ANYTHING = {"type": "object", "additionalProperties": True}
ERROR_FIELDS: dict[str, Any] = {
    "code": {"type": "string", "enum": sorted(ERRORS)},
    "message": TEXT,
    "field": {
        "type": "string",
        "nullable": True,
        "description": "the invalid field, such as image, age or rows[3].age",
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
_IGNORED = {"description": "ignored, as in training: any value", "nullable": True}
_JSON_TYPES = {"number": "number", "category": "string", "boolean": "boolean", "date": "string"}
_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
_OUTLIER = {"ood_score": {"type": "number", "minimum": 0}, "is_ood": {"type": "boolean"}}
_COMMON = {"model_version": TEXT, "request_id": TEXT}


def row_schema(contract: ColumnContract) -> dict[str, Any]:
    """Return the JSON Schema of one table row, a JSON object of columns."""
    return {
        "type": "object",
        "properties": {column.name: _column_schema(column) for column in contract.columns}
        | dict.fromkeys(contract.ignored, _IGNORED),
        "required": [column.name for column in contract.columns if column.is_required],
        "additionalProperties": False,
        "example": contract.example_row(),
    }


def text_schema(contract: TextContract) -> dict[str, Any]:
    """Return the JSON Schema of one text row, a JSON object of text columns."""
    text: dict[str, Any] = {"type": "string"}
    if contract.max_characters is not None:
        text["maxLength"] = contract.max_characters
    is_single = len(contract.columns) == 1
    return {
        "type": "object",
        "properties": {
            name: text | ({"minLength": 1} if is_single else {"nullable": True})
            for name in contract.columns
        }
        | dict.fromkeys(contract.ignored, _IGNORED),
        **({"required": contract.columns} if is_single else {}),
        "additionalProperties": False,
        "example": contract.example_row(),
    }


class InputApi(Protocol):
    """Describes the body of `/predict` for one input contract. Each kind of input has a class."""

    summary: str  # summary of `/predict`
    errors: tuple[str, ...]  # errors that only this kind of input causes

    def content(self, max_items: int | None = None) -> dict[str, Any]:
        """Return the JSON Schema of the body by media type, for at most `max_items` items."""

    def curl(self) -> str:
        """Return arguments of curl that send an example request."""

    def example_bodies(self, bundle: LoadedBundle, most: int) -> tuple[list[bytes], str]:
        """Return at most `most` example bodies for the load test, and a text about their origin."""


def input_api(contract: InputContract) -> InputApi:
    """Create the InputApi for a contract."""
    make: Callable[[InputContract], InputApi] = input_kind(contract.kind).load_part("api")
    return make(contract)


class TextApi:
    """Describes the body of a text model: one JSON object, or a list of them."""

    summary = "Predict one text, or several."
    errors = (
        "malformed_json",
        "too_many_rows",
        "not_a_row",
        "no_rows",
        "unknown_column",
        "missing_value",
        "type_violation",
        "out_of_range",
    )

    def __init__(self, contract: TextContract) -> None:
        self._contract = contract

    def content(self, max_items: int | None = None) -> dict[str, Any]:
        row = text_schema(self._contract)
        return {"application/json": {"oneOf": [row, only_list("rows", row, max_items)]}}

    def curl(self) -> str:
        row = json.dumps(self._contract.example_row(), ensure_ascii=False)
        return f"-H 'content-type: application/json' -d {shlex.quote(row)}"

    def example_bodies(self, bundle: LoadedBundle, most: int) -> tuple[list[bytes], str]:
        rows = bundle.golden_rows()
        if rows is None or len(self._contract.columns) > 1:
            return [json.dumps(self._contract.example_row()).encode()], "an example text"
        texts = [decode_row(row, self._contract) for row in rows.inputs[:most]]
        bodies = [json.dumps({self._contract.columns[0]: text}).encode() for text in texts]
        return bodies, "the texts of the bundle's golden rows"


class ImageApi:
    """Describes the body of an image model: one encoded image, or a multipart form of several."""

    summary = "Predict one image, or several."
    errors = (
        "missing_field",
        "unknown_field",
        "too_many_items",
        "not_a_file",
        "empty",
        "undecodable",
        "truncated",
        "pixel_bomb",
        "transform_failed",
    )

    def __init__(self, contract: ImageContract) -> None:
        self._contract = contract

    @staticmethod
    def content(max_items: int | None = None) -> dict[str, Any]:
        form = only_list("image", BINARY, max_items)
        return {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": form}

    @staticmethod
    def curl() -> str:
        return "-F image=@picture.png"

    def example_bodies(self, bundle: LoadedBundle, most: int) -> tuple[list[bytes], str]:
        rows = bundle.golden_rows()
        if rows is None:
            images = self._contract.example_rows(1)
            return list(map(_png, images)), "an image that the network takes, as PNG"
        return list(map(_png, rows.inputs[:most])), "the bundle's golden rows, as PNG"


class RowApi:
    """Describes the body of a table model: one JSON object per row, or a list of them."""

    summary = "Predict one row, or several."
    errors = (
        "malformed_json",
        "too_many_rows",
        "not_a_row",
        "no_rows",
        "unknown_column",
        "missing_value",
        "type_violation",
        "unknown_category",
        "out_of_range",
    )

    def __init__(self, contract: ColumnContract) -> None:
        self._contract = contract

    def content(self, max_items: int | None = None) -> dict[str, Any]:
        row = row_schema(self._contract)
        return {"application/json": {"oneOf": [row, only_list("rows", row, max_items)]}}

    def curl(self) -> str:
        row = json.dumps(self._contract.example_row(), ensure_ascii=False)
        return f"-H 'content-type: application/json' -d {shlex.quote(row)}"

    def example_bodies(self, bundle: LoadedBundle, most: int) -> tuple[list[bytes], str]:
        row = json.dumps(self._contract.example_row()).encode()
        return [row], "the example row of the bundle's columns"


def schema_of(model: Any) -> dict[str, Any]:
    """Return the JSON Schema of a pydantic model or union, in OpenAPI 3.0 without references."""
    schema = TypeAdapter(model).json_schema()
    definitions = schema.pop("$defs", {})

    def converted(part: Any) -> Any:
        if isinstance(part, list):
            return [converted(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return converted(definitions[part["$ref"].rpartition("/")[2]])
        part = {name: converted(value) for name, value in part.items() if name != "title"}
        if "exclusiveMinimum" in part:
            part |= {"minimum": part["exclusiveMinimum"], "exclusiveMinimum": True}
        if {"type": "null"} in part.get("anyOf", ()):
            (inner,) = (each for each in part.pop("anyOf") if each != {"type": "null"})
            part |= inner | {"nullable": True}
        if "const" in part:
            part["enum"] = [part.pop("const")]
        return part

    result: dict[str, Any] = converted(schema)
    return result


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode one image, (height, width, channels) uint8, as PNG."""
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return stream.getvalue()


def prediction_content(bundle: Bundle | None) -> dict[str, Any]:
    """Return the schema of the response of `/predict`: one prediction or a list."""
    fields = _prediction_fields(bundle)
    predictions = {"predictions": {"type": "array", "items": _object(fields)}}
    return {
        "application/json": {"oneOf": [_object(fields | _COMMON), _object(predictions | _COMMON)]}
    }


def _column_schema(column: Column) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _JSON_TYPES[column.kind]}
    if column.kind == "category" and not column.takes_missing:
        schema["enum"] = column.categories
    if column.kind == "date":
        schema["description"] = "ISO 8601, a date or a date with time; UTC if no zone is given"
        schema["anyOf"] = [{"format": "date"}, {"format": "date-time"}]
        if not column.is_required:
            schema["anyOf"].append({"enum": [""]})
    if column.unit:
        schema["description"] = f"in {column.unit}, as a number without it"
    if column.kind == "number" and column.min is not None:
        schema["minimum"] = column.min
    if column.kind == "number" and column.max is not None:
        schema["maximum"] = column.max
    if not column.is_required:
        schema["nullable"] = True
    return schema


def _prediction_fields(bundle: Bundle | None) -> dict[str, Any]:
    if bundle is None:
        return {}
    label = {"type": "string", "enum": bundle.output.labels}
    number = {"type": "number"}
    interval = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    shares = {
        "probabilities": _object(dict.fromkeys(bundle.output.labels, _PROBABILITY)),
        "prediction_set": {"type": "array", "items": label},
    }
    decision = bundle.calibration.decision
    costs: dict[str, Any] = {}
    if decision and decision.costs:
        costs = {"expected_cost": {"type": "number", "minimum": 0}}
        costs |= {"abstain": {"type": "boolean"}} if decision.costs.abstain is not None else {}
    own: dict[str, dict[str, Any]] = {
        "value": {"value": number, "interval": interval | {"nullable": True}},
        "probabilities": {"label": label} | shares | costs,
        "label_probabilities": {"labels": {"type": "array", "items": label}} | shares,
    }
    remarks = {name: {"type": "boolean"} for name in bundle.input.remark_names}
    return own[bundle.output.kind] | _OUTLIER | remarks


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    if not fields:
        return {"type": "object"}
    return {"type": "object", "required": list(fields), "properties": fields}


def only_list(name: str, item: dict[str, Any], max_items: int | None = None) -> dict[str, Any]:
    """Return the schema of an object whose only field is a list of at least one item."""
    items: dict[str, Any] = {"type": "array", "items": item, "minItems": 1}
    if max_items:
        items["maxItems"] = max_items
    return _object({name: items}) | {"additionalProperties": False}
