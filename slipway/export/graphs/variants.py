"""Makes smaller and faster graphs from the fp32 one: fp16, static and dynamic int8.

The precision is part of the graph, so no runtime has to lower it. `verify` later checks each
variant's loss of accuracy. Broken variants are refused here: weights or activations beyond fp16's
range, outputs that are not finite or bear no relation to fp32's. A variant without any possible
gain is left out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import onnx
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract, Precision, VariantTarget
from slipway.artifacts.leaderboard import Attempt
from slipway.artifacts.uncertainty import Answers
from slipway.data.engine.randomness import drawn_order
from slipway.data.store.packed import PackedManifest, open_split
from slipway.export.graphs.graph import largest_batch
from slipway.export.graphs.half_precision import kept_in_fp32, to_half
from slipway.export.graphs.int8_search import Loss, search
from slipway.export.graphs.quantization import (
    CPU,
    TENSORRT,
    StaticQuantizer,
    dynamic_graph,
    why_not_dynamic,
)
from slipway.export.graphs.trees import has_trees
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system.errors import ParityError

PRECISION: dict[str, Precision] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "int8": "int8",
    "int8_dynamic": "int8",
    "int8_tensorrt": "int8",
    "pruned": "fp32",
    "pruned_int8": "int8",
}
# Variants of the pruned network, and the variant that each is made as.
OF_PRUNED = {"pruned": "fp32", "pruned_int8": "int8"}
MEANT_FOR: dict[str, list[VariantTarget]] = {
    "fp32": ["cpu", "cuda", "tensorrt"],
    "fp16": ["cuda", "tensorrt"],
    "int8": ["cpu"],
    "int8_dynamic": ["cpu"],
    "int8_tensorrt": ["tensorrt"],
    "pruned": ["cpu", "cuda"],
    "pruned_int8": ["cpu"],
}
LARGEST_FP16 = 65504.0  # IEEE 754 binary16


def quantization_samples(
    packed: Path, manifest: PackedManifest, seed: int, num_rows: int
) -> NDArray[Any]:
    """Draw at most `num_rows` training rows of a store, as network inputs (rows, ...).

    They are training rows because ranges from test rows would make int8 look better than it is. The
    choice depends only on the seed and the ids. Images stored larger are resized to the input.
    """
    split, contract = open_split(packed, manifest, "train"), manifest.input
    chosen = drawn_order(seed, 0, split.keys, "calibration")[:num_rows]
    rows: NDArray[Any] = split.inputs[np.sort(chosen)]
    if rows.shape[1:] == contract.shape:
        return rows
    resize: Callable[[NDArray[Any], InputContract], NDArray[Any]]
    resize = input_kind(contract.kind).load_part("resize_rows")
    return resize(rows, contract)


def fp16_graph(fp32: bytes, rows: NDArray[Any]) -> bytes:
    """Convert a graph to fp16 from its first to its last layer; inputs and outputs keep their type.

    Raises:
        ParityError: fp16's range is too small.
    """
    model = onnx.load_model_from_string(fp32)
    kept = kept_in_fp32(model.graph)
    _refuse_overflow(model, kept, largest_activations(fp32, rows))
    graph: bytes = to_half(model, kept).SerializeToString()
    return graph


def why_left_out(variant: str, fp32: bytes, scratch: Path) -> str | None:
    """Return the reason why `variant` gains nothing for this graph or is impossible; else None."""
    if variant != "fp32" and has_trees(fp32):
        return (
            f"the graph has trees, which compare in float32: {variant} would move rows to other "
            "leaves"
        )
    return why_not_dynamic(fp32, scratch) if variant == "int8_dynamic" else None


def targets_of(variant: str, graph: bytes) -> list[VariantTarget]:
    """Return the providers that a variant is intended for; trees run on the CPU only."""
    return ["cpu"] if has_trees(graph) else MEANT_FOR[variant]


def make_variant(
    variant: str, fp32: bytes, rows: NDArray[Any], scratch: Path, loss: Loss, budget: float
) -> tuple[bytes, list[Attempt]]:
    """Return the graph of `variant`, and every attempt to quantize it.

    Args:
        variant: not one of the pruned network.
        fp32: the graph to start from.
        rows: the quantization samples.
        scratch: a folder for the quantizer's own files.
        loss: measures the loss of a graph on validation rows.
        budget: the allowed loss; while a graph loses more, other ways to quantize are tried.

    Returns:
        The graph, and every attempt of a search.
    """
    schemes = {"int8": CPU, "int8_tensorrt": TENSORRT}
    if variant in schemes:
        quantizer = StaticQuantizer(fp32, rows, scratch, schemes[variant])
        return search(quantizer, fp32, rows, loss, budget)
    if variant == "int8_dynamic":
        return dynamic_graph(fp32, scratch), []
    return fp16_graph(fp32, rows) if variant == "fp16" else fp32, []


def largest_activations(graph: bytes, rows: NDArray[Any]) -> dict[str, float]:
    """Return the largest absolute value over `rows` of every float tensor inside the graph."""
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(graph))
    names = [
        value.name
        for value in model.graph.value_info
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]
    probes = [f"{name}/largest" for name in names]
    for name, probe in zip(names, probes, strict=True):
        magnitude = f"{name}/magnitude"
        model.graph.node.append(onnx.helper.make_node("Abs", [name], [magnitude]))
        model.graph.node.append(
            onnx.helper.make_node("ReduceMax", [magnitude], [probe], keepdims=0)
        )
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(probe, onnx.TensorProto.FLOAT, [])
        )
    found = _run_probes(model.SerializeToString(), probes, rows)
    return dict(zip(names, found.tolist(), strict=True))


def refuse_broken(
    variant: str, answers: Answers, reference: Answers, output: OutputContract
) -> float:
    """Check a variant's outputs against fp32's; return the largest difference.

    Raises:
        ParityError: the variant is broken: a number is not finite, probabilities do not sum to 1,
            fewer than half of the labels are unchanged, or values are further from fp32's than
            fp32's values are spread.
    """
    found, expected = answers.outputs, reference.outputs
    num_wrong = sum(int((~np.isfinite(numbers)).sum()) for numbers in answers)
    if num_wrong:
        raise ParityError(
            f"the {variant} graph outputs {num_wrong} numbers that are not finite. "
            f"{_advice(variant)}"
        )
    difference = np.abs(found - expected)
    match output.kind:
        case "label_probabilities":
            kept = float(((found >= 0.5) == (expected >= 0.5)).mean())
            are_probabilities = bool(((found >= 0) & (found <= 1)).all())
        case "probabilities":
            kept = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
            are_probabilities = float(np.abs(found.sum(axis=1) - 1).max()) <= 0.01
        case "value":
            if float(np.sqrt((difference**2).mean())) > max(float(expected.std()), 1e-6):
                raise ParityError(
                    f"the {variant} graph differs from fp32 by up to {difference.max():.3g}, "
                    f"more than fp32's answers vary. {_advice(variant)}"
                )
            return float(difference.max())
        case kind:
            assert_never(kind)
    if kept < 0.5 or not are_probabilities:
        raise ParityError(
            f"the {variant} graph keeps {kept:.1%} of fp32's labels, expected nearly all. "
            f"{_advice(variant)}"
        )
    return float(difference.max())


def _refuse_overflow(model: onnx.ModelProto, kept: set[str], activations: dict[str, float]) -> None:
    weights = {
        tensor.name: float(np.abs(onnx.numpy_helper.to_array(tensor)).max(initial=0.0))
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    halved = {
        name
        for node in model.graph.node
        if node.output[0] not in kept
        for name in [*node.input, *node.output]
    }
    # On the CPU ONNX Runtime computes fp16 graphs in fp32, so only the ranges show an overflow.
    beyond = {
        name: value
        for name, value in {**weights, **activations}.items()
        if name in halved and not value <= LARGEST_FP16
    }
    if beyond:
        found = ", ".join(f"{name} reaches {value:.3g}" for name, value in beyond.items())
        raise ParityError(
            f"fp16 holds numbers up to {LARGEST_FP16:g}, but {found}. {_advice('fp16')}"
        )


def _run_probes(graph: bytes, probes: list[str], rows: NDArray[Any]) -> NDArray[np.float32]:
    onnxruntime = import_onnxruntime()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    size = largest_batch(graph)
    batches = [
        session.run(probes, {name: np.ascontiguousarray(rows[start : start + size])})
        for start in range(0, len(rows), size)
    ]
    # A NaN must come through, so `maximum`, not `fmax`.
    largest: NDArray[np.float32] = np.maximum.reduce(
        np.array(batches, dtype=np.float32).reshape(len(batches), len(probes))
    )
    return largest


def _advice(variant: str) -> str:
    if variant == "fp16":
        return "Take 'fp16' out of export.variants, or train again."
    if variant == "pruned":
        return "Lower prune.sparsity, raise prune.epochs, or take 'pruned' out of export.variants."
    return f"Raise export.quantization_samples, or take {variant!r} out of export.variants."
