"""A table's network and its graphs: every hop except HTTP, from the packed rows on."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from numpy.typing import NDArray

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.uncertainty import Answers, read_calibration
from slipway.config.params import Params, parse_params
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.store.packed import open_split, read_manifest
from slipway.export.bundle_writer import ExportRows, Trained
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.hops import HopRunner
from slipway.export.certification.measurement import read_test_rows
from slipway.export.certification.verdict import make_certificate
from slipway.export.graphs.graph import check_graph, export_graph, prove_parity
from slipway.export.graphs.half_precision import kept_in_fp32
from slipway.export.graphs.variants import fp16_graph, make_variant
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Resampling
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.system.errors import ParityError
from slipway.training.networks.networks import (
    NetworkSpec,
    build_network,
    load_network,
)
from slipway.training.networks.tabm import RowEncoding, TableNetwork
from slipway.training.uncertainty.calibrated_network import calibrated as calibrated_as
from tests import warm_starts
from tests.calibrations import CALIBRATION, calibrated
from tests.export.conftest import write_reports
from tests.packed_rows import write_split_rows
from tests.packed_tables import fit_contract, write_packed_table
from tests.project_params import of_kind

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
NUM_ROWS = {"train": 1500, "val": 300, "test": 301}
SMALL = {
    "num_submodels": 4,
    "num_blocks": 2,
    "width": 32,
    "dropout": 0.1,
    "embedding_size": 8,
    "num_bins": 24,
}


def params_for(task: Task) -> Params:
    content = of_kind(yaml.safe_load((ROOT / "params.yaml").read_text()), task)
    content["train"] |= {
        "network": "tabm",
        "network_arguments": SMALL,
        "epochs": 6,
        "batch_size": 64,
        "learning_rate": 0.01,
    }
    content["train"] |= {
        "weight_decay": 0.0003,
        "warmup_epochs": 1.0,
        "devices": 1,
        "accelerator": "cpu",
    }
    gate = (
        {"accuracy": {"min": 0.85, "max": None}}
        if kind_of(task).target.has_classes
        else {"r2": {"min": 0.9, "max": None}}
    )
    content["evaluate"] |= {"gates": gate, "bootstrap_samples": 100}
    content["export"] |= {"max_batch_size": 32, "quantization_samples": 256}
    content["compile"] |= {"optimal_batch_size": 8}
    content["verify"] |= {
        "batch_seconds": 1,
        "timing_rounds": 3,
        "max_metric_loss": {
            "fp16": 0.004,
            "int8": 0.02,
            "int8_dynamic": 0.02,
            "int8_tensorrt": 0.02,
        },
    }
    return parse_params(content)


def run_stage(folder: Path, stage: str) -> str:
    done = warm_starts.run(
        [f"slipway.stages.{stage}"], folder, os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "task", ["table_regression", pytest.param("table_classification", marks=pytest.mark.nightly)]
)
def test_every_backend_agrees_with_the_network_on_packed_table_rows(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_for(task)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    write_packed_table(tmp_path / "data/packed", task, NUM_ROWS)
    write_split_rows(tmp_path / "data")
    write_reports(tmp_path, NUM_ROWS)
    write_plan(tmp_path / "data/augmented", plan_from_params(params.augment, params.seed))
    for stage in ("train", "evaluate", "prune", "export", "compile"):
        run_stage(tmp_path, stage)
    monkeypatch.chdir(tmp_path)

    bundle, artifacts = load_bundle(Path("artifacts/bundle")), Path("artifacts")
    calibration = read_calibration(artifacts / "calibration.json")
    assert bundle.manifest.calibration == calibration
    network = calibrated_as(
        load_network(artifacts / "model"), calibration, artifacts / "ood_score.safetensors"
    )
    manifest = read_manifest(Path("data/packed"))
    contract = bundle.manifest.input
    assert isinstance(contract, ColumnContract)
    assert contract.background  # rows that explanations compare with, which only a bundle has
    without = contract.model_copy(update={"background": []})
    assert (bundle.manifest.input_name, without) == ("row", manifest.input)
    comparison = HopComparison(
        read_test_rows(Path("data/packed"), manifest.classes), Resampling(7, 100, 0.95)
    )
    runner = HopRunner(comparison, bundle, network, params.verify)
    measured = [runner.torch, *runner.run_onnx(), runner.run_engine(Path("artifacts/engine"))]
    hops = [hop for hop, answers in measured if answers is not None]
    assert [hop.name for hop in hops if hop.actual and hop.actual.provider == "cpu"] == [
        "torch",
        "onnxruntime/cpu/fp32",
        "onnxruntime/cpu/fp16",
        "onnxruntime/cpu/int8",
        "onnxruntime/cpu/int8_dynamic",
        "onnxruntime/cpu/int8_tensorrt",
    ]
    assert {hop.status for hop in hops} == {"agrees"}, [(hop.name, hop.reason) for hop in hops]
    assert {hop.rows for hop in hops} == {NUM_ROWS["test"]}
    assert make_certificate(bundle, hops, {}, [], draft=True).metric == (
        kind_of(task).target.headline
    )
    assert json.loads(Path("metrics/evaluate.json").read_text())["rows"] == NUM_ROWS["test"]
    assert "Worst errors" in Path("reports/evaluate.html").read_text()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, ExportRows, bytes]:
    """Return an untrained network with targets beyond fp16's range, its rows and its fp32 graph."""
    root = tmp_path_factory.mktemp("table")
    manifest = write_packed_table(root, "table_regression", NUM_ROWS)
    torch.manual_seed(0)
    spec = NetworkSpec(
        task=manifest.task,
        name="tabm",
        arguments=SMALL,
        classes=[],
        input=manifest.input,
        mean=[],
        std=[],
        target_scale=manifest.target_scale,
    )
    network = build_network(spec).eval()
    assert isinstance(network, TableNetwork)
    assert isinstance(network.backbone.pieces, torch.nn.Parameter)
    torch.nn.init.normal_(network.backbone.pieces)
    rows = ExportRows(
        open_split(root, manifest, "train").inputs[:256], open_split(root, manifest, "val")
    )
    trained = Trained(
        calibrated(network, rows.samples, None),
        spec.task,
        spec.input,
        [],
        "0" * 64,
        CALIBRATION,
        {},
        {},
    )
    return (
        trained,
        rows,
        export_graph(trained.network, spec.input, trained.output, opset=18, max_batch_size=64),
    )


def answers(graph: bytes, rows: NDArray[Any]) -> Answers:
    return run_in_batches(
        open_onnx(graph, variant="fp32", precision="fp32", provider="cpu", num_threads=1).run,
        rows,
        64,
    )


def test_table_graph_predicts_as_the_network_at_every_batch_size(
    exported: tuple[Trained, ExportRows, bytes],
) -> None:
    trained, rows, graph = exported
    check_graph(graph, trained.input, trained.output)
    assert (
        prove_parity(
            trained.network,
            graph,
            rows.validation.inputs,
            batch_sizes=[1, 2, 7, 64],
            max_difference=1e-5,
        )
        < 1e-5
    )
    with pytest.raises(ParityError, match="batch of 65"):  # beyond what it was exported for
        prove_parity(
            _never_the_same(), graph, rows.validation.inputs, batch_sizes=[65], max_difference=0.0
        )


def _never_the_same() -> Any:
    class NeverTheSame(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            raise ValueError("never the same")

    return NeverTheSame()


@pytest.mark.parametrize("variant", ["fp16", "int8", "int8_dynamic", "int8_tensorrt"])
def test_every_variant_of_a_table_network_predicts_as_fp32_does(
    exported: tuple[Trained, ExportRows, bytes], variant: str, tmp_path: Path
) -> None:
    trained, rows, graph = exported
    smaller, _ = make_variant(variant, graph, rows.samples, tmp_path, lambda graph: 0.0, 0.0)
    check_graph(smaller, trained.input, trained.output)
    expected, found = (
        answers(graph, rows.validation.inputs[:]),
        answers(smaller, rows.validation.inputs[:]),
    )
    off = np.square(found.outputs - expected.outputs).mean() ** 0.5 / expected.outputs.std()
    assert off < (0.002 if variant == "fp16" else 0.1)
    outliers = np.array(
        [[1e30, -1e30, 1e30, 0.0, 0.0, 1.0]], dtype=np.float32
    )  # three numbers, a boolean, an indicator, a code
    assert all(np.isfinite(numbers).all() for numbers in answers(smaller, outliers))


def test_fp16_graph_of_a_table_keeps_bin_positions_and_target_scaling_in_fp32(
    exported: tuple[Trained, ExportRows, bytes],
) -> None:
    _, rows, graph = exported
    half = onnx.load_model_from_string(fp16_graph(graph, rows.samples)).graph
    kinds = {tensor.name: tensor.data_type for tensor in half.initializer}
    for name in (
        "encoding.edges",
        "encoding.inverse_widths",
        "encoding.codes_0",
        "target_mean",
        "target_std",
    ):
        assert kinds[f"network.{name}"] == onnx.TensorProto.FLOAT, name
    assert kinds["network.backbone.pieces"] == onnx.TensorProto.FLOAT16
    casts = [node for node in half.node if node.op_type == "Cast"]
    assert not {node.input[0] for node in casts} & {
        output for node in casts for output in node.output
    }, "rounded and cast back"


def test_a_graph_without_layers_is_converted_to_fp16_completely() -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    assert kept_in_fp32(onnx.helper.make_graph([node], "relu", [], [])) == set()


def test_category_codes_above_2048_that_fp16_cannot_represent_stay_distinct() -> None:
    contract = fit_contract({"place": [f"place {index:04d}" for index in range(3000)]})
    encoding = RowEncoding(contract, 8)
    codes = torch.tensor([[2049.0], [2050.0], [3000.0]])
    assert encoding(codes)[2].argmax(dim=1).tolist() == [2048, 2049, 2999]
