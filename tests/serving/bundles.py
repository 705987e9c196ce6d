"""Tiny bundles, certificates and manifests of engines, made without training."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from slipway.artifacts import bundle as bundles
from slipway.artifacts.bundle import (
    SCORE_NAME,
    Bundle,
    Lineage,
    LoadedBundle,
    Metric,
    ModelFile,
    OutputContract,
)
from slipway.artifacts.certificate import Certificate, Execution, Hop, write_certificate
from slipway.artifacts.engine_manifest import EngineMachine, EngineManifest, Profile
from slipway.artifacts.gates import GateResult, verdict_of
from slipway.artifacts.golden_rows import (
    FILE,
    GoldenFile,
    GoldenRows,
    golden_budget,
    golden_rows_bytes,
)
from slipway.artifacts.uncertainty import Answers
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract, input_name
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.kinds.registry import Task
from slipway.system.files import sha256_bytes
from tests.calibrations import CALIBRATION

MACHINE = EngineMachine(
    tensorrt_version="10.16.1",
    cuda_version="13.0",
    driver_version="580.95.05",
    driver_cuda_version="13.1",
    gpu="H200",
    compute_capability="9.0",
)
TENSORRT_FP16 = Execution(backend="tensorrt", provider="tensorrt", precision="fp16", variant="fp16")
SIZE_PX = 8
LABELS = ["dark", "grey", "bright"]
CLASS_FIELDS = [
    "label",
    "probabilities",
    "prediction_set",
    "ood_score",
    "is_ood",
]  # of one prediction
VALUE_FIELDS = ["value", "interval", "ood_score", "is_ood"]
CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=SIZE_PX,
    channels=3,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=50_000_000,
)
WEIGHTS = (
    np.random.default_rng(7).normal(size=(SIZE_PX * SIZE_PX * 3, len(LABELS))).astype(np.float32)
    / 800
)


def column(
    name: str, kind: Literal["number", "category", "boolean", "date"] = "number", **changes: Any
) -> Column:
    """Return a column without bounds or missing training values; `changes` replace fields."""
    fields: dict[str, Any] = {
        "required": False,
        "min": None,
        "max": None,
        "has_missing": False,
        "categories": [],
        "quantiles": [],
    }
    numbers = {
        "number": (40.0, 12.5, 38.5),
        "category": (0.0, 1.0, 0.0),
        "boolean": (0.3, 0.45, 0.0),
        "date": (18000.0, 900.0, 18100.0),
    }
    mean, std, fill = numbers[kind]
    return Column.model_validate(
        {"name": name, "kind": kind, "mean": mean, "std": std, "fill": fill} | fields | changes
    )


COLUMNS = ColumnContract(
    kind="columns",
    columns=[
        column("age", min=0.0, max=120.0),
        column("income", has_missing=True, mean=3.2e4, std=1.1e4, fill=3.0e4),
        column("colour", "category", categories=["red", "green", "blue"]),
        column("city", "category", has_missing=True, categories=["O'Hare <b>", "Zürich"]),
        column("member", "boolean"),
        column("since", "date", has_missing=True),
    ],
)
ONE_COLUMN = ColumnContract(kind="columns", columns=[column("x", required=True)])
ROW: dict[str, Any] = {
    "age": 41,
    "income": 28500.5,
    "colour": "green",
    "city": "Zürich",
    "member": True,
    "since": "2021-03-04",
}
ROW_WEIGHTS = (
    np.random.default_rng(8).normal(size=(COLUMNS.shape[0], len(LABELS))).astype(np.float32)
)


TEXTS = TextContract(kind="texts", columns=["text"], max_bytes=64, max_characters=1000)
TEXT_WEIGHTS = np.random.default_rng(9).normal(size=(64, len(LABELS))).astype(np.float32) / 64


def text_classifier() -> onnx.ModelProto:
    """Return a graph of a text's bytes times TEXT_WEIGHTS, then softmax."""
    nodes = [
        helper.make_node("Cast", ["text"], ["bytes"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["bytes", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    taken = helper.make_tensor_value_info("text", TensorProto.UINT8, ["N", *TEXTS.shape])
    weights = numpy_helper.from_array(TEXT_WEIGHTS, "weights")
    return _model(nodes, [weights], "probabilities", len(LABELS), taken)


def table_row(number: int) -> dict[str, Any]:
    """Return a valid row that depends on `number`; some rows lack a city."""
    row = ROW | {
        "age": number % 120,
        "income": 20000.5 + number,
        "colour": ["red", "green", "blue"][number % 3],
        "member": number % 2 == 0,
    }
    return {name: value for name, value in row.items() if number % 5 or name != "city"}


def row_probabilities(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the predictions of `row_classifier` for encoded rows (rows, width) in numpy."""
    logits = vectors @ ROW_WEIGHTS
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    answer: NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return answer


def row_classifier() -> onnx.ModelProto:
    """Return a graph of an encoded row times ROW_WEIGHTS, then softmax."""
    nodes = [
        helper.make_node("MatMul", ["row", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    return _model(
        nodes,
        [numpy_helper.from_array(ROW_WEIGHTS, "weights")],
        "probabilities",
        len(LABELS),
        _encoded_rows(),
    )


def row_sum() -> onnx.ModelProto:
    """Return a graph of the sum of an encoded row."""
    nodes = [helper.make_node("ReduceSum", ["row", "axes"], ["value"], keepdims=1)]
    return _model(
        nodes,
        [numpy_helper.from_array(np.array([1], dtype=np.int64), "axes")],
        "value",
        1,
        _encoded_rows(),
    )


def _encoded_rows() -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info("row", TensorProto.FLOAT, ["N", *COLUMNS.shape])


def probabilities(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute the predictions of the graph of `write_bundle` in numpy."""
    logits = pixels.reshape(len(pixels), -1).astype(np.float32) @ WEIGHTS
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    answer: NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return answer


def classifier() -> onnx.ModelProto:
    """Return a graph of flattened pixels times WEIGHTS, then softmax."""
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    return _model(
        nodes, [numpy_helper.from_array(WEIGHTS, "weights")], "probabilities", len(LABELS)
    )


def slow_classifier(num_layers: int = 4) -> onnx.ModelProto:
    """Return `classifier` with 25 million useless multiplications per image and layer.

    The work is proportional to the batch size: batching does not help, as in most networks on CPUs.
    """
    width = 256
    mixing = (np.random.default_rng(3).normal(size=(width, width)) / width**0.5).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("Div", ["flat", "white"], ["scaled"]),
        helper.make_node("Unsqueeze", ["scaled", "last"], ["column"]),
        helper.make_node("Mul", ["column", "ones"], ["work0"]),  # (N, 192, 256)
    ]
    for layer in range(num_layers):
        nodes.append(helper.make_node("MatMul", [f"work{layer}", "mixing"], [f"mixed{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"mixed{layer}"], [f"work{layer + 1}"]))
    nodes += [
        helper.make_node("ReduceMean", [f"work{num_layers}", "work_axes"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Unsqueeze", ["nothing", "last"], ["nothing_each"]),
        helper.make_node("MatMul", ["flat", "weights"], ["right"]),
        helper.make_node("Add", ["right", "nothing_each"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    constants = {
        "white": np.float32(255), "last": np.array([-1], dtype=np.int64),
        "ones": np.ones((1, 1, width), dtype=np.float32), "mixing": mixing,
        "work_axes": np.array([1, 2], dtype=np.int64), "zero": np.float32(0), "weights": WEIGHTS,
    }  # fmt: skip
    return _model(
        nodes,
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        "probabilities",
        len(LABELS),
    )


def log_of_mean() -> onnx.ModelProto:
    """Return a graph of the logarithm of the mean pixel: minus infinity for a black image."""
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("ReduceMean", ["flat", "axes"], ["mean"], keepdims=1),
        helper.make_node("Log", ["mean"], ["value"]),
    ]
    return _model(
        nodes, [numpy_helper.from_array(np.array([1], dtype=np.int64), "axes")], "value", 1
    )


def _model(
    nodes: list[onnx.NodeProto],
    constants: list[onnx.TensorProto],
    output: str,
    width: int,
    taken: onnx.ValueInfoProto | None = None,
) -> onnx.ModelProto:
    """Return a model with the input `taken`, by default images.

    The OOD score is the mean absolute value of a row, or of a picture scaled to [0, 1].
    """
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", SIZE_PX, SIZE_PX, 3])
    answer = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", width])
    scale, axes = (np.float32(255), [1, 2, 3]) if taken is None else (np.float32(1), [1])
    nodes = [
        helper.make_node("Cast", [(taken or image).name], ["score_numbers"], to=TensorProto.FLOAT),
        helper.make_node("Abs", ["score_numbers"], ["score_absolute"]),
        helper.make_node("Div", ["score_absolute", "score_scale"], ["score_scaled"]),
        helper.make_node("ReduceMean", ["score_scaled", "score_axes"], [SCORE_NAME], keepdims=0),
        *nodes,
    ]
    constants = [
        *constants,
        numpy_helper.from_array(np.array(scale), "score_scale"),
        numpy_helper.from_array(np.array(axes, dtype=np.int64), "score_axes"),
    ]
    score = helper.make_tensor_value_info(SCORE_NAME, TensorProto.FLOAT, ["N"])
    graph = helper.make_graph(nodes, "tiny", [taken or image], [answer, score], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_bundle(root: Path, graph: onnx.ModelProto | None = None, **changes: Any) -> LoadedBundle:
    """Write a bundle of one graph to `root`; `changes` replace fields of its manifest."""
    graph = graph or classifier()
    labels = [] if graph.graph.output[0].name == "value" else LABELS
    contracts = {"row": COLUMNS, "text": TEXTS, "image": CONTRACT}
    contract = contracts[graph.graph.input[0].name]
    payload = graph.SerializeToString()
    model = _write_model(root, "fp32", payload, ["cpu", "cuda"])
    return _write_manifest(root, model, contract, labels, changes)


def write_inert_bundle(
    root: Path,
    model: bytes = b"a graph",
    labels: list[str] = LABELS,
    contract: InputContract = CONTRACT,
) -> LoadedBundle:
    """Write a bundle for tests that never run its graph: `model` stands in for the fp16 variant."""
    described = _write_model(root, "fp16", model, ["tensorrt"])
    changes = {"max_batch_size": 8, "metrics": {}, "baseline": {}}
    return _write_manifest(root, described, contract, labels, changes)


def _write_model(
    root: Path, precision: Literal["fp32", "fp16"], payload: bytes, meant_for: list[Any]
) -> ModelFile:
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"model_{precision}.onnx"
    path.write_bytes(payload)
    return bundles.describe_model(path, precision, meant_for)


def _write_manifest(
    root: Path,
    model: ModelFile,
    contract: InputContract,
    labels: list[str],
    changes: Mapping[str, Any],
) -> LoadedBundle:
    kinds = {"columns": "table", "texts": "text", "images": "image"}
    target = "classification" if labels else "regression"
    task: Task = f"{kinds[contract.kind]}_{target}"
    output_kind = "probabilities" if labels else "value"
    manifest = Bundle(
        format_version=8,
        task=task,
        input=contract,
        input_name=input_name(contract),
        output=OutputContract.model_validate({"kind": output_kind, "labels": labels}),
        output_name=output_kind,
        max_batch_size=16,
        models={model.precision: model},
        golden_rows=None,
        left_out={},
        choice={},
        calibration=CALIBRATION,
        metrics={"accuracy": Metric(value=0.9, low=0.8, high=0.95, confidence=0.95, rows=100)},
        baseline={"accuracy": 0.4},
        card_sha256=None,
        drift_sha256=None,
        lineage=Lineage(git_revision=None, git_dirty=False, params={}, data=None, digests={}),
        versions={"onnx": onnx.__version__},
    )
    bundles.write_manifest(root, manifest.model_copy(update=changes))
    return bundles.load_bundle(root)


def engine_manifest_for(bundle: LoadedBundle, plan: bytes, **changes: Any) -> EngineManifest:
    """Return the manifest of the engine `plan`, built from the fp16 model of the bundle."""
    manifest = EngineManifest(
        format_version=2,
        engine_sha256=sha256_bytes(plan),
        model_sha256=bundle.manifest.models["fp16"].sha256,
        bundle_digest=bundle.digest,
        profile=Profile(smallest=1, optimal=4, largest=8),
        workspace_mib=256,
        machine=MACHINE,
        requested=TENSORRT_FP16,
        actual=TENSORRT_FP16,
        precision_read_from="engine",
    )
    return manifest.model_copy(update=changes)


def with_golden_rows(bundle: LoadedBundle, num_rows: int = 20) -> LoadedBundle:
    """Add golden rows to a bundle of `write_bundle`, which changes its manifest and version."""
    pixels = np.random.default_rng(5).integers(0, 256, (num_rows, *CONTRACT.shape), dtype=np.uint8)
    scores = (pixels.reshape(num_rows, -1).mean(axis=1) / 255).astype(np.float32)
    rows = GoldenRows(
        [f"row{number}" for number in range(num_rows)],
        pixels,
        Answers(probabilities(pixels), scores),
    )
    payload = golden_rows_bytes(rows)
    (bundle.root / FILE).write_bytes(payload)
    budgets = {
        variant: golden_budget(rows.answers, rows.answers, model.precision)
        for variant, model in bundle.manifest.models.items()
    }
    entry = GoldenFile(
        file=FILE, sha256=sha256_bytes(payload), bytes=len(payload), rows=num_rows, budgets=budgets
    )
    bundles.write_manifest(bundle.root, bundle.manifest.model_copy(update={"golden_rows": entry}))
    return bundles.load_bundle(bundle.root)


def hop(
    provider: str = "cpu",
    variant: str = "fp32",
    status: Literal["agrees", "differs", "not_executed"] = "agrees",
) -> Hop:
    """Return one hop of a certificate."""
    execution = Execution(
        backend="onnxruntime", provider=provider, precision=variant.split("_")[0], variant=variant
    )
    return Hop(
        name=f"onnxruntime/{provider}/{variant}",
        status=status,
        reason="" if status == "agrees" else "planted",
        requested=execution,
        actual=None if status == "not_executed" else execution,
        reference="torch",
        allowed=None,
        rows=10,
        max_difference=0.0,
        mean_difference=0.0,
        max_score_difference=None,
        flipped=[],
        worst_row=None,
        batches=[],
        metric=None,
        metric_changes={},
        latency_ms=0.1,
        rows_per_second=1e4,
    )


def gate(value: float | None = 0.9, at_least: float = 0.8, name: str = "accuracy") -> GateResult:
    """Return the result of a gate on all test rows; `value` None means an undefined metric."""
    measured = None
    if value is not None:
        measured = Metric(value=value, low=value, high=value, confidence=0.95, rows=100)
    return GateResult(
        name=name,
        key=f"evaluate.gates.{name}",
        where="",
        is_of_slice=False,
        min=at_least,
        max=None,
        measured=measured,
        remark="",
    )


def certify(
    path: Path,
    bundle: LoadedBundle,
    hops: list[Hop] | None = None,
    status: str = "certified",
    engine_digest: str | None = None,
    gates: list[GateResult] | None = None,
    versions: dict[str, str] | None = None,
) -> Path:
    """Write a certificate for `bundle` to `path`, with a passed gate unless `gates` are given."""
    results = [gate()] if gates is None else gates
    content: dict[str, Any] = {
        "format_version": 5, "user_code": [], "gates": verdict_of(results), "gate_results": results,
        "status": status, "metric": "accuracy", "bundle_digest": bundle.digest,
        "engine_digest": engine_digest, "digests": {},
        "hops": hops if hops is not None else [hop()], "hardware": {}, "versions": versions or {},
    }  # fmt: skip
    write_certificate(path, Certificate.model_validate(content))
    return path


def picture(seed: int = 0, size: tuple[int, int] = (SIZE_PX, SIZE_PX), kind: str = "PNG") -> bytes:
    """Return an encoded random RGB image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()
