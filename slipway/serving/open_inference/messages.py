"""Parses and builds the messages of `infer`: JSON, followed by the tensors sent as bytes."""

import json
import math
from dataclasses import dataclass
from typing import Any

from slipway.serving.http.responses import Refusal, Response
from slipway.serving.http.strict_json import may_exceed, parse
from slipway.serving.open_inference.tensors import (
    BYTES,
    DATATYPES,
    Tensor,
    from_bytes,
    from_json,
    mismatch,
    to_bytes,
    to_json,
)

HEAD_LENGTH = "inference-header-content-length"  # the header with the length of the JSON head
MAX_VALUES = 1 << 19  # most values in JSON; a larger tensor has to be sent as bytes
MAX_TENSORS = 4096
_MAX_DEPTH = 12  # {"inputs": [{"data": ...}]} has 4 levels, and data may be nested by its shape
_MAX_DIMENSIONS = 8
_PIECE = 4096  # values encoded at once, which takes a few milliseconds
_INPUT_PARAMETERS = {"binary_data_size"}
_OUTPUT_PARAMETERS = {"binary_data", "classification"}
_REQUEST_PARAMETERS = {"binary_data_output"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "binary_data_size": {"type": "integer", "minimum": 0},
    "classification": {"type": "integer", "minimum": 0},
}


def _described(parameters: set[str]) -> dict[str, Any]:
    properties = {name: _SCHEMAS.get(name, {"type": "boolean"}) for name in sorted(parameters)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


_COUNT = {"type": "integer", "minimum": 0}
# The JSON Schema of a request, without the relations between its parts.
REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _described(_REQUEST_PARAMETERS),
        "inputs": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_TENSORS,
            "items": {
                "type": "object",
                "required": ["name", "datatype", "shape"],
                "properties": {
                    "name": {"type": "string"},
                    "datatype": {"type": "string", "enum": list(DATATYPES)},
                    "shape": {"type": "array", "items": _COUNT, "maxItems": _MAX_DIMENSIONS},
                    "parameters": _described(_INPUT_PARAMETERS),
                    "data": {"type": "array", "items": {}},
                },
                "additionalProperties": False,
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parameters": _described(_OUTPUT_PARAMETERS),
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class RequestedOutput:
    """An output that a request names, and the format in which to send it."""

    name: str
    is_binary: bool
    num_classes: int  # the number of largest values, as texts; 0: the tensor itself


@dataclass(frozen=True)
class InferRequest:
    """A parsed inference request: its input tensors, and the requested outputs."""

    id: str | None
    inputs: list[Tensor]
    outputs: list[RequestedOutput] | None  # None: all outputs
    is_binary: bool  # True if outputs are sent as bytes by default


def parse_request(body: bytes, head_length: int | None) -> InferRequest:
    """Parse a body whose first `head_length` bytes are JSON; None: all bytes.

    Raises Refusal with the invalid field.
    """
    if head_length is None:
        head_length = len(body)
    if head_length > len(body):
        raise Refusal(
            "malformed_body",
            f"the body has {len(body)} bytes, and its JSON is declared to have {head_length}",
            field=HEAD_LENGTH,
        )
    head, rest = body[:head_length], memoryview(body)[head_length:]
    if may_exceed(head, MAX_VALUES, max_depth=_MAX_DEPTH):
        message = f"the JSON has more than {MAX_VALUES} values; send tensors as bytes"
        raise Refusal("too_many_rows", f"{message} ({HEAD_LENGTH})", field="inputs")
    content = _object(parse(head), None, {"id", "parameters", "inputs", "outputs"})
    parameters = _parameters(content, "parameters", _REQUEST_PARAMETERS)
    listed = content.get("inputs")
    if not isinstance(listed, list) or not listed:
        raise Refusal(
            "missing_field", "inputs: a list of at least one tensor was expected", field="inputs"
        )
    if len(listed) > MAX_TENSORS:
        raise Refusal(
            "too_many_rows",
            f"inputs: there are {len(listed)} tensors, the limit is {MAX_TENSORS}",
            field="inputs",
        )
    inputs = []
    for position, each in enumerate(listed):
        tensor, rest = _tensor(each, rest, f"inputs[{position}]")
        inputs.append(tensor)
    if len(rest):
        raise Refusal(
            "malformed_body", f"{len(rest)} bytes are left after the last tensor", field="inputs"
        )
    request_id = content.get("id")
    if not isinstance(request_id, str | None):
        raise mismatch(f"{request_id!r:.80} was found, expected text", "id")
    is_binary = _flag(parameters, "binary_data_output", False, "parameters")
    outputs = _requested_outputs(content.get("outputs"), is_binary)
    return InferRequest(request_id or None, inputs, outputs, is_binary)


def response(
    model: str, version: str, request: InferRequest, outputs: list[tuple[Tensor, bool]]
) -> Response:
    """Build the inference response: a JSON head, then the binary tensors.

    Each output is a tensor, with True if it is sent as bytes and not as JSON.
    """
    described, tail = [], []
    for tensor, is_binary in outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if is_binary:
            tail.append(to_bytes(tensor))
            entry["parameters"] = {"binary_data_size": len(tail[-1])}
            described.append(_encode(entry))
        else:
            described.append(f'{_encode(entry)[:-1]},"data":{_list(to_json(tensor))}}}')
    content = {"model_name": model, "model_version": version}
    if request.id is not None:
        content["id"] = request.id
    head = f'{_encode(content)[:-1]},"outputs":[{",".join(described)}]}}'.encode()
    if not tail:
        return Response(200, head)
    head_length = (HEAD_LENGTH, str(len(head)))
    return Response(200, b"".join([head, *tail]), "application/octet-stream", (head_length,))


def _list(values: list[Any]) -> str:
    """Encode a long list as JSON in pieces, so that other threads run between them.

    The encoder holds Python's lock during each call, which would block other threads.
    """
    pieces = (values[begin : begin + _PIECE] for begin in range(0, len(values), _PIECE))
    return f"[{','.join(_encode(piece)[1:-1] for piece in pieces)}]"


def _tensor(content: Any, rest: memoryview, field: str) -> tuple[Tensor, memoryview]:
    """Parse one tensor's JSON description. Returns the tensor and the unread binary data.

    `rest` is the binary data after the JSON. A binary tensor takes its bytes from the begin.
    """
    described = _object(content, field, {"name", "shape", "datatype", "parameters", "data"})
    name, datatype = _name(described, field), described.get("datatype")
    if datatype not in DATATYPES:
        raise mismatch(
            f"{datatype!r:.80} was found, expected one of {', '.join(DATATYPES)}",
            f"{field}.datatype",
        )
    shape = _shape(described.get("shape"), f"{field}.shape")
    size = _parameters(described, f"{field}.parameters", _INPUT_PARAMETERS).get("binary_data_size")
    if size is None:
        if "data" not in described:
            raise mismatch("there is neither data nor parameters.binary_data_size", field)
        _require_possible(shape, MAX_VALUES, f"{field}.shape")
        return from_json(name, datatype, shape, described["data"], field), rest
    if "data" in described:
        raise mismatch(
            "there are both data and parameters.binary_data_size, expected one of them", field
        )
    if not _is_count(size) or size > len(rest):
        raise mismatch(
            f"{size!r:.80} was found, {len(rest)} bytes are left after the JSON",
            f"{field}.parameters.binary_data_size",
        )
    max_values = MAX_VALUES if datatype == BYTES else max(MAX_VALUES, size)
    _require_possible(shape, max_values, f"{field}.shape")
    return from_bytes(name, datatype, shape, rest[:size], field), rest[size:]


def _name(described: dict[str, Any], field: str) -> str:
    name = described.get("name")
    if not isinstance(name, str):
        raise mismatch("expected a name, as text", f"{field}.name")
    return name


def _shape(found: Any, field: str) -> tuple[int, ...]:
    is_list = isinstance(found, list) and len(found) <= _MAX_DIMENSIONS
    if not is_list or not all(map(_is_count, found)):
        raise mismatch(
            f"{found!r:.80} was found, expected a list of at most {_MAX_DIMENSIONS} sizes of "
            "0 or more",
            field,
        )
    return tuple(found)


def _require_possible(shape: tuple[int, ...], max_values: int, field: str) -> None:
    """Raise Refusal for a shape with too many values.

    A size of 0 counts as 1: numpy multiplies the other sizes even then, and may overflow.
    """
    if math.prod(max(1, size) for size in shape) > max_values:
        raise mismatch(
            f"{list(shape)!r:.80} was found, a request of this size has at most "
            f"{max_values} values",
            field,
        )


def _requested_outputs(content: Any, is_binary: bool) -> list[RequestedOutput] | None:
    """Parse the list of requested outputs. Returns None if it is missing: all are requested.

    Each output may appear only once, which limits the size of the response.
    """
    if content is None:
        return None
    if not isinstance(content, list):
        raise mismatch("expected a list of outputs", "outputs")
    outputs: dict[str, RequestedOutput] = {}
    for position, each in enumerate(content):
        field = f"outputs[{position}]"
        described = _object(each, field, {"name", "parameters"})
        name = _name(described, field)
        if name in outputs:
            raise mismatch(
                f"the output {name[:80]!r} is requested again, expected each once", f"{field}.name"
            )
        parameters = _parameters(described, f"{field}.parameters", _OUTPUT_PARAMETERS)
        num_classes = parameters.get("classification", 0)
        if not _is_count(num_classes):
            raise mismatch(
                f"{num_classes!r:.80} was found, expected a number of classes",
                f"{field}.parameters.classification",
            )
        binary = _flag(parameters, "binary_data", is_binary, f"{field}.parameters")
        outputs[name] = RequestedOutput(name, binary, num_classes)
    return list(outputs.values())


def _parameters(content: dict[str, Any], field: str, known: set[str]) -> dict[str, Any]:
    """Return the checked parameters. Refuses unknown ones, such as `timeout`, by name."""
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise mismatch("expected a JSON object", field)
    return _object(parameters, field, known)


def _flag(parameters: dict[str, Any], name: str, default: bool, field: str) -> bool:
    flag = parameters.get(name, default)
    if not isinstance(flag, bool):
        raise mismatch(f"{flag!r:.80} was found, expected true or false", f"{field}.{name}")
    return flag


def _object(content: Any, field: str | None, known: set[str]) -> dict[str, Any]:
    """Return `content` if it is a JSON object that has only known keys; else raise Refusal.

    `field` names the object in errors; None names the whole body.
    """
    name = field or "the body"
    if not isinstance(content, dict):
        raise Refusal("malformed_body", f"{name} is not a JSON object", field=field)
    unknown = sorted(set(content) - known)
    if unknown:
        key = unknown[0][:80]
        raise Refusal(
            "unknown_field", f"{name} has {key!r}, known: {', '.join(sorted(known))}", field=key
        )
    return content


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40
