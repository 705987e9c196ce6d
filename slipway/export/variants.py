"""Smaller and faster graphs from the fp32 one: fp16, int8 for the CPU and int8 for TensorRT.

Precision lives in the graph, so that no runtime has to be told to lower it. How much accuracy a
variant may cost is `verify`'s to judge; here one that is broken is refused: weights or activations
beyond fp16's range, answers that are not finite, or that have nothing to do with fp32's.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from slipway import files
from slipway.bundle import OutputContract, Precision, Target
from slipway.calibration import Answers
from slipway.columns import ColumnContract
from slipway.data.packed import Inputs, PackedSplit
from slipway.data.randomness import uniform
from slipway.errors import ParityError
from slipway.export.half_precision import LAYERS, kept_in_fp32, score_branch, to_half
from slipway.input_contract import InputContract
from slipway.preprocess import image_array
from slipway.runtime import Runner

PRECISION: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "int8": "int8", "int8_tensorrt": "int8"}
MEANT_FOR: dict[str, list[Target]] = {
    "fp32": ["cpu", "cuda", "tensorrt"],
    "fp16": ["cuda", "tensorrt"],
    "int8": ["cpu"],
    "int8_tensorrt": ["tensorrt"],
}
LARGEST_FP16 = 65504.0  # IEEE 754 binary16
_BATCH_SIZE = 64


def calibration_rows(split: PackedSplit, contract: InputContract, seed: int, num_rows: int) -> NDArray[Any]:
    """(rows, ...) as `contract` says: `num_rows` training rows, or all there are; which ones depends on seed and ids only.

    Training images may be stored larger than the network's input: they are brought to its size as any image is.
    """
    draw = uniform(seed, 0, split.keys, "calibration")
    chosen = np.lexsort((split.keys, draw))[:num_rows]
    rows: NDArray[Any] = split.inputs[np.sort(chosen)]
    if isinstance(contract, ColumnContract) or rows.shape[1:] == contract.shape:
        return rows
    return np.stack([image_array(Image.fromarray(row[..., 0] if contract.channels == 1 else row), contract) for row in rows])


def fp16_graph(fp32: bytes, rows: NDArray[Any]) -> bytes:
    """fp16 from the first layer to the last; input and output stay as they are. ParityError where fp16's range is too small."""
    model = onnx.load_model_from_string(fp32)
    kept = kept_in_fp32(model.graph)
    _refuse_overflow(model, kept, largest_activations(fp32, rows))
    graph: bytes = to_half(model, kept).SerializeToString()
    return graph


def int8_graph(fp32: bytes, rows: NDArray[Any], scratch: Path) -> bytes:
    """int8 for the CPU: unsigned activations, a scale per weight channel, ranges measured on `rows`."""
    from onnxruntime.quantization import QuantType

    return _quantize(fp32, rows, scratch, activation_type=QuantType.QUInt8, extra_options={})


def int8_tensorrt_graph(fp32: bytes, rows: NDArray[Any], scratch: Path) -> bytes:
    """int8 for TensorRT, which takes symmetric scales only and refuses quantized biases."""
    from onnxruntime.quantization import QuantType

    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    return _quantize(fp32, rows, scratch, activation_type=QuantType.QInt8, extra_options=options)


def make_variant(variant: str, fp32: bytes, rows: NDArray[Any], scratch: Path) -> bytes:
    """The graph of `variant`; `rows` are the calibration rows, `scratch` a folder for the quantizer's own files."""
    makers: dict[str, Callable[[], bytes]] = {
        "fp32": lambda: fp32,
        "fp16": lambda: fp16_graph(fp32, rows),
        "int8": lambda: int8_graph(fp32, rows, scratch),
        "int8_tensorrt": lambda: int8_tensorrt_graph(fp32, rows, scratch),
    }
    return makers[variant]()


def largest_activations(graph: bytes, rows: NDArray[Any]) -> dict[str, float]:
    """The largest absolute value of every float tensor inside the graph over `rows`, by tensor name."""
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(graph))
    names = [value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    probes = [f"{name}/largest" for name in names]
    for name, probe in zip(names, probes, strict=True):
        magnitude = f"{name}/magnitude"
        model.graph.node.append(onnx.helper.make_node("Abs", [name], [magnitude]))
        model.graph.node.append(onnx.helper.make_node("ReduceMax", [magnitude], [probe], keepdims=0))
        model.graph.output.append(onnx.helper.make_tensor_value_info(probe, onnx.TensorProto.FLOAT, []))
    found = _run_probes(model.SerializeToString(), probes, rows)
    return dict(zip(names, found.tolist(), strict=True))


def refuse_broken(variant: str, runner: Runner, reference: Answers, rows: Inputs, output: OutputContract) -> float:
    """The largest difference between a variant's answers and fp32's on `rows`; ParityError if the variant is broken.

    Broken: a number that is not finite, probabilities that do not sum to 1, fewer than half of the
    labels kept, or values further from fp32's than those spread among themselves.
    """
    found, scores = run_in_batches(runner, rows, _BATCH_SIZE)
    expected = reference.outputs
    num_wrong = sum(int((~np.isfinite(numbers)).sum()) for numbers in (found, scores))
    if num_wrong:
        raise ParityError(f"the {variant} graph answers {num_wrong} numbers that are not finite. {_advice(variant)}")
    difference = np.abs(found - expected)
    if output.kind == "probabilities":
        kept = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
        if kept < 0.5 or float(np.abs(found.sum(axis=1) - 1).max()) > 0.01:
            raise ParityError(f"the {variant} graph keeps {kept:.1%} of fp32's labels, expected nearly all. {_advice(variant)}")
    elif float(np.sqrt((difference**2).mean())) > max(float(expected.std()), 1e-6):
        raise ParityError(f"the {variant} graph is off by {difference.max():.3g}, more than fp32's answers spread. {_advice(variant)}")
    return float(difference.max())


def run_in_batches(runner: Runner, rows: Inputs, batch_size: int) -> Answers:
    """All rows through the runner, in order."""
    outputs, scores = zip(*(runner.run(batch) for batch in _batches(rows, batch_size)), strict=True)
    return Answers(np.concatenate(outputs), np.concatenate(scores))


def _refuse_overflow(model: onnx.ModelProto, kept: set[str], activations: dict[str, float]) -> None:
    weights = {
        tensor.name: float(np.abs(onnx.numpy_helper.to_array(tensor)).max(initial=0.0))
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    halved = {name for node in model.graph.node if node.output[0] not in kept for name in [*node.input, *node.output]}
    # ONNX Runtime computes fp16 graphs in fp32 on the CPU, so only the ranges show what a GPU would overflow.
    beyond = {name: value for name, value in {**weights, **activations}.items() if name in halved and not value <= LARGEST_FP16}
    if beyond:
        found = ", ".join(f"{name} reaches {value:.3g}" for name, value in beyond.items())
        raise ParityError(f"fp16 holds numbers up to {LARGEST_FP16:g}, but {found}. Take 'fp16' out of export.variants, or train again.")


def _run_probes(graph: bytes, probes: list[str], rows: NDArray[Any]) -> NDArray[np.float32]:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [session.run(probes, {name: batch}) for batch in _batches(rows, _largest_batch(graph))]
    # A NaN must come through, so `maximum`, not `fmax`.
    largest: NDArray[np.float32] = np.maximum.reduce(np.array(batches, dtype=np.float32).reshape(len(batches), len(probes)))
    return largest


def _quantize(fp32: bytes, rows: NDArray[Any], scratch: Path, *, activation_type: object, extra_options: dict[str, bool]) -> bytes:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared, target = (scratch / f"{name}.onnx" for name in ("source", "prepared", "quantized"))
    files.write_bytes(source, fp32)
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        target,
        _calibration_reader(rows, fp32),
        quant_format=QuantFormat.QDQ,
        activation_type=activation_type,
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=LAYERS,
        nodes_to_exclude=_stacked_layers(prepared) + _score_nodes(prepared),
        calibrate_method=CalibrationMethod.MinMax,
        extra_options=extra_options,
    )
    return target.read_bytes()


def _stacked_layers(path: Path) -> list[str]:
    """Names of the layers with a matrix for each column or submodel. ONNX Runtime has no scale per channel for these; they are small."""
    graph = onnx.load(path).graph
    stacked = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and not stacked.isdisjoint(node.input)]


def _score_nodes(path: Path) -> list[str]:
    """Names of what only the outlier score needs: a distance from rounded features would be one of the rounding."""
    graph = onnx.load(path).graph
    alone = score_branch(graph)
    return [node.name for node in graph.node if node.output[0] in alone]


def _calibration_reader(rows: NDArray[Any], graph: bytes) -> object:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is untyped
        def __init__(self) -> None:
            self._name = onnx.load_model_from_string(graph).graph.input[0].name
            self._batches = _batches(rows, _largest_batch(graph))

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            batch = next(self._batches, None)
            return None if batch is None else {self._name: batch}

    return Reader()


def _largest_batch(graph: bytes) -> int:
    """1 for a graph whose batch is fixed at 1."""
    fixed: int = onnx.load_model_from_string(graph).graph.input[0].type.tensor_type.shape.dim[0].dim_value
    return fixed or _BATCH_SIZE


def _batches(rows: Inputs, batch_size: int) -> Iterator[NDArray[Any]]:
    return (np.ascontiguousarray(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size))


def _advice(variant: str) -> str:
    if variant == "fp16":
        return "Take 'fp16' out of export.variants, or train again."
    return f"Raise export.calibration_rows, or take {variant!r} out of export.variants."
