"""Converts tensors to the payload of `/predict`, and its response to tensors.

The protocol is another format of the same requests: every request is handled like `/predict`. N is
the number of images, rows or texts of a request.

Inputs:
* Image model: one tensor `image`, BYTES of encoded images (N,), or UINT8 pixels (N, height, width,
  channels) of any size, which are resized like other images.
* Table model: one tensor per column, (N,) or (N, 1). Omitted columns, NaN and empty texts are
  missing values. Tensors of columns that training ignored are ignored.
* Text model: one BYTES tensor per text column, (N,) or (N, 1).

Outputs:
* Classification: `label` BYTES (N,), `probabilities` FP32 (N, labels) and `prediction_set` BOOL
  (N, labels).
* Regression: `value` FP32 (N, 1).
* All: `ood_score` FP32 (N,) and `is_ood` BOOL (N,).
* With costs in `evaluate.decision`: `expected_cost` FP32 (N,), and `abstain` BOOL (N,) if rows may
  be left to a person.
"""

import io
import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.bundle import Bundle
from slipway.inputs.columns import ColumnContract
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.kinds.registry import input_kind
from slipway.serving.http.responses import Refusal
from slipway.serving.open_inference.messages import InferRequest, RequestedOutput
from slipway.serving.open_inference.tensors import BYTES, NUMPY, Tensor, from_base64, mismatch
from slipway.serving.requests.decoding import INLINE_BYTES as INLINE_IMAGE_BYTES
from slipway.serving.requests.payload import Payload
from slipway.serving.requests.rows import INLINE_BYTES

IMAGE = "image"
_NUMBERS = ("FP64", "FP32", "INT8", "INT16", "INT32", "INT64", "UINT8")
# The accepted datatypes; the metadata names the first.
_COLUMN_DATATYPES = {
    "number": _NUMBERS,
    "boolean": ("BOOL",),
    "category": (BYTES,),
    "date": (BYTES,),
    "text": (BYTES,),
}
_CONFIG_TYPES = {BYTES: "STRING"}  # other types have the same name
_COST_DATATYPES = {"expected_cost": "FP32", "abstain": "BOOL"}
_IMAGE_DIMENSIONS = 4
_INLINE_VALUES = 1000  # so many values take about a millisecond to write
_VALUES_BESIDE = 4  # the cost of an item's other outputs, in values


def describe(manifest: Bundle) -> dict[str, Any]:
    """Return the names, datatypes and shapes of the model's `inputs` and `outputs`, as metadata."""
    contract, output = manifest.input, manifest.output
    describe_inputs: Callable[[InputContract], list[dict[str, Any]]]
    describe_inputs = input_kind(contract.kind).load_part("describe_tensors")
    ignored = contract.ignored if isinstance(contract, (ColumnContract, TextContract)) else []
    num_labels = len(output.labels)
    outputs = {
        "value": [_described("value", "FP32", 1)],
        "probabilities": [_described("label", BYTES)],
        "label_probabilities": [_described("labels", "BOOL", num_labels)],
    }[output.kind]
    if output.labels:
        outputs += [
            _described("probabilities", "FP32", num_labels),
            _described("prediction_set", "BOOL", num_labels),
        ]
    outputs += [_described("ood_score", "FP32"), _described("is_ood", "BOOL")]
    if (decision := manifest.calibration.decision) and decision.costs:
        names = ["expected_cost"] + ["abstain"] * (decision.costs.abstain is not None)
        outputs += [_described(name, _COST_DATATYPES[name]) for name in names]
    outputs += [_described(name, "BOOL") for name in contract.remark_names]
    described: dict[str, Any] = {"inputs": describe_inputs(contract), "outputs": outputs}
    if ignored:
        described["properties"] = {"ignored_inputs": json.dumps(ignored, ensure_ascii=False)}
    return described


def configure(manifest: Bundle) -> dict[str, Any]:
    """Return the inputs and outputs as Triton's model configuration has them.

    The first dimension of each shape is the batch.
    """

    def converted(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor["name"],
                "data_type": f"TYPE_{_CONFIG_TYPES.get(tensor['datatype'], tensor['datatype'])}",
                "dims": tensor["shape"],
            }
            for tensor in tensors
        ]

    described = describe(manifest)
    return {
        "max_batch_size": 0,
        "input": converted(described["inputs"]),
        "output": converted(described["outputs"]),
    }


def _described(name: str, datatype: str, *sizes: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, *sizes]}


def is_quickly_read(num_bytes: int, head_length: int | None, manifest: Bundle) -> bool:
    """Return True if the event loop can convert a body without delaying other requests.

    The first `head_length` bytes are JSON; None: the whole body. Images as bytes are only sliced,
    while every value of a table is converted.
    """
    head = num_bytes if head_length is None else head_length
    most = INLINE_IMAGE_BYTES if input_kind(manifest.input.kind).takes_files else INLINE_BYTES
    return head <= INLINE_BYTES and num_bytes <= most


def is_quickly_written(answer: dict[str, Any], manifest: Bundle) -> bool:
    """Return True if the event loop can convert a response without delaying other requests."""
    num_items = len(answer.get("predictions", "1"))
    return num_items * (len(manifest.output.labels) + _VALUES_BESIDE) <= _INLINE_VALUES


def as_payload(request: InferRequest, manifest: Bundle, max_items: int, max_rows: int) -> Payload:
    """Convert a request to the payload of `/predict`. Raises Refusal for an invalid tensor."""
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise mismatch("there are several tensors of this name, expected one", repeated[:80])
    contract = manifest.input
    read: Callable[[list[Tensor], InputContract, int, int], tuple[bytes, ...]]
    read = input_kind(contract.kind).load_part("read_tensors")
    return Payload(contract.kind, read(request.inputs, contract, max_items, max_rows))


def as_outputs(
    answer: dict[str, Any], request: InferRequest, manifest: Bundle
) -> list[tuple[Tensor, bool]]:
    """Convert a response of `/predict` to the outputs that a request names.

    Each is a tensor, with True if it is sent as bytes. Raises Refusal for an unknown output.
    """
    labels = manifest.output.labels
    remarks = manifest.input.remark_names
    tensors = {tensor.name: tensor for tensor in _tensors(answer, labels, remarks)}
    if request.outputs is None:
        return [(tensor, request.is_binary) for tensor in tensors.values()]
    return [
        (_requested(tensors, output, labels, position), output.is_binary)
        for position, output in enumerate(request.outputs)
    ]


def _requested(
    tensors: dict[str, Tensor], output: RequestedOutput, labels: list[str], position: int
) -> Tensor:
    tensor = tensors.get(output.name)
    if tensor is None:
        raise Refusal(
            "unknown_field",
            f"there is no output {output.name[:80]!r}, this model has {', '.join(tensors)}",
            field=f"outputs[{position}].name",
        )
    if not output.num_classes:
        return tensor
    if output.name != "probabilities":
        raise mismatch(
            f"{output.name!r} cannot be ranked by class, expected 'probabilities'; leave this out",
            f"outputs[{position}].parameters.classification",
        )
    return _classified(tensor, labels, output.num_classes)


def _classified(probabilities: Tensor, labels: list[str], num_classes: int) -> Tensor:
    """Return the most probable classes in Triton's format, "probability:index:label"."""
    best = np.argsort(-probabilities.values, axis=1, kind="stable")[:, :num_classes]
    texts = np.empty(best.shape, object)
    for row, place in np.ndindex(*best.shape):
        index = best[row, place]
        texts[row, place] = f"{probabilities.values[row, index]:f}:{index}:{labels[index]}".encode()
    return Tensor(probabilities.name, BYTES, best.shape, texts)


def _tensors(answer: dict[str, Any], labels: list[str], remarks: Sequence[str]) -> list[Tensor]:
    answers = answer.get("predictions", [answer])
    count = len(answers)
    tensors = _label_tensors(answers, labels) if labels else [_column(answers, "value", (count, 1))]
    return [
        *tensors,
        _column(answers, "ood_score", (count,)),
        _column(answers, "is_ood", (count,), "BOOL"),
        *(
            _column(answers, name, (count,), datatype)
            for name, datatype in _COST_DATATYPES.items()
            if name in answers[0]
        ),
        *(_column(answers, name, (count,), "BOOL") for name in remarks),
    ]


def _column(
    answers: list[dict[str, Any]], name: str, shape: tuple[int, ...], datatype: str = "FP32"
) -> Tensor:
    values = np.array([answer[name] for answer in answers], NUMPY[datatype])
    return Tensor(name, datatype, shape, values.reshape(shape))


def _label_tensors(answers: list[dict[str, Any]], labels: list[str]) -> list[Tensor]:
    shape = (len(answers), len(labels))
    probabilities, inside = np.empty(shape, np.float32), np.empty(shape, bool)
    for row, answer in enumerate(answers):
        probabilities[row] = [answer["probabilities"][label] for label in labels]
        likely = frozenset(answer["prediction_set"])  # it may hold a thousand labels
        inside[row] = [label in likely for label in labels]
    return [
        _named_labels(answers, labels),
        Tensor("probabilities", "FP32", shape, probabilities),
        Tensor("prediction_set", "BOOL", shape, inside),
    ]


def _named_labels(answers: list[dict[str, Any]], labels: list[str]) -> Tensor:
    """Return the tensor of predicted labels.

    It is `label` BYTES (N,); for a multi-label model, `labels` BOOL (N, labels), True for each
    predicted label.
    """
    if "labels" not in answers[0]:
        chosen = np.empty(len(answers), object)
        chosen[:] = [answer["label"].encode() for answer in answers]
        return Tensor("label", BYTES, chosen.shape, chosen)
    given = [[label in own for label in labels] for own in (set(a["labels"]) for a in answers)]
    return Tensor("labels", "BOOL", (len(answers), len(labels)), np.array(given, bool))


def describe_image(contract: ImageContract) -> list[dict[str, Any]]:
    """Return the description of `image`, the only input tensor of an image model."""
    return [_described(IMAGE, BYTES)]


def read_images(
    inputs: list[Tensor], contract: ImageContract, max_items: int, max_rows: int
) -> tuple[bytes, ...]:
    for tensor in inputs:
        if tensor.name != IMAGE:
            name = tensor.name[:80]
            raise Refusal(
                "unknown_field", f"there is a tensor {name!r}, expected only {IMAGE!r}", field=name
            )
    tensor = inputs[0]
    shape, datatype = tensor.shape, tensor.datatype
    count = _count(tensor, max_items, "SLIPWAY_MAX_ITEMS")
    if datatype == BYTES:
        if math.prod(shape) != count:
            raise mismatch(f"its shape is {list(shape)}, expected [images]", IMAGE)
        elements: list[bytes] = tensor.values.ravel().tolist()
        if not tensor.is_text:
            return tuple(elements)
        return tuple(
            from_base64(element, f"{IMAGE}[{position}]")
            for position, element in enumerate(elements)
        )
    is_image = len(shape) == _IMAGE_DIMENSIONS and shape[3] == contract.channels and 0 not in shape
    if datatype != "UINT8" or not is_image:
        raise mismatch(
            f"{datatype} of shape {list(shape)} was found, expected BYTES of encoded images, or "
            f"UINT8 of shape [images, height, width, {contract.channels}]",
            IMAGE,
        )
    return tuple(map(_bitmap, tensor.values))


def _bitmap(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels (height, width, channels) uint8 as BMP, which is lossless and fast."""
    image = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "BMP")
    return buffer.getvalue()


def describe_columns(contract: ColumnContract) -> list[dict[str, Any]]:
    """Return the description of the input tensors, one for each column."""
    return [
        _described(column.name, _COLUMN_DATATYPES[column.kind][0]) for column in contract.columns
    ]


def read_columns(
    inputs: list[Tensor], contract: ColumnContract, max_items: int, max_rows: int
) -> tuple[bytes, ...]:
    """Convert tensors to the JSON rows of `/predict`."""
    kinds = {column.name: column.kind for column in contract.columns}
    return _json_rows(inputs, kinds, contract.accepted, max_rows)


def describe_texts(contract: TextContract) -> list[dict[str, Any]]:
    """Return the description of the input tensors, one for each column."""
    return [_described(name, BYTES) for name in contract.columns]


def read_texts(
    inputs: list[Tensor], contract: TextContract, max_items: int, max_rows: int
) -> tuple[bytes, ...]:
    """Convert tensors to the JSON texts of `/predict`."""
    return _json_rows(inputs, dict.fromkeys(contract.columns, "text"), contract.accepted, max_rows)


def _json_rows(
    inputs: list[Tensor], columns: Mapping[str, str], accepted: Container[str], max_rows: int
) -> tuple[bytes, ...]:
    """Convert tensors to JSON rows. `columns` maps names of columns to their kinds."""
    first = next((tensor for tensor in inputs if tensor.name in columns), inputs[0])
    count = _count(first, max_rows, "SLIPWAY_MAX_ROWS")
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for tensor in inputs:
        kind = columns.get(tensor.name)
        if kind is None and tensor.name in accepted:
            continue
        if kind is None:
            name = tensor.name[:80]
            raise Refusal(
                "unknown_column",
                f"there is no column {name!r}; /v2/models/slipway lists them",
                field=name,
            )
        for row, value in zip(rows, _cells(tensor, kind, count), strict=True):
            row[tensor.name] = value
    # Row by row, because the encoder holds the GIL for each call.
    texts = (json.dumps(row, allow_nan=False, ensure_ascii=False) for row in rows)
    return (f'{{"rows": [{", ".join(texts)}]}}'.encode(),)


def _cells(tensor: Tensor, kind: str, count: int) -> list[Any]:
    expected = _COLUMN_DATATYPES[kind]
    if tensor.datatype not in expected:
        raise mismatch(
            f"its datatype is {tensor.datatype}, expected {' or '.join(expected)} for a {kind}",
            tensor.name,
        )
    if tensor.shape not in ((count,), (count, 1)):
        raise mismatch(
            f"its shape is {list(tensor.shape)}, expected [{count}] as for the first column, "
            f"or [{count}, 1]",
            tensor.name,
        )
    return [
        _cell(value, f"{tensor.name}[{position}]")
        for position, value in enumerate(tensor.values.ravel().tolist())
    ]


def _cell(value: Any, field: str) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise mismatch("it is not UTF-8", field) from None
    if isinstance(value, float) and math.isnan(value):
        return None  # the only way to send a missing value; a required column refuses it
    if isinstance(value, float) and math.isinf(value):
        raise Refusal(
            "out_of_range", f"{field}: an infinity was found, expected a number", field=field
        )
    return value


def _count(tensor: Tensor, most: int, setting: str) -> int:
    """Return a tensor's number of rows. Raises Refusal if it is 0 or above `most`."""
    count = tensor.shape[0] if tensor.shape else 0
    if not count:
        raise Refusal(
            "no_rows",
            "the first dimension is 0, expected at least one row",
            field="inputs[0].shape",
        )
    if count > most:
        raise Refusal(
            "too_many_rows",
            f"there are {count} rows in one request, the limit is {most}; "
            f"send fewer in each request ({setting})",
            field="inputs[0].shape",
        )
    return count
