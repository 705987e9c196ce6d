"""The screen after a run: what it shows, and that it refuses what is missing or does not fit."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from slipway.artifacts.bundle import (
    Bundle,
    Lineage,
    Metric,
    OutputContract,
    describe_model,
    load_bundle,
    write_manifest,
)
from slipway.artifacts.certificate import Certificate, Execution, Hop, write_certificate
from slipway.artifacts.gates import GateResult, verdict_of
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import Task
from slipway.reports.summary import main, summary
from slipway.system import files
from slipway.system.command_run import run_command
from slipway.system.errors import BundleError, CertificateError, SchemaError, SlipwayError
from tests.calibrations import CALIBRATION
from tests.serving.bundles import gate

REASON = "no NVIDIA GPU: libcuda.so.1 cannot be loaded"
INPUT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)
Backend = Literal["torch", "onnxruntime", "tensorrt", "http"]


def metric(value: float) -> Metric:
    return Metric(value=value, low=value - 0.01, high=value + 0.01, confidence=0.95, rows=270)


def hop(
    name: str,
    backend: Backend,
    variant: str,
    *,
    flipped: int = 0,
    actual_provider: str | None = "cpu",
) -> Hop:
    requested = Execution(backend=backend, provider="cpu", precision="fp32", variant=variant)
    ran = actual_provider is not None
    return Hop(
        name=name,
        status=("differs" if flipped else "agrees") if ran else "not_executed",
        reason="" if ran else REASON,
        requested=requested,
        actual=requested.model_copy(update={"provider": actual_provider}) if ran else None,
        reference=None if backend == "torch" else "torch",
        allowed=None,
        rows=270,
        max_difference=2.5e-7 if ran else None,
        mean_difference=1e-8 if ran else None,
        max_score_difference=None,
        flipped=[f"{row:032x}" for row in range(flipped)],
        worst_row=None,
        batches=[],
        metric=metric(0.9889) if ran else None,
        metric_changes={},
        latency_ms=0.5 if ran else None,
        rows_per_second=12345.6 if ran else None,
    )


def write_run(
    root: Path,
    task: Task,
    hops: list[Hop],
    gates: Sequence[GateResult] = (),
    train: dict[str, Any] | None = None,
) -> None:
    """Write everything that the summary reads; `train` are the params of the training."""
    folder = root / "artifacts/bundle"
    files.write_bytes(folder / "model_fp16.onnx", bytes(1_500_000))
    labels = ["ape", "bee"] if task == "image_classification" else []
    names = ("accuracy", "f1_macro") if labels else ("rmse", "r2")
    manifest = Bundle(
        format_version=8,
        task=task,
        input=INPUT,
        input_name="image",
        output=OutputContract(kind="probabilities" if labels else "value", labels=labels),
        output_name="probabilities",
        max_batch_size=8,
        models={"fp16": describe_model(folder / "model_fp16.onnx", "fp16", ["cpu"])},
        left_out={},
        choice={},
        calibration=CALIBRATION,
        golden_rows=None,
        metrics={},
        baseline=dict.fromkeys(names, 0.1),
        card_sha256=None,
        drift_sha256=None,
        lineage=Lineage(
            git_revision=None, git_dirty=False, params={"train": train or {}}, data=None, digests={}
        ),
        versions={},
    )
    write_manifest(folder, manifest)
    certificate = Certificate(
        format_version=5,
        status="certified",
        gates=verdict_of(gates),
        gate_results=list(gates),
        metric=names[0],
        bundle_digest=load_bundle(folder).digest,
        engine_digest=None,
        digests={},
        user_code=[],
        hops=hops,
        hardware={},
        versions={},
    )
    write_certificate(root / "artifacts/certificate.json", certificate)
    metrics = [
        {"name": name, **metric(value).model_dump()}
        for name, value in zip(names, (0.9852, 0.9847), strict=True)
    ]
    files.write_json(root / "metrics/evaluate.json", {"metrics": metrics})
    files.write_json(
        root / "reports/clean.json",
        {"read": 1800, "kept": 1797, "refused": {"undecodable": {"count": 3, "examples": []}}},
    )
    files.write_json(
        root / "reports/split.json",
        {"splits": {"train": {"rows": 1257}, "val": {"rows": 270}, "test": {"rows": 270}}},
    )


HOPS = [
    hop("torch", "torch", "weights"),
    hop("onnxruntime/cpu/fp16", "onnxruntime", "fp16", flipped=2),
    hop("tensorrt/fp16", "tensorrt", "fp16", actual_provider=None),
    hop("http", "http", "fp16"),
]


def test_summary_shows_rows_metrics_and_what_to_do_now_and_no_line_of_verify(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    text = summary(tmp_path)
    for part in (
        "image_classification, certified, gates none",
        "read 1800, kept 1797, refused 3 (undecodable 3)",
        "train 1257, val 270, test 270",
        "trained network on 270 test rows",
        "accuracy  0.9852  95 % 0.9752 to 0.9952    0.1000     +0.8852",
        "f1_macro",
        "slipway serve",
        "slipway show",
        "bentoml serve slipway.serving.service:Slipway",
    ):
        assert part in text
    assert "what now" in text.splitlines()[-6]
    assert "hints" not in text
    assert not any(words in text for words in (REASON, "268/270", "onnxruntime"))


def test_summary_hints_at_too_few_optimizer_steps(tmp_path: Path) -> None:
    train = {"epochs": 4, "batch_size": 128}
    write_run(tmp_path, "image_classification", HOPS, train=train)
    assert "36 optimizer steps in 4 epochs are few" in summary(tmp_path)
    write_run(tmp_path, "image_classification", HOPS, train=train | {"epochs": 40})
    assert "hints" not in summary(tmp_path)


def test_summary_has_no_hint_at_optimizer_steps_for_trees(tmp_path: Path) -> None:
    train = {"network": "lightgbm", "epochs": 4, "batch_size": 128}
    write_run(tmp_path, "image_classification", HOPS, train=train)
    assert "hints" not in summary(tmp_path)


def test_summary_shows_each_metric_with_a_gate(tmp_path: Path) -> None:
    gates = [
        GateResult(
            name=name,
            key=f"evaluate.gates.{name}",
            where="",
            is_of_slice=False,
            min=0.1,
            max=None,
            measured=metric(0.4351),
            remark="",
        )
        for name in ("balanced_accuracy", "my_own")
    ]
    write_run(tmp_path, "image_classification", HOPS, gates)
    path = tmp_path / "metrics/evaluate.json"
    measured = json.loads(path.read_text())["metrics"]
    measured.append({"name": "balanced_accuracy", **metric(0.4351).model_dump()})
    files.write_json(path, {"metrics": measured})
    text = summary(tmp_path)
    assert "balanced_accuracy  0.4351" in text
    assert "my_own" not in text


def test_summary_hints_at_too_few_test_rows(tmp_path: Path) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    splits = {"splits": {"train": {"rows": 90}, "val": {"rows": 20}, "test": {"rows": 19}}}
    files.write_json(tmp_path / "reports/split.json", splits)
    assert "19 test rows are few" in summary(tmp_path)


def test_summary_names_a_logger_that_failed(tmp_path: Path) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    files.write_json(tmp_path / "metrics/train.json", {"failed_loggers": "mlflow"})
    assert "the logger mlflow failed" in summary(tmp_path)


@pytest.mark.parametrize(("value", "outcome"), [(0.5, "missed"), (None, "unjudged")])
def test_summary_exits_with_1_on_a_failed_gate_and_names_value_limit_and_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: float | None,
    outcome: str,
) -> None:
    write_run(tmp_path, "image_classification", HOPS, [gate(), gate(value, name="f1_macro")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: main(Path()))
    assert ended.value.code == 1
    output, said = capsys.readouterr()
    assert f"certified, gates {outcome}" in output
    assert "make serve" not in output
    found = "0.5 (95 % interval 0.5 to 0.5, 100 rows)" if value else "not defined"
    assert (
        f"{outcome}: f1_macro is {found}, required at least 0.8 "
        "(evaluate.gates.f1_macro in params.yaml)" in said
    )
    assert "1 of 2 quality gates" in said
    assert "change the gate in params.yaml, then run `slipway run`" in said


def test_summary_exits_with_0_if_every_gate_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "image_classification", HOPS, [gate()])
    main(tmp_path)
    output = capsys.readouterr().out
    assert "certified, gates passed" in output
    assert "slipway serve" in output


def test_the_summary_of_an_agreeing_run_fits_into_100_columns(tmp_path: Path) -> None:
    long = [
        hop(f"onnxruntime/cpu/{variant}", "onnxruntime", "fp16")
        for variant in ("fp32", "fp16", "int8", "int8_tensorrt")
    ]
    write_run(tmp_path, "image_classification", [HOPS[0], *long, HOPS[3]])
    assert max(len(line) for line in summary(tmp_path).splitlines()) <= 100


def test_the_summary_of_a_numeric_target_shows_rmse_and_r2(tmp_path: Path) -> None:
    write_run(tmp_path, "image_regression", HOPS)
    text = summary(tmp_path)
    assert "rmse" in text
    assert "r2" in text
    assert "accuracy" not in text


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("artifacts/bundle/bundle.json", BundleError),
        ("artifacts/certificate.json", CertificateError),
        ("metrics/evaluate.json", SchemaError),
        ("reports/clean.json", SchemaError),
        ("reports/split.json", SchemaError),
    ],
)
def test_summary_names_a_missing_file_and_the_command_that_writes_it(
    tmp_path: Path, missing: str, error: type[SlipwayError]
) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    (tmp_path / missing).unlink()
    with pytest.raises(error) as caught:
        summary(tmp_path)
    assert missing in str(caught.value)
    assert re.search("Run `(slipway run|dvc repro [a-z-]+)", str(caught.value))


@pytest.mark.parametrize("text", ["", "[]", '{"read": 1}'])
def test_summary_refuses_a_malformed_report(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    (tmp_path / "reports/clean.json").write_text(text)
    with pytest.raises(SchemaError, match="dvc repro --force clean"):
        summary(tmp_path)


def test_a_certificate_of_another_bundle_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "image_classification", HOPS)
    path = tmp_path / "artifacts/bundle/bundle.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"max_batch_size": 9}))
    with pytest.raises(CertificateError, match="slipway run"):
        summary(tmp_path)
