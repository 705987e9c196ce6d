"""Exports a torch network as a self-contained ONNX graph, from pixels or columns to predictions.

The graph includes normalisation, temperature, softmax and the OOD score, so a service cannot omit
any of them. A graph is refused if it needs a second file, fails the ONNX checker, has another
signature than its bundle declares, or differs from torch at any tried batch size.
"""

import json
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, OutputContract
from slipway.artifacts.uncertainty import Answers
from slipway.data.store.packed import Inputs
from slipway.export.graphs.trees import write_trees
from slipway.inputs.contract import InputContract, input_name
from slipway.kinds.registry import Task
from slipway.runtimes.runtime import MIN_LENGTH, open_onnx, run_in_batches
from slipway.system.errors import BundleError, ParityError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork

_ELEMENT_TYPES = {
    np.uint8: onnx.TensorProto.UINT8,
    np.float32: onnx.TensorProto.FLOAT,
    np.int32: onnx.TensorProto.INT32,
}
_BATCH_SIZE = 64


def torch_answers(network: CalibratedNetwork, batch: NDArray[Any]) -> Answers:
    """Run the network in torch, in fp32 on the CPU. The exported graph must give equal outputs."""
    with torch.inference_mode():
        outputs, scores = network.eval()(torch.from_numpy(np.array(batch)))
    return Answers(outputs.numpy(), scores.numpy())


def onnx_answers(
    graph: bytes, rows: Inputs, batch_size: int | None = None, variant: str = "int8"
) -> Answers:
    """Run a graph on the CPU in batches of `batch_size` (default: `largest_batch(graph)`)."""
    runner = open_onnx(graph, variant=variant, precision=variant, provider="cpu", num_threads=0)
    return run_in_batches(runner.run, rows, batch_size or largest_batch(graph))


def largest_batch(graph: bytes) -> int:
    """Return the batch size to run a graph with: 64, or 1 if the graph only accepts single rows."""
    batch = onnx.load_model_from_string(graph).graph.input[0].type.tensor_type.shape.dim[0]
    fixed: int = batch.dim_value
    return fixed or _BATCH_SIZE


def export_graph(
    network: CalibratedNetwork,
    contract: InputContract,
    output: OutputContract,
    *,
    opset: int,
    max_batch_size: int,
) -> bytes:
    """Export the fp32 graph for batches of 1 to `max_batch_size` rows, as bytes of an ONNX file.

    Raises:
        BundleError: torch cannot trace the network as one graph for every batch size.
    """
    # With one example row torch may fix the batch; it also refuses a range of a single number.
    example = torch.from_numpy(np.zeros((min(2, max_batch_size), *contract.shape), contract.dtype))
    sizes: dict[int, Any] = {}
    if max_batch_size > 1:
        sizes[0] = torch.export.Dim("rows", min=1, max=max_batch_size)
    if contract.varies_in_length:
        sizes[1] = torch.export.Dim("length", min=MIN_LENGTH, max=contract.shape[0])
    dynamic = (sizes,) if sizes else None
    try:
        program = torch.onnx.export(
            network.eval(),
            (example,),
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=[input_name(contract)],
            output_names=[output.kind, SCORE_NAME],
            opset_version=opset,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise BundleError(
            f"torch cannot export this network for batches of 1 to {max_batch_size}: {cause} "
            "Choose another network."
        ) from error
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    write_trees(model, network)
    _forget_the_machine(model)
    return _serialize(model)


def describe_graph(
    graph: bytes,
    *,
    variant: str,
    task: Task,
    contract: InputContract,
    output: OutputContract,
    weights_sha256: str,
) -> bytes:
    """Add metadata to the graph: variant, task, labels, and the digest of the trained weights."""
    model = onnx.load_model_from_string(graph)
    facts = {
        "variant": variant,
        "task": task,
        "labels": json.dumps(output.labels, ensure_ascii=False),
        "input": contract.model_dump_json(),
        "weights_sha256": weights_sha256,
    }
    onnx.helper.set_model_props(model, facts)
    return _serialize(model)


def check_graph(graph: bytes, contract: InputContract, output: OutputContract) -> None:
    """Raise BundleError unless the graph is valid, self-contained and of the declared signature."""
    model = onnx.load_model_from_string(graph)
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise BundleError(
            "the exported graph keeps weights in a second file, expected one self-contained file. "
            "Export it again."
        )
    try:
        onnx.checker.check_model(graph, full_check=True)
    except onnx.checker.ValidationError as error:
        raise BundleError(
            f"the ONNX checker refuses the exported graph: {error}. Try another export.opset."
        ) from error
    columns = max(len(output.labels), 1)
    expected = [
        (
            input_name(contract),
            _ELEMENT_TYPES[contract.dtype],
            [0] if contract.varies_in_length else list(contract.shape),
        ),
        (output.kind, onnx.TensorProto.FLOAT, [columns]),
        (SCORE_NAME, onnx.TensorProto.FLOAT, []),
    ]
    found = [_signature(value) for value in [*model.graph.input, *model.graph.output]]
    if found != expected:
        raise BundleError(
            f"the exported graph has inputs and outputs {found}, "
            f"expected {expected} after the batch dimension."
        )


def prove_parity(
    network: CalibratedNetwork,
    graph: bytes,
    rows: Inputs,
    *,
    batch_sizes: list[int],
    max_difference: float,
) -> float:
    """Return the largest difference between torch and the graph over all batch sizes.

    Values and OOD scores are compared relative to the largest one if that is above 1,
    probabilities absolutely.

    Raises:
        ParityError: the difference is above `max_difference`.
    """
    runner = open_onnx(graph, variant="fp32", precision="fp32", provider="cpu", num_threads=0)
    worst = 0.0
    for size in batch_sizes:
        batch = np.ascontiguousarray(rows[np.arange(size) % len(rows)])
        try:
            expected, found = torch_answers(network, batch), runner.run(batch)
        except Exception as error:  # the errors of torch and ONNX Runtime have no common base
            raise ParityError(
                f"torch or the exported graph cannot run a batch of {size}: {error}. "
                "Choose another network."
            ) from error
        difference = float(np.max([_relative(*both) for both in zip(expected, found, strict=True)]))
        if not difference <= max_difference:  # NaN is not
            raise ParityError(
                f"torch and the exported graph differ by {difference:.3g} at batch size {size}, "
                f"expected at most {max_difference:g}. Try another export.opset, or a network "
                "whose layers do not depend on the batch."
            )
        worst = max(worst, difference)
    return worst


def _relative(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    return float(np.abs(expected - found).max()) / max(1.0, float(np.abs(expected).max()))


def _serialize(model: onnx.ModelProto) -> bytes:
    payload: bytes = model.SerializeToString(deterministic=True)
    return payload


def _signature(value: Any) -> tuple[str, int, list[int]]:
    tensor = value.type.tensor_type
    return value.name, tensor.elem_type, [dimension.dim_value for dimension in tensor.shape.dim[1:]]


def _forget_the_machine(model: onnx.ModelProto) -> None:
    """Remove the exporter's stack traces, which contain local paths and change with the code."""
    for item in [
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
        *model.graph.initializer,
    ]:
        item.ClearField("doc_string")
        item.ClearField("metadata_props")
    model.graph.ClearField("metadata_props")
    model.graph.ClearField("doc_string")
