"""Smaller and faster graphs from the fp32 one: fp16, int8 for the CPU and for TensorRT, and int8 with ranges found at run time.

Precision lives in the graph, so that no runtime has to be told to lower it. How much accuracy a
variant may cost is `verify`'s to judge; here one that is broken is refused: weights or activations
beyond fp16's range, answers that are not finite, or that have nothing to do with fp32's. One that can gain
nothing is left out with the reason.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.bundle import OutputContract, Precision, Target
from slipway.artifacts.uncertainty import Answers
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import Inputs, PackedManifest, open_split
from slipway.export.graphs.half_precision import kept_in_fp32, to_half
from slipway.export.graphs.int8_search import Loss, search
from slipway.export.graphs.quantization import (
    CPU,
    TENSORRT,
    StaticQuantizer,
    dynamic_graph,
    largest_batch,
    why_not_dynamic,
)
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import image_array
from slipway.reports.pages.leaderboard_page import Attempt
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.runtimes.runtime import Runner
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
OF_PRUNED = {
    "pruned": "fp32",
    "pruned_int8": "int8",
}  # as which variant each is made, of the pruned network
MEANT_FOR: dict[str, list[Target]] = {
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
    """(rows, ...) of the input contract: `num_rows` training rows of a store, or all there are.

    Of training, always: ranges taken from test rows would flatter int8. Which rows depends on seed and ids only.

    Training images may be stored larger than the network's input: they are brought to its size as any image is.
    """
    split, contract = open_split(packed, manifest, "train"), manifest.input
    draw = uniform(seed, 0, split.keys, "calibration")
    chosen = np.lexsort((split.keys, draw))[:num_rows]
    rows: NDArray[Any] = split.inputs[np.sort(chosen)]
    if isinstance(contract, ColumnContract) or rows.shape[1:] == contract.shape:
        return rows
    return np.stack(
        [
            image_array(Image.fromarray(row[..., 0] if contract.channels == 1 else row), contract)
            for row in rows
        ]
    )


def fp16_graph(fp32: bytes, rows: NDArray[Any]) -> bytes:
    """fp16 from the first layer to the last; input and output stay as they are. ParityError where fp16's range is too small."""
    model = onnx.load_model_from_string(fp32)
    kept = kept_in_fp32(model.graph)
    _refuse_overflow(model, kept, largest_activations(fp32, rows))
    graph: bytes = to_half(model, kept).SerializeToString()
    return graph


def int8_graph(fp32: bytes, rows: NDArray[Any], scratch: Path) -> bytes:
    """int8 for the CPU: unsigned activations, a scale per weight channel, ranges measured on `rows`."""
    return StaticQuantizer(fp32, rows, scratch, CPU).graph()


def int8_tensorrt_graph(fp32: bytes, rows: NDArray[Any], scratch: Path) -> bytes:
    """int8 for TensorRT, which takes symmetric scales only and refuses quantized biases."""
    return StaticQuantizer(fp32, rows, scratch, TENSORRT).graph()


def why_left_out(variant: str, fp32: bytes, scratch: Path) -> str | None:
    """Why `variant` can gain nothing for this graph, or None."""
    return why_not_dynamic(fp32, scratch) if variant == "int8_dynamic" else None


def make_variant(
    variant: str, fp32: bytes, rows: NDArray[Any], scratch: Path, loss: Loss, budget: float
) -> tuple[bytes, list[Attempt]]:
    """The graph of `variant`, and what was tried for it.

    `rows` are the calibration rows, `scratch` a folder for the quantizer's own files, `loss` what a graph loses on
    validation rows, and `budget` how much it may: while it is more, other ways of quantising are tried.
    """
    if variant == "int8":
        return search(StaticQuantizer(fp32, rows, scratch, CPU), fp32, rows, loss, budget)
    if variant == "int8_tensorrt":
        return search(StaticQuantizer(fp32, rows, scratch, TENSORRT), fp32, rows, loss, budget)
    makers: dict[str, Callable[[], bytes]] = {
        "fp32": lambda: fp32,
        "fp16": lambda: fp16_graph(fp32, rows),
        "int8_dynamic": lambda: dynamic_graph(fp32, scratch),
    }
    return makers[variant](), []


def largest_activations(graph: bytes, rows: NDArray[Any]) -> dict[str, float]:
    """The largest absolute value of every float tensor inside the graph over `rows`, by tensor name."""
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
    """The largest difference between the answers of a variant and of fp32 to the same rows; ParityError if the variant is broken.

    Broken: a number that is not finite, probabilities that do not sum to 1, fewer than half of the
    labels kept, or values further from fp32's than those spread among themselves.
    """
    found, expected = answers.outputs, reference.outputs
    num_wrong = sum(int((~np.isfinite(numbers)).sum()) for numbers in answers)
    if num_wrong:
        raise ParityError(
            f"the {variant} graph answers {num_wrong} numbers that are not finite. {_advice(variant)}"
        )
    difference = np.abs(found - expected)
    if output.kind == "probabilities":
        kept = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
        if kept < 0.5 or float(np.abs(found.sum(axis=1) - 1).max()) > 0.01:
            raise ParityError(
                f"the {variant} graph keeps {kept:.1%} of fp32's labels, expected nearly all. {_advice(variant)}"
            )
    elif float(np.sqrt((difference**2).mean())) > max(float(expected.std()), 1e-6):
        raise ParityError(
            f"the {variant} graph is off by {difference.max():.3g}, more than fp32's answers spread. {_advice(variant)}"
        )
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
    halved = {
        name
        for node in model.graph.node
        if node.output[0] not in kept
        for name in [*node.input, *node.output]
    }
    # ONNX Runtime computes fp16 graphs in fp32 on the CPU, so only the ranges show what a GPU would overflow.
    beyond = {
        name: value
        for name, value in {**weights, **activations}.items()
        if name in halved and not value <= LARGEST_FP16
    }
    if beyond:
        found = ", ".join(f"{name} reaches {value:.3g}" for name, value in beyond.items())
        raise ParityError(
            f"fp16 holds numbers up to {LARGEST_FP16:g}, but {found}. Take 'fp16' out of export.variants, or train again."
        )


def _run_probes(graph: bytes, probes: list[str], rows: NDArray[Any]) -> NDArray[np.float32]:
    onnxruntime = import_onnxruntime()

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [session.run(probes, {name: batch}) for batch in _batches(rows, largest_batch(graph))]
    # A NaN must come through, so `maximum`, not `fmax`.
    largest: NDArray[np.float32] = np.maximum.reduce(
        np.array(batches, dtype=np.float32).reshape(len(batches), len(probes))
    )
    return largest


def _batches(rows: Inputs, batch_size: int) -> Iterator[NDArray[Any]]:
    return (
        np.ascontiguousarray(rows[start : start + batch_size])
        for start in range(0, len(rows), batch_size)
    )


def _advice(variant: str) -> str:
    if variant == "fp16":
        return "Take 'fp16' out of export.variants, or train again."
    if variant == "pruned":
        return "Lower prune.sparsity, raise prune.epochs, or take 'pruned' out of export.variants."
    return f"Raise export.quantization_samples, or take {variant!r} out of export.variants."
