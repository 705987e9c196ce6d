"""Gates judge the measured metrics, and each metric is shown beside its baseline."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts import locations
from slipway.artifacts.gates import not_passed, read_gates
from slipway.kinds.registry import Task
from slipway.kinds.targets import CLASS
from slipway.reports.evaluation.record import read_baseline, read_metrics, read_user_code
from slipway.system.errors import ParamsError, SchemaError
from stages import evaluate
from tests.reports.conftest import (
    NUM_TEST_ROWS,
    params_with,
    targets,
)
from tests.reports.evaluated import OUTPUTS, Project, mark_leaked

# gates


def test_a_model_that_meets_its_gates_passes(project: Project) -> None:
    project("image_classification")
    evaluate.run(
        params_with(
            "image_classification",
            {"accuracy": {"min": 16 / 21, "max": None}, "log_loss": {"min": None, "max": 36.05}},
        )
    )
    assert "2 of 2 passed" in evaluate.PAGE.read_text()


def test_a_user_metric_is_measured_gated_and_shown_like_a_built_in_metric(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    sys.modules.pop("own_scores", None)
    Path("own_scores.py").write_text(
        "def hits(targets, outputs):\n    return (outputs.argmax(1) == targets).mean()\n"
    )
    mark_leaked(wrong_rows=True)
    gates: dict[str, dict[str, float | None]] = {"hits": {"min": 0.9, "max": None}}
    evaluate.run(
        params_with(
            "image_classification",
            gates,
            metrics=["own_scores:hits"],
            slice_gates={"hits": {"min": 0.1, "max": None}},
            slice_min_rows=5,
        )
    )
    content = json.loads(locations.METRICS.read_text())
    assert (content["hits"], content["hits_without_leaked"]) == (content["accuracy"], 1)
    assert read_baseline(locations.METRICS)["hits"] == read_baseline(locations.METRICS)["accuracy"]
    measured = read_metrics(locations.METRICS)["hits"]
    assert measured.low < measured.value < measured.high
    results = read_gates(locations.GATES).results
    assert (results[0].measured, results[0].outcome) == (measured, "missed")
    assert {result.name for result in results if result.is_of_slice} == {"hits"}
    (code,) = read_user_code(locations.METRICS)
    assert (code.key, code.name) == ("evaluate.metrics", "own_scores:hits")
    assert "hits 0.7619" in capsys.readouterr().out
    assert evaluate.PAGE.read_text().count("Hits") >= 2


def test_every_missed_gate_is_recorded_with_its_interval_rows_and_key_and_fails_nothing(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    gates: dict[str, dict[str, float | None]] = {
        "accuracy": {"min": 0.77, "max": None},
        "f1_macro": {"min": 0.9, "max": None},
        "recall_macro": {"min": 0.1, "max": None},
    }
    evaluate.run(params_with("image_classification", gates))
    report = read_gates(locations.GATES)
    assert report.gates == "missed"
    assert {result.name: result.outcome for result in report.results} == {
        "accuracy": "missed",
        "f1_macro": "missed",
        "recall_macro": "passed",
    }
    line = "missed: accuracy is 0.7619 (95 % interval"
    bounds = "21 rows), required at least 0.77 (evaluate.gates.accuracy in params.yaml)"
    printed = capsys.readouterr().out
    assert "gates: 1 of 3 passed" in printed
    assert line in printed
    assert bounds in printed
    assert all(path.is_file() for path in OUTPUTS)
    assert "2 of 3 missed or unjudged" in evaluate.PAGE.read_text()


def test_a_changed_gate_changes_no_file_that_export_reads(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.5, "max": None}}))
    before = {path: path.read_bytes() for path in OUTPUTS}
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.9, "max": None}}))
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert changed == {locations.GATES, evaluate.PAGE}


def test_a_gate_file_whose_verdict_contradicts_its_results_is_refused(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.9, "max": None}}))
    content = json.loads(locations.GATES.read_text())
    locations.GATES.write_text(json.dumps(content | {"gates": "passed"}))
    with pytest.raises(SchemaError, match="gates is 'passed', but the results say 'missed'"):
        read_gates(locations.GATES)
    locations.GATES.unlink()
    with pytest.raises(SchemaError, match="dvc repro evaluate"):
        read_gates(locations.GATES)


def test_without_a_gate_the_verdict_is_none(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    assert read_gates(locations.GATES).gates == "none"


def test_every_metric_is_shown_beside_its_baseline(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every split has the same rows, so the baseline's accuracy is the majority's fraction."""
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    baseline, share = (
        read_baseline(locations.METRICS),
        np.bincount(targets("image_classification").astype(int)).max() / NUM_TEST_ROWS,
    )
    assert baseline.keys() == read_metrics(locations.METRICS).keys()
    assert baseline["accuracy"] == pytest.approx(share)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.strip().startswith("accuracy ")]
    assert f"), baseline {share:.4f}; f1_macro" in line
    assert len(printed.splitlines()) <= 6
    assert f"baseline {share:.4f}" in evaluate.PAGE.read_text()


def test_the_baseline_of_a_number_is_the_mean_target_of_the_training_rows(project: Project) -> None:
    project("image_regression")
    evaluate.run(params_with("image_regression", {}))
    baseline = read_baseline(locations.METRICS)
    assert baseline["rmse"] == pytest.approx(targets("image_regression").std())
    assert baseline["r2"] == pytest.approx(0, abs=1e-9)


def test_a_metric_that_the_rows_do_not_define_leaves_its_gate_unjudged(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}, top_k=3))
    assert (
        "no top_k_accuracy: with 3 classes, the best 3 always include the right one"
        in capsys.readouterr().out
    )
    assert "top_k_accuracy" not in read_metrics(locations.METRICS)
    gates: dict[str, dict[str, float | None]] = {
        "top_k_accuracy": {"min": 0.5, "max": None},
        "accuracy": {"min": 0.1, "max": None},
    }
    evaluate.run(params_with("image_classification", gates, top_k=3))
    report = read_gates(locations.GATES)
    assert report.gates == "unjudged"
    [result] = not_passed(report.results)
    assert result.text.startswith("top_k_accuracy is not defined, required at least 0.5")
    assert "the best 3 always include the right one" in result.text
    assert "unjudged" in evaluate.PAGE.read_text()


def test_a_gate_on_the_best_k_classes_is_judged(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(
        params_with("image_classification", {"top_k_accuracy": {"min": 0.1, "max": None}}, top_k=2)
    )
    assert "no top_k_accuracy" not in capsys.readouterr().out
    assert set(read_metrics(locations.METRICS)) == set(CLASS.metrics)


def test_without_a_top_k_its_metric_is_absent_and_no_line_mentions_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}, top_k=None))
    assert "top_k" not in capsys.readouterr().out
    assert set(read_metrics(locations.METRICS)) == set(CLASS.metrics) - {"top_k_accuracy"}


@pytest.mark.parametrize(
    ("task", "name", "hint"),
    [
        ("image_classification", "acuracy", "did you mean 'accuracy'?"),
        ("image_classification", "rmse", "image_classification"),
        ("image_regression", "accuracy", "mse, rmse, mae, r2"),
    ],
)
def test_a_gate_on_an_unknown_metric_is_refused_with_the_params(
    task: Task, name: str, hint: str
) -> None:
    with pytest.raises(ParamsError) as caught:
        params_with(task, {name: {"min": 0.5, "max": None}})
    assert f"evaluate.gates names '{name}'" in str(caught.value)
    assert hint in str(caught.value)
