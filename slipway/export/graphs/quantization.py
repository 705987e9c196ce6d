"""int8 graphs: static, with ranges measured on calibration rows, and dynamic, with a range of its own for every row.

Static ones exist for the CPU and for TensorRT, which take different graphs. A dynamic one never lets a row's answer depend on the
rows beside it, as ONNX Runtime's own does, whose range is of the whole batch: behind a service that is a stranger's row.
"""

import contextlib
import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
from numpy.typing import NDArray

from slipway.export.graphs.half_precision import LAYERS, between_layers, score_branch
from slipway.runtimes.cpu_int8 import weight_bits
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system import files

Calibrator = Literal["minmax", "percentile", "entropy"]
CALIBRATORS: tuple[Calibrator, ...] = get_args(Calibrator)
FEWEST_DYNAMIC_WEIGHTS = (
    0.1  # share of all layers' weights; below it neither size nor speed gains anything to speak of
)
_JOINTS = [
    "Add",
    "Relu",
]  # between convolutions: in fp32 each is a way out of int8 and back, a third of resnet18's time on a CPU
_NO_MAPS = ("MatMul", "Gemm", "Transpose")  # their results are no feature maps
_BATCH_SIZE = 64
_HISTOGRAM_BATCH_SIZE = 16  # every activation of a batch is held at once
_LARGEST_UINT8_STEP = 127.0  # from the zero point 128 to both ends


@dataclass(frozen=True)
class Scheme:
    """Which int8 a runtime takes."""

    is_symmetric: bool

    @property
    def options(self) -> dict[str, bool]:
        """For ONNX Runtime's quantizer; TensorRT takes symmetric scales only and refuses quantized biases."""
        return (
            {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
            if self.is_symmetric
            else {}
        )


CPU = Scheme(is_symmetric=False)
TENSORRT = Scheme(is_symmetric=True)


class StaticQuantizer:
    """int8 graphs of one fp32 graph: prepared once, calibrated once by each calibrator, made as often as needed.

    `rows` are (rows, ...) training rows as the graph takes them, `scratch` is a folder for files of its own. Weights for the CPU have
    `bits`, or as many as this machine's products hold.
    """

    def __init__(
        self,
        fp32: bytes,
        rows: NDArray[Any],
        scratch: Path,
        scheme: Scheme,
        bits: int | None = None,
    ) -> None:
        self._bits = 8 if scheme.is_symmetric else bits or weight_bits()
        self._fp32, self._rows, self._scratch, self._scheme = fp32, rows, scratch, scheme
        self._prepared = prepare(fp32, scratch)
        graph = onnx.load(self._prepared).graph
        self._excluded = _excluded(graph)
        self.layers = [
            node.name
            for node in graph.node
            if node.op_type in LAYERS and node.name not in self._excluded
        ]
        self._joints = [] if scheme.is_symmetric else _joints(graph)

    def graph(
        self,
        calibrator: Calibrator = "minmax",
        in_fp32: Collection[str] = (),
        only: str | None = None,
    ) -> bytes:
        """A scale per weight channel, ranges by `calibrator`; the layers `in_fp32` stay as they are, or all but `only`.

        For the CPU the sums and rectifiers between convolutions are quantised too, unless some layer stays in fp32.
        """
        import_onnxruntime()
        from onnxruntime.quantization import (
            CalibrationMethod,
            QuantFormat,
            QuantType,
            quantize_static,
        )

        methods = {
            "minmax": CalibrationMethod.MinMax,
            "percentile": CalibrationMethod.Percentile,
            "entropy": CalibrationMethod.Entropy,
        }
        target, ranges = self._scratch / "quantized.onnx", self._scratch / f"{calibrator}.json"
        chosen = (
            [only]
            if only
            else [
                *(layer for layer in self.layers if layer not in in_fp32),
                *([] if in_fp32 else self._joints),
            ]
        )
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # the histograms tell of each of their steps
            quantize_static(
                self._prepared,
                target,
                None if ranges.exists() else _CalibrationReader(self._rows, self._fp32, calibrator),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QInt8 if self._scheme.is_symmetric else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=self._bits == 7,
                per_channel=True,
                op_types_to_quantize=[*LAYERS, *(_JOINTS if self._joints else [])],
                nodes_to_quantize=chosen,
                nodes_to_exclude=self._excluded,
                calibrate_method=methods[calibrator],
                calibration_cache_path=ranges,
                extra_options=self._scheme.options | self._reading(calibrator),
            )
        return target.read_bytes()

    def _reading(self, calibrator: Calibrator) -> dict[str, Any]:
        """Histograms batch by batch, else ONNX Runtime keeps the activations of all rows; of signs as the graph has them."""
        if calibrator == "minmax":
            return {}
        return {"CalibStridedMinMax": 1, "CalibTensorRangeSymmetric": self._scheme.is_symmetric}


def dynamic_graph(fp32: bytes, scratch: Path, bits: int | None = None) -> bytes:
    """int8 weights of `bits`, a scale for each column; what meets them becomes uint8 with a scale for each row, when it is there."""
    import_onnxruntime()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    prepared, target = prepare(fp32, scratch), scratch / "dynamic.onnx"
    quantize_dynamic(
        prepared,
        target,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        reduce_range=(bits or weight_bits()) == 7,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=_excluded(onnx.load(prepared).graph),
    )
    model = onnx.load(target)
    _scale_each_row(model.graph)
    graph: bytes = model.SerializeToString()
    return graph


def why_not_dynamic(fp32: bytes, scratch: Path) -> str | None:
    """Why a dynamic graph would gain nothing, or None: it reaches matrix products, not convolutions."""
    graph = onnx.load(prepare(fp32, scratch)).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    excluded, alone = _excluded(graph), score_branch(graph)
    found = {"all": 0, "reached": 0}
    for node in graph.node:
        if node.op_type in LAYERS and node.output[0] not in alone:
            weights = sizes.get(node.input[1], 0)
            found["all"] += weights
            found["reached"] += (
                weights if node.op_type != "Conv" and node.name not in excluded else 0
            )
    share = found["reached"] / found["all"] if found["all"] else 0.0
    if share >= FEWEST_DYNAMIC_WEIGHTS:
        return None
    return (
        f"dynamic quantisation reaches plain matrix products, which hold {share:.1%} of this network's {found['all']:,} weights in layers, "
        f"expected at least {FEWEST_DYNAMIC_WEIGHTS:.0%}; 'int8' reaches convolutions as well"
    )


def prepare(fp32: bytes, scratch: Path) -> Path:
    """The graph with constants folded and layers fused, as both quantizers want it."""
    import_onnxruntime()
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared = scratch / "source.onnx", scratch / "prepared.onnx"
    exported = onnx.load_model_from_string(fp32)
    exported.graph.ClearField(
        "value_info"
    )  # it has shapes of weights, which are others after they are fused or quantized
    files.write_bytes(source, exported.SerializeToString())
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    model = onnx.load(prepared)
    _give_own_weights(model.graph)
    files.write_bytes(prepared, model.SerializeToString())
    return prepared


def _give_own_weights(graph: onnx.GraphProto) -> None:
    """A copy of its weight for each layer that shares one: ONNX Runtime cannot take shared weights of int8 as uint8."""
    weights, taken = {tensor.name: tensor for tensor in graph.initializer}, set[str]()
    for node in graph.node:
        for place, name in enumerate(node.input if node.op_type in LAYERS else ()):
            if name in taken:
                copy = graph.initializer.add()
                copy.CopyFrom(weights[name])
                copy.name = node.input[place] = f"{name}_of_{node.name}"
            elif name in weights:
                taken.add(name)


def largest_batch(graph: bytes) -> int:
    """64, or 1 for a graph whose batch is fixed at 1."""
    fixed: int = (
        onnx.load_model_from_string(graph).graph.input[0].type.tensor_type.shape.dim[0].dim_value
    )
    return fixed or _BATCH_SIZE


def _excluded(graph: onnx.GraphProto) -> list[str]:
    """Names of the layers with a matrix for each column or submodel, and of what only the outlier score needs.

    ONNX Runtime has no scale per channel for the former, which are small; of the latter a distance from rounded features would be one of
    the rounding.
    """
    stacked, alone = (
        {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2},
        score_branch(graph),
    )
    return [
        node.name
        for node in graph.node
        if node.output[0] in alone
        or (node.op_type == "MatMul" and not stacked.isdisjoint(node.input))
    ]


def _joints(graph: onnx.GraphProto) -> list[str]:
    """Names of the sums and rectifiers of feature maps, between layers.

    What a matrix product made is no feature map before the next convolution, nor is what was
    transposed, such as a transformer's tokens: int8 gains nothing in their sums and loses accuracy.
    """
    inside, others, found = between_layers(graph), set[str](), []
    for node in graph.node:  # in topological order
        is_read = node.op_type != "Conv" and not others.isdisjoint(node.input)
        if is_read or node.op_type in _NO_MAPS:
            others.update(node.output)
        elif node.op_type in _JOINTS and node.output[0] in inside:
            found.append(node.name)
    return found


def _scale_each_row(graph: onnx.GraphProto) -> None:
    """In place of each DynamicQuantizeLinear, whose scale is of the whole batch: one scale for each row of numbers, zero point 128."""
    constants: dict[str, NDArray[Any]] = {
        "row_axis": np.array([-1], np.int64),
        "row_steps": np.array(_LARGEST_UINT8_STEP, np.float32),
        "row_smallest": np.array(1e-20, np.float32),  # a row of zeros has a scale, too
        "row_middle": np.array(128.0, np.float32),
    }
    nodes, zero_points = [], []
    for node in graph.node:
        if node.op_type != "DynamicQuantizeLinear":
            nodes.append(node)
            continue
        values, (codes, scale, zero_point) = node.input[0], node.output
        zero_points.append(onnx.numpy_helper.from_array(np.array(128, np.uint8), zero_point))
        make, at = onnx.helper.make_node, f"{values}/row"
        nodes += [
            make("Abs", [values], [f"{at}_sizes"]),
            make("ReduceMax", [f"{at}_sizes", "row_axis"], [f"{at}_largest"], keepdims=1),
            make("Max", [f"{at}_largest", "row_smallest"], [f"{at}_range"]),
            make("Div", [f"{at}_range", "row_steps"], [scale]),
            make("Div", [values, scale], [f"{at}_steps"]),
            make("Round", [f"{at}_steps"], [f"{at}_rounded"]),
            make("Add", [f"{at}_rounded", "row_middle"], [f"{at}_shifted"]),
            make("Cast", [f"{at}_shifted"], [codes], to=onnx.TensorProto.UINT8),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(
        [
            *(onnx.numpy_helper.from_array(array, name) for name, array in constants.items()),
            *zero_points,
        ]
    )


class _CalibrationReader:
    """Batches for ONNX Runtime's calibrators, in order, or one range of them at a time."""

    def __init__(self, rows: NDArray[Any], graph: bytes, calibrator: Calibrator) -> None:
        size = min(
            largest_batch(graph), _BATCH_SIZE if calibrator == "minmax" else _HISTOGRAM_BATCH_SIZE
        )
        self._name = onnx.load_model_from_string(graph).graph.input[0].name
        self._parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._left: Iterator[NDArray[Any]] = iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def set_range(self, start_index: int, end_index: int) -> None:
        """The batches that come next."""
        self._left = iter(self._parts[start_index:end_index])

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """The next batch by the input's name, or None."""
        batch = next(self._left, None)
        return None if batch is None else {self._name: np.ascontiguousarray(batch)}
