"""Converts gRPC messages of the Open Inference Protocol to HTTP requests, and responses back.

gRPC and HTTP send tensors as the same bytes, so only names, shapes and datatypes are converted.
https://github.com/kserve/open-inference-protocol
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from slipway.serving.http.responses import Refusal

# For each datatype: the field of InferTensorContents with its values, and their dtype as bytes.
_CONTENTS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "<i1"),
    "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    "BYTES": ("bytes_contents", ""),
}


def parse(content: bytes, kind: type[Message]) -> Any:
    """Parse a message. Raises Refusal if the bytes are not a message of this kind."""
    try:
        return kind.FromString(content)
    except (DecodeError, UnicodeDecodeError):
        name = kind.DESCRIPTOR.name
        raise Refusal("malformed_body", f"the message is not a {name}, expected one") from None


def http_body(request: service_pb2.ModelInferRequest) -> tuple[bytes, int]:
    """Return the HTTP body for an inference request, and the number of its bytes that are JSON.

    Raises Refusal if the number of tensors' contents is not the number of inputs, or if a tensor's
    values do not fit its datatype. The HTTP endpoint checks everything else.
    """
    contents = list(request.raw_input_contents) or [_as_bytes(one) for one in request.inputs]
    if len(contents) != len(request.inputs):
        raise Refusal(
            "tensor_mismatch",
            f"{len(contents)} contents were found, expected {len(request.inputs)}, one per input",
            field="raw_input_contents",
        )
    if request.raw_input_contents and any(one.HasField("contents") for one in request.inputs):
        raise Refusal(
            "tensor_mismatch",
            "there are raw_input_contents too, expected values in one of these fields",
            field="inputs.contents",
        )
    head: dict[str, Any] = {
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(values)},
            }
            for tensor, values in zip(request.inputs, contents, strict=True)
        ],
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [
            {
                "name": output.name,
                "parameters": {**_parameters(output.parameters), "binary_data": True},
            }
            for output in request.outputs
        ]
    encoded = json.dumps(head).encode()
    return b"".join([encoded, *contents]), len(encoded)


def _as_bytes(tensor: Any) -> bytes:
    """Pack the typed values of a tensor into bytes, as in `raw_input_contents`."""
    if tensor.datatype not in _CONTENTS:
        return b""  # refused with the datatype
    field, dtype = _CONTENTS[tensor.datatype]
    others = [found.name for found, _ in tensor.contents.ListFields() if found.name != field]
    if others:
        raise Refusal(
            "tensor_mismatch",
            f"it has {others[0]}, expected {field} for {tensor.datatype}",
            field=tensor.name[:80],
        )
    values = getattr(tensor.contents, field)
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    try:
        return np.array(list(values), dtype).tobytes()
    except OverflowError:
        raise Refusal(
            "tensor_mismatch", f"a value is outside {tensor.datatype}", field=tensor.name[:80]
        ) from None


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in given.items()}
    return {name: getattr(given[name], field) if field else None for name, field in chosen.items()}


def infer_response(body: bytes, head_length: int) -> service_pb2.ModelInferResponse:
    """Build the gRPC response from an HTTP response: JSON, then the bytes of the tensors."""
    head = json.loads(body[:head_length])
    response = service_pb2.ModelInferResponse(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id", "")
    )
    begin = head_length
    for output in head["outputs"]:
        response.outputs.add(
            name=output["name"], datatype=output["datatype"], shape=output["shape"]
        )
        end = begin + output["parameters"]["binary_data_size"]
        response.raw_output_contents.append(body[begin:end])
        begin = end
    return response


def described(content: Any, kind: type[Message]) -> Message:
    """Build a message of class `kind` from JSON. Ignores fields that the message lacks."""
    message: Message = json_format.ParseDict(content, kind(), ignore_unknown_fields=True)
    return message
