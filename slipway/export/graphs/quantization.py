"""Quantizes graphs to int8: static (ranges from sample rows) or dynamic (a range for each row).

The CPU and TensorRT need different static graphs. In Slipway's dynamic graphs a prediction never
depends on other rows of its batch. ONNX Runtime's own dynamic graphs have one range for the whole
batch, so in a service another caller's row would change the prediction.
"""

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
from numpy.typing import NDArray

from slipway.export.graphs.graph import largest_batch
from slipway.export.graphs.half_precision import LAYERS, between_layers, score_branch
from slipway.runtimes.cpu_int8 import weight_bits
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system import files

RangeMethod = Literal["minmax", "percentile", "entropy"]
RANGE_METHODS: tuple[RangeMethod, ...] = get_args(RangeMethod)
# Fraction of all layers' weights; below it neither size nor speed gains noticeably.
MIN_DYNAMIC_FRACTION = 0.1
# Between convolutions each of them in fp32 is a conversion out of int8 and back: a third of
# resnet18's time on a CPU.
_JOINTS = ["Add", "Relu"]
_NO_MAPS = ("MatMul", "Gemm", "Transpose")  # their results are no feature maps
_BATCH_SIZE = 64
_HISTOGRAM_BATCH_SIZE = 16  # every activation of a batch is held at once
_LARGEST_UINT8_STEP = 127.0  # steps from the zero point 128 to both ends


@dataclass(frozen=True)
class Scheme:
    """The kind of int8 quantization that a runtime supports."""

    is_symmetric: bool
    options: Mapping[str, bool]  # options of ONNX Runtime's quantizer


CPU = Scheme(is_symmetric=False, options={})
# TensorRT takes symmetric scales only and refuses quantized biases.
TENSORRT = Scheme(
    is_symmetric=True,
    options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
)


class StaticQuantizer:
    """Makes static int8 graphs from one fp32 graph, which is prepared and calibrated only once.

    Args:
        fp32: the graph.
        rows: training rows (rows, ...) in the graph's input format, to measure ranges on.
        scratch: a folder for temporary files.
        scheme: the kind of int8.
        bits: bits of weights for the CPU; by default the most that cannot saturate on this machine.
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
        # Batch by batch, or ONNX Runtime keeps the activations of all rows; signs as in the graph.
        self._histogram_options = {
            "CalibStridedMinMax": 1,
            "CalibTensorRangeSymmetric": scheme.is_symmetric,
        }

    def graph(
        self,
        range_method: RangeMethod = "minmax",
        in_fp32: Collection[str] = (),
        only: str | None = None,
    ) -> bytes:
        """Return the graph with only the layer `only` quantized, or all layers but `in_fp32`.

        For the CPU, sums and ReLUs between convolutions are quantized too, unless a layer stays in
        fp32.
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
        target, ranges = self._scratch / "quantized.onnx", self._scratch / f"{range_method}.json"
        if only:
            chosen = [only]
        else:
            chosen = [layer for layer in self.layers if layer not in in_fp32]
            chosen += [] if in_fp32 else self._joints
        with contextlib.redirect_stdout(io.StringIO()):  # histograms print every step
            quantize_static(
                self._prepared,
                target,
                None if ranges.exists() else _SampleReader(self._rows, self._fp32, range_method),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QInt8 if self._scheme.is_symmetric else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=self._bits == 7,
                per_channel=True,
                op_types_to_quantize=[*LAYERS, *(_JOINTS if self._joints else [])],
                nodes_to_quantize=chosen,
                nodes_to_exclude=self._excluded,
                calibrate_method=methods[range_method],
                calibration_cache_path=ranges,
                extra_options={
                    **self._scheme.options,
                    **({} if range_method == "minmax" else self._histogram_options),
                },
            )
        return target.read_bytes()


def dynamic_graph(fp32: bytes, scratch: Path, bits: int | None = None) -> bytes:
    """Return the graph with int8 weights, a scale per column, and inputs quantized row by row."""
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
    """Return the reason why a dynamic graph would gain nothing; None if it may gain speed.

    Dynamic quantization only reaches matrix products.
    """
    graph = onnx.load(prepare(fp32, scratch)).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    excluded, score_only = _excluded(graph), score_branch(graph)
    num_weights = num_reached = 0
    for node in graph.node:
        if node.op_type in LAYERS and node.output[0] not in score_only:
            weights = sizes.get(node.input[1], 0)
            num_weights += weights
            if node.op_type != "Conv" and node.name not in excluded:
                num_reached += weights
    fraction = num_reached / num_weights if num_weights else 0.0
    if fraction >= MIN_DYNAMIC_FRACTION:
        return None
    return (
        f"dynamic quantization only reaches plain matrix products, which hold {fraction:.1%} "
        f"of the {num_weights:,} weights in this network's layers, "
        f"expected at least {MIN_DYNAMIC_FRACTION:.0%}; 'int8' reaches convolutions as well"
    )


def prepare(fp32: bytes, scratch: Path) -> Path:
    """Fold the constants of a graph and fuse its layers, as both quantizers require."""
    import_onnxruntime()
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared = scratch / "source.onnx", scratch / "prepared.onnx"
    exported = onnx.load_model_from_string(fp32)
    # It has shapes of weights, which change when these are fused or quantized.
    exported.graph.ClearField("value_info")
    files.write_bytes(source, exported.SerializeToString())
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    model = onnx.load(prepared)
    _give_own_weights(model.graph)
    files.write_bytes(prepared, model.SerializeToString())
    return prepared


def _give_own_weights(graph: onnx.GraphProto) -> None:
    """Give each layer its own copy of shared weights: ONNX Runtime cannot share int8 weights."""
    weights, taken = {tensor.name: tensor for tensor in graph.initializer}, set[str]()
    for node in graph.node:
        for index, name in enumerate(node.input if node.op_type in LAYERS else ()):
            if name in taken:
                copy = graph.initializer.add()
                copy.CopyFrom(weights[name])
                copy.name = node.input[index] = f"{name}_of_{node.name}"
            elif name in weights:
                taken.add(name)


def _excluded(graph: onnx.GraphProto) -> list[str]:
    """Return the nodes to leave in fp32: those of stacked matrices and of the OOD score.

    A layer with one matrix per column or submodel has stacked matrices. ONNX Runtime has no
    scale per channel for such layers, which are small. The OOD score is a distance; computed
    from rounded features, it would mostly be the rounding error.
    """
    stacked = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2}
    score_only = score_branch(graph)
    return [
        node.name
        for node in graph.node
        if node.output[0] in score_only
        or (node.op_type == "MatMul" and not stacked.isdisjoint(node.input))
    ]


def _joints(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes between layers that add or rectify feature maps.

    The int8 graph for the CPU quantizes them as well. Results of a matrix product, and transposed
    tensors such as a transformer's tokens, do not count as feature maps until the next convolution:
    int8 gains nothing in their sums and loses accuracy.
    """
    inside, no_maps, found = between_layers(graph), set[str](), []
    for node in graph.node:  # in topological order
        reads_no_map = node.op_type != "Conv" and not no_maps.isdisjoint(node.input)
        if reads_no_map or node.op_type in _NO_MAPS:
            no_maps.update(node.output)
        elif node.op_type in _JOINTS and node.output[0] in inside:
            found.append(node.name)
    return found


def _scale_each_row(graph: onnx.GraphProto) -> None:
    """Replace each DynamicQuantizeLinear (one scale per batch) by nodes with one scale per row.

    The zero point is 128.
    """
    constants: dict[str, NDArray[Any]] = {
        "row_axis": np.array([-1], np.int64),
        "row_steps": np.array(_LARGEST_UINT8_STEP, np.float32),
        "row_smallest": np.array(1e-20, np.float32),  # a row of zeros has a scale, too
        "row_middle": np.array(128.0, np.float32),
    }
    nodes: list[onnx.NodeProto] = []
    zero_points, row_scales = [], set[str]()
    for node in graph.node:
        if node.op_type != "DynamicQuantizeLinear":
            nodes.append(node)
            continue
        values, (codes, scale, zero_point) = node.input[0], node.output
        row_scales.add(scale)
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
    graph.node.extend(_with_scales_in_turn(nodes, row_scales))
    graph.initializer.extend(
        [
            *(onnx.numpy_helper.from_array(array, name) for name, array in constants.items()),
            *zero_points,
        ]
    )


def _with_scales_in_turn(
    nodes: list[onnx.NodeProto], row_scales: set[str]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, with the two scales of each integer product applied in two steps.

    A quantized MatMul is followed by one multiplication by both scales, which becomes two:
        before: Mul(row scale, weight scale) -> scales, Mul(product, scales) -> output
        after: Mul(product, weight scale) -> half, Mul(half, row scale) -> output
    ONNX Runtime 1.31 would fuse the one to MatMulIntegerToFloat, which uses the scale of the first
    row for all positions of a sequence. `row_scales` are the names of the rows' scales.
    """
    # By name of `scales`: the names of the scale of the weights and of that of the row.
    scale_products = {
        node.output[0]: sorted(node.input, key=row_scales.__contains__)
        for node in nodes
        if node.op_type == "Mul" and not row_scales.isdisjoint(node.input)
    }
    for node in nodes:
        scaled = [name for name in node.input if name in scale_products]
        if node.op_type == "Mul" and scaled:
            (product,) = (name for name in node.input if name not in scale_products)
            of_weights, of_rows = scale_products[scaled[0]]
            half = f"{node.output[0]}/half"
            yield onnx.helper.make_node("Mul", [product, of_weights], [half])
            yield onnx.helper.make_node("Mul", [half, of_rows], list(node.output), name=node.name)
        elif node.output[0] not in scale_products:
            yield node


class _SampleReader:
    """Feeds batches to ONNX Runtime's calibrators: all in order, or one range at a time."""

    def __init__(self, rows: NDArray[Any], graph: bytes, range_method: RangeMethod) -> None:
        size = min(
            largest_batch(graph), _BATCH_SIZE if range_method == "minmax" else _HISTOGRAM_BATCH_SIZE
        )
        self._name = onnx.load_model_from_string(graph).graph.input[0].name
        self._parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._left: Iterator[NDArray[Any]] = iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Select the range of batches to feed next."""
        self._left = iter(self._parts[start_index:end_index])

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the next batch by the input's name; None after the last batch."""
        batch = next(self._left, None)
        return None if batch is None else {self._name: np.ascontiguousarray(batch)}
