"""Parses and encodes one named tensor of a request or a response, as JSON or as bytes."""

import base64
import binascii
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.serving.http.responses import Refusal

NUMPY = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_BOUNDS: dict[str, tuple[float, float]] = {
    "UINT8": (0, 2**8 - 1),
    "INT8": (-(2**7), 2**7 - 1),
    "INT16": (-(2**15), 2**15 - 1),
    "INT32": (-(2**31), 2**31 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "FP32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "FP64": (-1.7976931348623157e308, 1.7976931348623157e308),
}
BYTES = "BYTES"  # each element is preceded by its length in 4 bytes, little-endian
DATATYPES = (*NUMPY, BYTES)
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class Tensor:
    """A named tensor. The dtype of `values` follows from `datatype`; for BYTES it is object."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any]
    is_text: bool = False  # came as JSON, which cannot hold bytes


def mismatch(message: str, field: str) -> Refusal:
    """Return the refusal of a tensor that contradicts its own description or the model's."""
    return Refusal("tensor_mismatch", f"{field}: {message}", field=field)


def from_bytes(
    name: str, datatype: str, shape: tuple[int, ...], payload: memoryview, field: str
) -> Tensor:
    """Parse elements in C order. Raises Refusal if their number does not match the shape."""
    count = math.prod(shape)
    if datatype == BYTES:
        elements = list(_elements(payload, count, field))
        if len(elements) != count:
            raise mismatch(
                f"{len(elements)} elements were found, its shape {list(shape)} says {count}", field
            )
        # Allocated only now: a large shape without its elements must cost nothing.
        values = np.empty(count, object)
        values[:] = elements
        return Tensor(name, datatype, shape, values.reshape(shape))
    expected = count * NUMPY[datatype].itemsize
    if len(payload) != expected:
        raise mismatch(
            f"{len(payload)} bytes were found, {datatype} of shape {list(shape)} has {expected}",
            field,
        )
    if datatype == "BOOL" and (np.frombuffer(payload, np.uint8) > 1).any():
        raise mismatch("a byte of BOOL is neither 0 nor 1", field)
    return Tensor(name, datatype, shape, np.frombuffer(payload, NUMPY[datatype]).reshape(shape))


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any, field: str) -> Tensor:
    """Parse a nested or flat list. Raises Refusal if it does not match the datatype or shape."""
    flat = list(_flattened(data))
    count = math.prod(shape)
    if len(flat) != count:
        raise mismatch(
            f"{len(flat)} values were found, its shape {list(shape)} says {count}", f"{field}.data"
        )
    values = np.empty(count, object if datatype == BYTES else NUMPY[datatype])
    for position, value in enumerate(flat):
        if not _is_of(value, datatype):
            raise mismatch(f"{value!r:.80} is not {datatype}", f"{field}.data[{position}]")
        values[position] = value.encode() if datatype == BYTES else value
    return Tensor(name, datatype, shape, values.reshape(shape), is_text=True)


def to_json(tensor: Tensor) -> list[Any]:
    """Return the values as a flat list, BYTES decoded from UTF-8."""
    values: list[Any] = tensor.values.ravel().tolist()
    return [element.decode() for element in values] if tensor.datatype == BYTES else values


def to_bytes(tensor: Tensor) -> bytes:
    """Return the values as bytes of the protocol, in C order."""
    if tensor.datatype == BYTES:
        return b"".join(
            len(element).to_bytes(_LENGTH_BYTES, "little") + element
            for element in tensor.values.ravel().tolist()
        )
    return np.ascontiguousarray(tensor.values, NUMPY[tensor.datatype]).tobytes()


def from_base64(element: bytes, field: str) -> bytes:
    """Decode the base64 of an image in a JSON tensor. Raises Refusal if it is invalid."""
    try:
        return base64.b64decode(element, validate=True)
    except binascii.Error as error:
        raise mismatch(
            f"it is not base64 ({error}); in JSON, send an image as base64, or as a binary tensor",
            field,
        ) from None


def _elements(payload: memoryview, count: int, field: str) -> Iterator[bytes]:
    begin = 0
    while begin < len(payload):
        length = int.from_bytes(payload[begin : begin + _LENGTH_BYTES], "little")
        begin += _LENGTH_BYTES
        if begin + length > len(payload):
            raise mismatch(
                f"an element states a length of {length} bytes, but fewer follow it", field
            )
        if not count:
            raise mismatch("there are more elements than its shape says", field)
        yield bytes(payload[begin : begin + length])
        begin, count = begin + length, count - 1


def _flattened(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        for part in data:
            yield from _flattened(part)
    else:
        yield data


def _is_of(value: Any, datatype: str) -> bool:
    if datatype == BYTES:
        return isinstance(value, str)
    if datatype == "BOOL":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    low, high = _BOUNDS[datatype]
    return low <= value <= high and (datatype.startswith("FP") or isinstance(value, int))
