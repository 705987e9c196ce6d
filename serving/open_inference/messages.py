"""Requests and answers of `infer`: a JSON head, and behind it the tensors that are sent as bytes."""

import json
import math
from dataclasses import dataclass
from typing import Any

from serving.http.responses import Refusal, Response
from serving.http.strict_json import may_exceed, parse
from serving.open_inference.tensors import (
    BYTES,
    DATATYPES,
    Tensor,
    from_bytes,
    from_json,
    mismatch,
    to_bytes,
    to_json,
)

HEAD_LENGTH = "inference-header-content-length"  # the header that says where the JSON ends
MAX_VALUES = 1 << 19  # in JSON; a larger tensor is sent as bytes
MAX_TENSORS = 4096
_MAX_DEPTH = 12  # {"inputs": [{"data": ...}]} is 4, and data may be nested by its shape
_MAX_DIMENSIONS = 8
_PIECE = 4096  # values, a few milliseconds
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_REQUEST_KEYS = {"id", "parameters", "inputs", "outputs"}
_TENSOR_KEYS = {"name", "shape", "datatype", "parameters", "data"}


@dataclass(frozen=True)
class Wanted:
    """One output that the caller asks for."""

    name: str
    is_binary: bool
    num_classes: int  # 0: the tensor itself; else its so many largest values as texts


@dataclass(frozen=True)
class InferRequest:
    """What `infer` was asked."""

    id: str | None
    inputs: list[Tensor]
    wanted: list[Wanted] | None  # None: all of them
    is_binary: bool  # how outputs are sent for which nothing else is said


def parse_request(body: bytes, head_length: int | None) -> InferRequest:
    """The request in a body whose first `head_length` bytes are JSON, or all of them; Refusal naming the field that is wrong."""
    if head_length is not None and head_length > len(body):
        raise Refusal(
            "malformed_body",
            f"the body has {len(body)} bytes, its JSON is said to have {head_length}",
            field=HEAD_LENGTH,
        )
    head, rest = (
        body[:head_length],
        memoryview(body)[len(body) if head_length is None else head_length :],
    )
    if may_exceed(head, MAX_VALUES, max_depth=_MAX_DEPTH):
        raise Refusal(
            "too_many_rows",
            f"the JSON has more than {MAX_VALUES} values; send tensors as bytes ({HEAD_LENGTH})",
            field="inputs",
        )
    content = _object(parse(head), "the body", _REQUEST_KEYS)
    parameters = _parameters(content, "parameters")
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
            "malformed_body", f"{len(rest)} bytes are left behind the last tensor", field="inputs"
        )
    is_binary = parameters.get("binary_data_output") is True
    return InferRequest(_id(content), inputs, _wanted(content.get("outputs"), is_binary), is_binary)


def response(
    model: str, version: str, request: InferRequest, outputs: list[tuple[Tensor, bool]]
) -> Response:
    """The answer; of each output whether it is sent as bytes."""
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
        text = _encode(entry)
        described.append(text if is_binary else f'{text[:-1]},"data":{_list(to_json(tensor))}}}')
    content = {"model_name": model, "model_version": version} | (
        {} if request.id is None else {"id": request.id}
    )
    head = f'{_encode(content)[:-1]},"outputs":[{",".join(described)}]}}'.encode()
    if not tail:
        return Response(200, head)
    return Response(
        200, b"".join([head, *tail]), "application/octet-stream", ((HEAD_LENGTH, str(len(head))),)
    )


def _list(values: list[Any]) -> str:
    """A list in JSON, made piece by piece: while the encoder is at work, no other thread is."""
    pieces = (values[begin : begin + _PIECE] for begin in range(0, len(values), _PIECE))
    return f"[{','.join(_encode(piece)[1:-1] for piece in pieces)}]"


def _tensor(content: Any, rest: memoryview, field: str) -> tuple[Tensor, memoryview]:
    """A tensor, and what is left of the bytes behind the JSON."""
    described = _object(content, field, _TENSOR_KEYS)
    name, datatype, shape = described.get("name"), described.get("datatype"), described.get("shape")
    if not isinstance(name, str):
        raise mismatch("a name was expected, as text", f"{field}.name")
    if datatype not in DATATYPES:
        raise mismatch(
            f"{datatype!r:.80} was found, expected one of {', '.join(DATATYPES)}",
            f"{field}.datatype",
        )
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(_is_count(size) for size in shape)
    ):
        raise mismatch(
            f"{shape!r:.80} was found, expected a list of at most {_MAX_DIMENSIONS} sizes of 0 or more",
            f"{field}.shape",
        )
    size = _parameters(described, f"{field}.parameters").get("binary_data_size")
    if size is None:
        if "data" not in described:
            raise mismatch("there is neither data nor parameters.binary_data_size", field)
        _require_possible(shape, MAX_VALUES, f"{field}.shape")
        return from_json(name, datatype, tuple(shape), described["data"], field), rest
    if "data" in described:
        raise mismatch(
            "there are both data and parameters.binary_data_size, expected one of them", field
        )
    if not _is_count(size) or size > len(rest):
        message = f"{size!r:.80} was found, {len(rest)} bytes are left behind the JSON"
        raise mismatch(message, f"{field}.parameters.binary_data_size")
    _require_possible(
        shape, MAX_VALUES if datatype == BYTES else max(MAX_VALUES, size), f"{field}.shape"
    )
    return from_bytes(name, datatype, tuple(shape), rest[:size], field), rest[size:]


def _require_possible(shape: list[int], most: int, field: str) -> None:
    """Refusal for a shape of more than `most` values, also where another size is 0: numpy multiplies the others all the same."""
    if math.prod(max(1, size) for size in shape) > most:
        raise mismatch(
            f"{shape!r:.80} was found, a request of this size has at most {most} values", field
        )


def _wanted(content: Any, is_binary: bool) -> list[Wanted] | None:
    if content is None:
        return None
    if not isinstance(content, list):
        raise mismatch("a list of outputs was expected", "outputs")
    wanted: list[Wanted] = []
    names = (
        set()
    )  # each once, in whatever form: an answer is never larger than all that there is to say
    for position, each in enumerate(content):
        field = f"outputs[{position}]"
        described = _object(each, field, {"name", "parameters"})
        name = described.get("name")
        if not isinstance(name, str):
            raise mismatch("a name was expected, as text", f"{field}.name")
        if name in names:
            raise mismatch(
                f"the output {name[:80]!r} is asked for again, expected each once", f"{field}.name"
            )
        names.add(name)
        parameters = _parameters(described, f"{field}.parameters")
        classes, binary = (
            parameters.get("classification", 0),
            parameters.get("binary_data", is_binary),
        )
        if not _is_count(classes):
            raise mismatch(
                f"{classes!r:.80} was found, expected a number of classes",
                f"{field}.parameters.classification",
            )
        if not isinstance(binary, bool):
            raise mismatch(
                f"{binary!r:.80} was found, expected true or false",
                f"{field}.parameters.binary_data",
            )
        wanted.append(Wanted(name, binary, classes))
    return wanted


def _id(content: dict[str, Any]) -> str | None:
    found = content.get("id")
    if found is None or isinstance(found, str):
        return found or None
    raise mismatch(f"{found!r:.80} was found, expected text", "id")


def _parameters(content: dict[str, Any], field: str) -> dict[str, Any]:
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise mismatch("an object was expected", field)
    return parameters


def _object(content: Any, field: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise Refusal(
            "malformed_body",
            f"{field} is no JSON object",
            field=None if field == "the body" else field,
        )
    unknown = sorted(set(content) - known)
    if unknown:
        raise Refusal(
            "unknown_field",
            f"{field} has {unknown[0][:80]!r}, known: {', '.join(sorted(known))}",
            field=unknown[0][:80],
        )
    return content


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40
