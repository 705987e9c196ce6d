"""Between tensors and what `/predict` takes and answers: the protocol is another form of it, never another way to the model.

A model of images takes one tensor `image`: BYTES of encoded images (N,), or UINT8 pixels (N, height, width, channels) of any size,
which are resized as any picture is. A model of a table takes one tensor for each column, (N,) or (N, 1); a column that is left out, a
NaN and an empty text are missing values; a tensor for a column that training ignored is ignored.
The answer has `label` BYTES (N,), `probabilities` FP32 (N, labels) and `prediction_set` BOOL
(N, labels), or `value` FP32 (N, 1); and `outlier_score` FP32 (N,) and `is_outlier` BOOL (N,).
"""

import io
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.http.responses import Refusal
from serving.open_inference.messages import InferRequest, Wanted
from serving.open_inference.tensors import BYTES, Tensor, from_base64, mismatch
from serving.requests.decoding import INLINE_BYTES as INLINE_IMAGE_BYTES
from serving.requests.payload import Payload
from serving.requests.rows import INLINE_BYTES
from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.images import ImageContract

IMAGE = "image"
_NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "FP32", "FP64")
_COLUMN_DATATYPES = {
    "number": _NUMBERS,
    "boolean": ("BOOL",),
    "category": (BYTES,),
    "date": (BYTES,),
}
_COLUMN_DATATYPE = {"number": "FP64", "boolean": "BOOL", "category": BYTES, "date": BYTES}
_IMAGE_DIMENSIONS = 4
_INLINE_VALUES = 1000  # are written in about a millisecond
_VALUES_BESIDE = 4  # of each item, beside its labels: about what they cost


def describe(manifest: Bundle) -> dict[str, Any]:
    """`inputs` and `outputs` of the model's metadata."""
    contract, output = manifest.input, manifest.output
    if isinstance(contract, ColumnContract):
        inputs = [
            {"name": column.name, "datatype": _COLUMN_DATATYPE[column.kind], "shape": [-1]}
            for column in contract.columns
        ]
    else:
        inputs = [{"name": IMAGE, "datatype": BYTES, "shape": [-1]}]
    if output.kind == "value":
        outputs = [{"name": "value", "datatype": "FP32", "shape": [-1, 1]}]
    else:
        labels = len(output.labels)
        outputs = [
            {"name": "label", "datatype": BYTES, "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, labels]},
            {"name": "prediction_set", "datatype": "BOOL", "shape": [-1, labels]},
        ]
    strangeness = [
        {"name": "outlier_score", "datatype": "FP32", "shape": [-1]},
        {"name": "is_outlier", "datatype": "BOOL", "shape": [-1]},
    ]
    described = {"inputs": inputs, "outputs": [*outputs, *strangeness]}
    ignored = contract.ignored if isinstance(contract, ColumnContract) else []
    return described | (
        {"properties": {"ignored_inputs": json.dumps(ignored, ensure_ascii=False)}}
        if ignored
        else {}
    )


def is_quickly_read(num_bytes: int, head_length: int | None, manifest: Bundle) -> bool:
    """Whether the event loop can make a payload of a body between two requests; `head_length` bytes of it are JSON, or all of them.

    Images as bytes are only cut out of it. Of a table each value is looked at.
    """
    head = num_bytes if head_length is None else head_length
    return head <= INLINE_BYTES and num_bytes <= (
        INLINE_BYTES if manifest.input.kind == "columns" else INLINE_IMAGE_BYTES
    )


def is_quickly_written(answer: dict[str, Any], manifest: Bundle) -> bool:
    """Whether the event loop can make outputs of an answer of `/predict` between two requests."""
    return (
        len(answer.get("predictions", "1")) * (len(manifest.output.labels) + _VALUES_BESIDE)
        <= _INLINE_VALUES
    )


def as_payload(request: InferRequest, manifest: Bundle, max_items: int, max_rows: int) -> Payload:
    """What `/predict` would be asked; Refusal naming the tensor that the model does not take."""
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise mismatch("there are several tensors of this name, expected one", repeated[:80])
    if isinstance(manifest.input, ColumnContract):
        return Payload("columns", (_rows(request.inputs, manifest.input, max_rows),))
    if isinstance(manifest.input, ImageContract):
        return Payload("images", tuple(_images(request.inputs, manifest.input, max_items)))
    raise mismatch(
        f"this protocol carries no {manifest.input.kind}; send them to /predict", "inputs"
    )


def as_outputs(
    answer: dict[str, Any], request: InferRequest, manifest: Bundle
) -> list[tuple[Tensor, bool]]:
    """The outputs that were asked for, and of each whether it is sent as bytes; Refusal for one that there is not."""
    answers = answer.get("predictions", [answer])
    made = {tensor.name: tensor for tensor in _tensors(answers, manifest.output.labels)}
    if request.wanted is None:
        return [(tensor, request.is_binary) for tensor in made.values()]
    return [
        (_wanted(made, wanted, manifest.output.labels, position), wanted.is_binary)
        for position, wanted in enumerate(request.wanted)
    ]


def _wanted(made: dict[str, Tensor], wanted: Wanted, labels: list[str], position: int) -> Tensor:
    tensor = made.get(wanted.name)
    if tensor is None:
        message = f"there is no output {wanted.name[:80]!r}, this model has {', '.join(made)}"
        raise Refusal("unknown_field", message, field=f"outputs[{position}].name")
    if not wanted.num_classes:
        return tensor
    if wanted.name != "probabilities":
        raise mismatch(
            f"{wanted.name!r} has no classes, expected 'probabilities'",
            f"outputs[{position}].parameters.classification",
        )
    return _classified(tensor, labels, wanted.num_classes)


def _classified(probabilities: Tensor, labels: list[str], num_classes: int) -> Tensor:
    """Triton's form of the most probable classes: "probability:index:label"."""
    best = np.argsort(-probabilities.values, axis=1, kind="stable")[:, :num_classes]
    texts = np.empty(best.shape, object)
    for row, place in np.ndindex(*best.shape):
        index = best[row, place]
        texts[row, place] = f"{probabilities.values[row, index]:f}:{index}:{labels[index]}".encode()
    return Tensor(probabilities.name, BYTES, best.shape, texts)


def _tensors(answers: list[dict[str, Any]], labels: list[str]) -> list[Tensor]:
    count = len(answers)
    found = []
    if labels:
        probabilities, inside = (
            np.empty((count, len(labels)), np.float32),
            np.empty((count, len(labels)), bool),
        )
        for row, answer in enumerate(answers):
            probabilities[row] = [answer["probabilities"][label] for label in labels]
            likely = frozenset(
                answer["prediction_set"]
            )  # the list may have all of a thousand labels
            inside[row] = [label in likely for label in labels]
        chosen = np.empty(count, object)
        chosen[:] = [answer["label"].encode() for answer in answers]
        found += [Tensor("label", BYTES, (count,), chosen)]
        found += [
            Tensor("probabilities", "FP32", probabilities.shape, probabilities),
            Tensor("prediction_set", "BOOL", inside.shape, inside),
        ]
    else:
        found.append(
            Tensor(
                "value",
                "FP32",
                (count, 1),
                np.array([[answer["value"]] for answer in answers], np.float32),
            )
        )
    scores = np.array([answer["outlier_score"] for answer in answers], np.float32)
    outliers = np.array([answer["is_outlier"] for answer in answers], bool)
    return [
        *found,
        Tensor("outlier_score", "FP32", (count,), scores),
        Tensor("is_outlier", "BOOL", (count,), outliers),
    ]


# Images ---------------------------------------------------------------------------------------------------------------------------


def _images(inputs: list[Tensor], contract: ImageContract, max_items: int) -> list[bytes]:
    for tensor in inputs:
        if tensor.name != IMAGE:
            raise Refusal(
                "unknown_field",
                f"there is a tensor {tensor.name[:80]!r}, expected only {IMAGE!r}",
                field=tensor.name[:80],
            )
    tensor = inputs[0]
    count = tensor.shape[0] if tensor.shape else 0
    _require_count(count, max_items, "SLIPWAY_MAX_ITEMS")
    if tensor.datatype == BYTES:
        if math.prod(tensor.shape) != count:
            raise mismatch(f"its shape is {list(tensor.shape)}, expected [images]", IMAGE)
        elements = tensor.values.ravel().tolist()
        return (
            [
                from_base64(element, f"{IMAGE}[{position}]")
                for position, element in enumerate(elements)
            ]
            if tensor.is_text
            else elements
        )
    if (
        tensor.datatype != "UINT8"
        or len(tensor.shape) != _IMAGE_DIMENSIONS
        or tensor.shape[3] != contract.channels
        or 0 in tensor.shape
    ):
        expected = f"BYTES of encoded images, or UINT8 of shape [images, height, width, {contract.channels}]"
        raise mismatch(
            f"{tensor.datatype} of shape {list(tensor.shape)} was found, expected {expected}", IMAGE
        )
    return [_bitmap(pixels) for pixels in tensor.values]


def _bitmap(pixels: NDArray[np.uint8]) -> bytes:
    """(height, width, channels) uint8 as a BMP: nothing is lost, and next to nothing spent."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)).save(
        buffer, "BMP"
    )
    return buffer.getvalue()


# Rows -----------------------------------------------------------------------------------------------------------------------------


def _rows(inputs: list[Tensor], contract: ColumnContract, max_rows: int) -> bytes:
    """JSON rows, as `/predict` takes them."""
    columns = {column.name: column for column in contract.columns}
    first = next((tensor for tensor in inputs if tensor.name in columns), inputs[0])
    count = first.shape[0] if first.shape else 0
    _require_count(count, max_rows, "SLIPWAY_MAX_ROWS")
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for tensor in inputs:
        column = columns.get(tensor.name)
        if column is None and tensor.name in contract.accepted:
            continue
        if column is None:
            message = f"there is no column {tensor.name[:80]!r}; /v2/models/slipway lists them"
            raise Refusal("unknown_column", message, field=tensor.name[:80])
        for row, value in zip(rows, _cells(tensor, column, count), strict=True):
            row[tensor.name] = value
    # Row by row: while the encoder is at work, no other thread is.
    return f'{{"rows": [{", ".join(json.dumps(row, allow_nan=False, ensure_ascii=False) for row in rows)}]}}'.encode()


def _cells(tensor: Tensor, column: Column, count: int) -> list[Any]:
    expected = _COLUMN_DATATYPES[column.kind]
    if tensor.datatype not in expected:
        raise mismatch(
            f"{tensor.datatype} was found, a {column.kind} is {' or '.join(expected)}", tensor.name
        )
    if tensor.shape not in ((count,), (count, 1)):
        raise mismatch(
            f"its shape is {list(tensor.shape)}, expected [{count}] as for the first column, or [{count}, 1]",
            tensor.name,
        )
    return [
        _cell(value, tensor.name, position)
        for position, value in enumerate(tensor.values.ravel().tolist())
    ]


def _cell(value: Any, name: str, position: int) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise mismatch("it is no UTF-8", f"{name}[{position}]") from None
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None  # a tensor has no other way to say that a value is missing; a column that needs one refuses it
        raise Refusal(
            "out_of_range",
            f"{name}[{position}]: an infinity was found, expected a number",
            field=f"{name}[{position}]",
        )
    return value


def _require_count(count: int, most: int, setting: str) -> None:
    if not count:
        raise Refusal(
            "no_rows",
            "the first dimension is 0, expected at least one row",
            field="inputs[0].shape",
        )
    if count > most:
        message = f"there are {count} rows in one request, the limit is {most}; send fewer in each request ({setting})"
        raise Refusal("too_many_rows", message, field="inputs[0].shape")
