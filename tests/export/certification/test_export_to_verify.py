"""The stages export, compile and verify, run as DVC runs them on a small trained project."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import check_certificate, read_certificate
from slipway.artifacts.gates import write_gates
from slipway.config.params import Params
from slipway.runtimes.rebuild import open_rebuilt
from slipway.runtimes.runtime import why_unavailable
from slipway.system.errors import EngineError, GateMissedError
from stages import compile as compile_stage
from tests import warm_starts
from tests.export.conftest import NUM_ROWS, Project
from tests.serving.bundles import gate

pytestmark = pytest.mark.process
NO_GPU = why_unavailable("tensorrt")


@pytest.fixture
def project(classifier: Project, tmp_path: Path, root: Path, export_params: Params) -> Path:
    """Return a folder with the repository's code and a trained project."""
    folder = tmp_path / "project"
    shutil.copytree(classifier.root, folder)
    (folder / "slipway").symlink_to(root / "slipway")
    write_params(folder, export_params.model_dump(mode="json"))
    return folder


def write_params(folder: Path, content: dict[str, Any]) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump(content))


def run_stage(folder: Path, stage: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "BENTOML_HOME": str(folder / ".bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    return warm_starts.run([f"slipway.stages.{stage}"], folder, environment, timeout=300)


@pytest.mark.nightly(seconds=40)
def test_export_compile_and_verify_produce_a_certificate_that_the_service_accepts(
    project: Path,
) -> None:
    for stage in ("export", "compile", "verify"):
        result = run_stage(project, stage)
        assert result.returncode == 0, result.stderr
    bundle = load_bundle(project / "artifacts/bundle")
    certificate = read_certificate(project / "artifacts/certificate.json")
    check_certificate(certificate, bundle, accept_draft=False)
    layout = json.loads((project / "artifacts/model/model.json").read_text())["segments"][0]
    assert certificate.training
    assert certificate.training[0].startswith(f"{layout['strategy']} on ")
    hops = {hop.name: hop for hop in certificate.hops}
    assert (hops["http"].rows, hops["http"].flipped, hops["http"].max_difference) == (41, [], 0.0)
    assert hops["http"].reference == f"onnxruntime/cpu/{bundle.manifest.choice['cpu'].variant}"
    leaderboard = json.loads((project / "reports/leaderboard.json").read_text())
    assert leaderboard["choice"] == {
        name: choice.model_dump(mode="json") for name, choice in bundle.manifest.choice.items()
    }
    assert "Chosen on the CPU" in (project / "reports/leaderboard.html").read_text()
    assert "onnxruntime/cpu/int8_tensorrt" in result.stdout
    if NO_GPU:
        skipped = {name for name, hop in hops.items() if hop.status == "not_executed"}
        assert {
            "tensorrt/fp16",
            "onnxruntime/tensorrt/fp16",
            "onnxruntime/tensorrt/int8_tensorrt",
        } <= skipped
        assert "onnxruntime/tensorrt/fp32" not in hops  # it would be TF32
    assert bundle.manifest.golden_rows is not None
    assert bundle.manifest.golden_rows.rows == NUM_ROWS["val"]
    assert set(bundle.manifest.golden_rows.budgets) == set(bundle.manifest.models)
    metrics = json.loads((project / "metrics/verify.json").read_text())
    assert metrics["certified"] == 1
    assert {"accuracy_change", "accuracy_change_low", "accuracy_change_high"} <= set(
        metrics["hops"][-1]
    )
    assert [(check.batch_size, check.rows) for check in hops["onnxruntime/cpu/fp32"].batches] == [
        (1, 41),
        (2, 41),
        (7, 41),
        (32, 41),
    ]
    assert hops["http"].max_score_difference == 0.0
    assert (
        "No hop differs by more than verify allows."
        in (project / "reports/verify.html").read_text()
    )
    assert bundle.manifest.lineage.params["export"]["max_batch_size"] == 32
    assert bundle.manifest.lineage.digests["artifacts/model/weights.safetensors"]
    assert not list(project.rglob("*.partial"))


def test_verify_writes_the_refused_certificate_and_names_the_first_fault(
    project: Path, classifier: Project
) -> None:
    content = json.loads((project / "artifacts/bundle/bundle.json").read_text())
    content["output"]["labels"] = content["output"]["labels"][::-1]
    (project / "artifacts/bundle/bundle.json").write_text(json.dumps(content))
    assert run_stage(project, "compile").returncode == 0
    result = run_stage(project, "verify")
    assert result.returncode == 1
    assert "error: hop onnxruntime/cpu/fp32 differs from torch" in result.stderr
    assert "Traceback" not in result.stderr
    certificate = read_certificate(project / "artifacts/certificate.json")
    assert certificate.status == "refused"
    statuses = {hop.name: hop.status for hop in certificate.hops[-2:]}
    assert statuses == {"http": "not_executed", "grpc": "not_executed"}
    assert (
        "The first bad hop is onnxruntime/cpu/fp32" in (project / "reports/verify.html").read_text()
    )


def test_missed_quality_gate_is_recorded_in_the_certificate_and_fails_no_stage(
    project: Path,
) -> None:
    judged = project / "metrics/evaluate.json"
    write_gates(project / "metrics/gates.json", [gate(), gate(0.5, name="f1_macro")], judged)
    assert run_stage(project, "compile").returncode == 0
    verified = run_stage(project, "verify")
    assert verified.returncode == 0, verified.stderr
    assert "gates: 1 of 2 passed" in verified.stdout
    certificate = read_certificate(project / "artifacts/certificate.json")
    assert (certificate.status, certificate.gates) == ("certified", "missed")
    assert {hop.name: hop.status for hop in certificate.hops}[
        "http"
    ] == "agrees"  # a private service was ready
    page = (project / "reports/verify.html").read_text()
    assert "missed: f1_macro is 0.5" in page
    assert "not served, canaried, released or packed" in page
    bundle = load_bundle(project / "artifacts/bundle")
    with pytest.raises(GateMissedError):
        check_certificate(certificate, bundle, accept_draft=False)
    check_certificate(certificate, bundle, accept_draft=False, accept_missed_gates=True)


@pytest.mark.nightly(seconds=13)
def test_verify_refuses_gates_of_other_metrics_than_the_bundles(project: Path) -> None:
    for stage in ("export", "compile"):
        assert run_stage(project, stage).returncode == 0
    other = project / "other.json"
    other.write_text("{}")
    write_gates(project / "metrics/gates.json", [gate()], other)
    content = json.loads((project / "metrics/gates.json").read_text())
    content["judged"][0]["path"] = "metrics/evaluate.json"
    (project / "metrics/gates.json").write_text(json.dumps(content))
    result = run_stage(project, "verify")
    assert result.returncode == 1
    assert "metrics/evaluate.json changed since bundle" in result.stderr
    assert not (project / "artifacts/certificate.json").exists()


@pytest.mark.nightly(seconds=16)
def test_lineage_of_a_bundle_does_not_depend_on_quality_gates(
    project: Path, export_params: Params
) -> None:
    lineages = []
    for least in (0.1, 0.9):
        content = export_params.model_dump(mode="json")
        content["evaluate"] |= {
            "gates": {"accuracy": {"min": least, "max": None}},
            "max_regression": least,
        }
        write_params(project, content)
        assert run_stage(project, "export").returncode == 0
        params = load_bundle(project / "artifacts/bundle").manifest.lineage.params
        assert not {"gates", "slice_gates", "max_regression"} & params["evaluate"].keys()
        lineages.append(params)
    assert lineages[0] == lineages[1]


def test_an_altered_model_byte_stops_verify_and_leaves_no_certificate(project: Path) -> None:
    assert run_stage(project, "compile").returncode == 0
    path = project / "artifacts/bundle/model_int8.onnx"
    payload = bytearray(path.read_bytes())
    payload[1000] ^= 1
    path.write_bytes(payload)
    result = run_stage(project, "verify")
    assert result.returncode == 1
    assert "model_int8.onnx was altered" in result.stderr
    assert not (project / "artifacts/certificate.json").exists()


def test_failed_export_leaves_the_old_bundle_unchanged(project: Path) -> None:
    before = load_bundle(project / "artifacts/bundle").digest
    (project / "metrics/evaluate.json").write_text("{}")
    result = run_stage(project, "export")
    assert result.returncode == 1
    assert "metrics/evaluate.json" in result.stderr
    assert load_bundle(project / "artifacts/bundle").digest == before
    assert sorted(path.name for path in (project / "artifacts").iterdir()) == [
        "bundle",
        "calibration.json",
        "model",
        "ood_score.safetensors",
        "pruned",
    ]


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU with TensorRT")
def test_without_a_gpu_compile_leaves_a_skipped_build_with_the_reason(
    project: Path, monkeypatch: pytest.MonkeyPatch, export_params: Params
) -> None:
    monkeypatch.chdir(project)
    compile_stage.run(export_params)
    assert [path.name for path in (project / "artifacts/engine").iterdir()] == [
        "skipped_build.json"
    ]
    skipped_build = json.loads((project / "artifacts/engine/skipped_build.json").read_text())
    assert (
        skipped_build["status"],
        skipped_build["reason"],
        skipped_build["requested"]["variant"],
    ) == (
        "not_executed",
        NO_GPU,
        "fp16",
    )


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU with TensorRT")
def test_without_a_gpu_a_required_engine_fails_the_stage(
    project: Path, monkeypatch: pytest.MonkeyPatch, export_params: Params
) -> None:
    monkeypatch.chdir(project)
    required = export_params.model_copy(
        update={"compile": export_params.compile.model_copy(update={"require": True})}
    )
    with pytest.raises(
        EngineError, match=r"compile\.require is true, but no engine can be built here"
    ):
        compile_stage.run(required)
    assert not (project / "artifacts/engine").exists()


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
def test_tensorrt_engine_agrees_with_the_network_on_a_gpu(project: Path) -> None:
    for stage in ("export", "compile", "verify"):
        result = run_stage(project, stage)
        assert result.returncode == 0, result.stderr
    hops = {hop.name: hop for hop in read_certificate(project / "artifacts/certificate.json").hops}
    assert hops["tensorrt/fp16"].status == "agrees"
    assert hops["onnxruntime/cuda/fp32"].status == "agrees"
    assert hops["onnxruntime/tensorrt/fp16"].status == "agrees"


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
def test_compile_without_params_rebuilds_an_engine_of_another_gpu(project: Path) -> None:
    for stage in ("export", "compile"):
        assert run_stage(project, stage).returncode == 0
    engine_manifest = json.loads((project / "artifacts/engine/engine_manifest.json").read_text())
    engine_manifest["machine"]["gpu"] = "another"
    (project / "artifacts/engine/engine_manifest.json").write_text(json.dumps(engine_manifest))
    (project / "params.yaml").unlink()
    result = run_stage(project, "compile")
    assert result.returncode == 0, result.stderr
    runner, certificate = open_rebuilt(
        project / "artifacts/rebuilt_engine", load_bundle(project / "artifacts/bundle")
    )
    assert runner.actual == certificate.execution
