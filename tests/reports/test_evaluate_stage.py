"""The evaluate stage as a whole: each row once, every output, gates that are missed and reached."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml

from slipway.artifacts.gates import not_passed, read_gates
from slipway.config.params import Params
from slipway.data.engine.rows import PACKED_ROWS, read_table
from slipway.data.store.packed import write_split
from slipway.kinds.registry import Task
from slipway.kinds.targets import CLASS
from slipway.reports.evaluation.record import read_baseline, read_metrics, read_user_code
from slipway.reports.evaluation.tables import predictions_schema
from slipway.system.errors import DataError, IntegrityError, ParamsError, SchemaError, TrainingError
from slipway.training.uncertainty.prediction import predict
from stages import evaluate
from tests.reports.conftest import (
    CLASSES,
    NUM_TEST_ROWS,
    ROOT,
    images,
    network,
    params_with,
    targets,
)

Project = Callable[[Task], None]
OUTPUTS = [
    evaluate.GATES,
    evaluate.CALIBRATION,
    evaluate.OOD_SCORE,
    evaluate.PREDICTIONS,
    evaluate.METRICS,
    evaluate.CONFUSION,
    evaluate.SCATTER,
    evaluate.RELIABILITY,
    evaluate.SLICES,
    evaluate.PAGE,
]


def test_a_classification_writes_every_output(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    content = json.loads(evaluate.METRICS.read_text())
    assert content["rows"] == NUM_TEST_ROWS
    assert content["accuracy"] == pytest.approx(
        16 / 21
    )  # rows 0, 5, 10, 15 and 20 have another target
    assert content["accuracy"] == read_metrics(evaluate.METRICS)["accuracy"].value
    assert [entry["class"] for entry in content["per_class"]] == CLASSES
    assert sum(entry["rows"] for entry in content["per_class"]) == NUM_TEST_ROWS
    assert {entry["name"] for entry in content["calibration"]} >= {
        "coverage",
        "calibration_error",
        "calibration_error_before",
        "log_loss_before",
    }
    assert content["coverage"] == next(
        entry["value"] for entry in content["calibration"] if entry["name"] == "coverage"
    )
    assert "Uncertainty" in evaluate.PAGE.read_text()
    printed = capsys.readouterr().out
    assert "21 test rows" in printed
    assert "Too few rows for evaluate.ood_fraction 0.01: no row is flagged as OOD" in printed
    assert "0.7619" in printed


def test_predictions_and_confusion_hold_each_test_row_once(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    table = read_table(evaluate.PREDICTIONS, predictions_schema("image_classification"))
    assert table["id"].to_pylist() == [f"{row:032x}" for row in range(NUM_TEST_ROWS)]
    assert len(set(table["source"].to_pylist())) == NUM_TEST_ROWS
    assert not any(table["leaked"].to_pylist())
    assert np.allclose([sum(row) for row in table["probabilities"].to_pylist()], 1)
    with evaluate.CONFUSION.open(newline="") as file:
        pairs = [(row["actual"], row["predicted"]) for row in csv.DictReader(file)]
    assert evaluate.SCATTER.read_text() == "target,prediction\n"
    assert pairs == list(
        zip(table["target"].to_pylist(), table["prediction"].to_pylist(), strict=True)
    )


def test_the_reliability_table_has_every_test_row_in_one_bin_with_its_accuracy(
    project: Project,
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    table = read_table(evaluate.PREDICTIONS, predictions_schema("image_classification"))
    hits = np.array(table["target"].to_pylist()) == np.array(table["prediction"].to_pylist())
    with evaluate.RELIABILITY.open(newline="") as file:
        bins = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert sum(found["rows"] for found in bins) == NUM_TEST_ROWS
    assert sum(found["rows"] * found["accuracy"] for found in bins) == pytest.approx(hits.sum())
    assert sum(found["rows"] * found["confidence"] for found in bins) == pytest.approx(
        sum(table["confidence"].to_pylist())
    )
    assert all(
        found["low"] <= found["accuracy"] <= found["high"] and found["ideal"] == found["confidence"]
        for found in bins
    )


def test_a_numeric_target_writes_every_output(project: Project) -> None:
    project("image_regression")
    evaluate.run(params_with("image_regression", {}))
    content = json.loads(evaluate.METRICS.read_text())
    assert set(content) == {
        "rmse",
        "mae",
        "r2",
        "mse",
        "rows",
        "metrics",
        "baseline",
        "slices_judged",
        "slices_worse",
        "slices",
        "slices_too_small",
        "by_target",
        "coverage",
        "outliers",
        "calibration",
    }
    table = read_table(evaluate.PREDICTIONS, predictions_schema("image_regression"))
    assert table.num_rows == NUM_TEST_ROWS
    assert content["mse"] == pytest.approx(
        5 / 21
    )  # five targets are 1 more than what the network answers
    assert content["mae"] == pytest.approx(5 / 21)
    assert len(evaluate.SCATTER.read_text().splitlines()) == 1 + NUM_TEST_ROWS
    assert (
        evaluate.CONFUSION.read_text() == "actual,predicted\n"
    )  # DVC complains where a column is missing
    assert (
        evaluate.RELIABILITY.read_text() == "rows,confidence,accuracy,ideal,low,high\n"
    )  # a number has no confidence
    assert "Prediction against target" in evaluate.PAGE.read_text()


@pytest.mark.parametrize("task", ["image_classification", "image_regression"])
def test_every_column_that_dvc_plots_is_in_its_table_whatever_the_task(
    project: Project, task: Task
) -> None:
    project(task)
    evaluate.run(params_with(task, {}))
    plots = [
        plot
        for entry in yaml.safe_load((ROOT / "dvc.yaml").read_text())["plots"]
        for plot in entry.values()
    ]
    axes = [
        axis for plot in plots for axis in (plot.get("x"), plot.get("y")) if isinstance(axis, dict)
    ]
    wanted = {
        path: names if isinstance(names, list) else [names]
        for axis in axes
        for path, names in axis.items()
        if path.endswith(".csv")
    }
    assert set(wanted) == {
        path.as_posix()
        for path in (evaluate.CONFUSION, evaluate.SCATTER, evaluate.RELIABILITY, evaluate.SLICES)
    }
    for path, names in wanted.items():
        assert set(names) <= set(Path(path).read_text().splitlines()[0].split(",")), path


def test_two_equal_evaluations_write_equal_bytes(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    first = [path.read_bytes() for path in OUTPUTS]
    evaluate.run(params_with("image_classification", {}))
    assert first == [path.read_bytes() for path in OUTPUTS]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_the_confusion_matrix_does_not_depend_on_the_batch_size(
    project: Project, batch_size: int
) -> None:
    project("image_classification")
    params = params_with("image_classification", {})
    whole = params.model_copy(
        update={"evaluate": params.evaluate.model_copy(update={"batch_size": 1000})}
    )
    evaluate.run(whole)
    expected = evaluate.CONFUSION.read_text()
    evaluate.run(
        params.model_copy(
            update={"evaluate": params.evaluate.model_copy(update={"batch_size": batch_size})}
        )
    )
    assert evaluate.CONFUSION.read_text() == expected


# leaked rows


def mark_leaked(wrong_rows: bool, num_rows: int = NUM_TEST_ROWS) -> None:
    """Mark test rows as leaked: those with a wrong answer, or the first `num_rows`."""
    leaked = (
        np.arange(NUM_TEST_ROWS) % 5 == 0 if wrong_rows else np.arange(NUM_TEST_ROWS) < num_rows
    )
    folder, path = Path("data/packed/test"), Path("data/packed/manifest.json")
    rows = read_table(folder / "rows.parquet", PACKED_ROWS)
    rows = rows.set_column(
        rows.schema.get_field_index("leaked"), PACKED_ROWS.field("leaked"), pa.array(leaked)
    )
    manifest = json.loads(path.read_text())
    manifest["splits"]["test"] = write_split(
        folder, rows, tuple(manifest["splits"]["test"]["shape"])
    ).model_dump()
    path.write_text(json.dumps(manifest))


def test_outputs_do_not_mention_leaks_if_there_are_none(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    assert "leaked" not in evaluate.METRICS.read_text()
    assert "leaked" not in evaluate.PAGE.read_text()


def test_every_metric_is_also_measured_without_the_leaked_rows(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_classification", {}))
    content = json.loads(evaluate.METRICS.read_text())
    assert content["leaked_rows"] == 5
    assert content["accuracy"] == pytest.approx(16 / 21)
    assert content["accuracy_without_leaked"] == 1
    one_class = {
        "roc_auc",
        "average_precision",
    }  # the honest rows of this project have one class, which defines no area
    assert {entry["name"] for entry in content["metrics_without_leaked"]} == {
        entry["name"] for entry in content["metrics"]
    } - one_class
    assert {entry["rows"] for entry in content["metrics_without_leaked"]} == {16}
    assert "accuracy_without_leaked" in capsys.readouterr().out
    page = evaluate.PAGE.read_text()
    assert "5 of 21 test rows have a near duplicate" in page
    table = read_table(evaluate.PREDICTIONS, predictions_schema("image_classification"))
    honest = table.filter(pc.invert(table["leaked"]))
    assert honest.num_rows == 16
    assert honest["target"].equals(honest["prediction"])


def test_the_gates_judge_the_numbers_of_all_rows(project: Project) -> None:
    project("image_classification")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.9, "max": None}}))
    assert read_gates(evaluate.GATES).gates == "missed"


def test_a_numeric_target_is_measured_without_the_leaked_rows(project: Project) -> None:
    project("image_regression")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_regression", {}))
    assert json.loads(evaluate.METRICS.read_text())["rmse_without_leaked"] == pytest.approx(
        0, abs=1e-5
    )


@pytest.mark.parametrize("num_leaked", [20, 21])
def test_the_page_says_if_too_few_rows_remain_without_the_leaked_ones(
    project: Project, num_leaked: int
) -> None:
    project("image_regression")
    mark_leaked(wrong_rows=False, num_rows=num_leaked)
    evaluate.run(params_with("image_regression", {}))
    content = json.loads(evaluate.METRICS.read_text())
    assert content["leaked_rows"] == num_leaked
    assert "rmse_without_leaked" not in content
    assert "too few are left to measure" in evaluate.PAGE.read_text()


# slices


def with_table(params: Params, tmp_path: Path, **columns: list[Any]) -> Params:
    """The same params with a table that names the images of the test rows, and other columns."""
    path = tmp_path / "rows.csv"
    lines = [
        ",".join(columns),
        *(",".join(map(str, cells)) for cells in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return params.model_copy(update={"data": params.data.model_copy(update={"path": str(path)})})


def number_sources() -> None:
    """Let the packed rows come from the rows of a table."""
    folder, path = Path("data/packed/test"), Path("data/packed/manifest.json")
    rows = read_table(folder / "rows.parquet", PACKED_ROWS)
    sources = pa.array([f"{row}:digits/{row}.png" for row in range(NUM_TEST_ROWS)])
    rows = rows.set_column(
        rows.schema.get_field_index("source"), PACKED_ROWS.field("source"), sources
    )
    manifest = json.loads(path.read_text())
    manifest["splits"]["test"] = write_split(
        folder, rows, tuple(manifest["splits"]["test"]["shape"])
    ).model_dump()
    path.write_text(json.dumps(manifest))


def test_slices_are_in_the_metrics_the_plots_and_on_the_page(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every fifth row is wrong; only these have the third class and come from the old camera."""
    project("image_classification")
    number_sources()
    camera = ["old" if row % 5 == 0 else "new" for row in range(NUM_TEST_ROWS)]
    params = params_with("image_classification", {}, slices=["camera"], slice_min_rows=5)
    evaluate.run(with_table(params, tmp_path, camera=camera))
    content = json.loads(evaluate.METRICS.read_text())
    worse = [entry for entry in content["slices"] if entry["is_worse"]]
    assert [(entry["by"], entry["value"], entry["rows"], entry["measured"]) for entry in worse] == [
        ("class", CLASSES[2], 5, 0.0),
        ("camera", "old", 5, 0.0),
    ]
    assert worse == content["slices"][: content["slices_worse"]]
    assert {(entry["by"], entry["value"]) for entry in content["slices"]} >= {
        ("group", "north"),
        ("size", "64 px"),
        ("camera", "new"),
    }
    assert content["slices_judged"] == len(content["slices"])
    assert ("flag", "blurred", 3) in {
        (entry["by"], entry["value"], entry["rows"]) for entry in content["slices_too_small"]
    }
    with evaluate.SLICES.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["slice"] for line in lines] == [
        f"{entry['by']} {entry['value']}" for entry in content["slices"]
    ]
    assert "camera old" in capsys.readouterr().out
    page = evaluate.PAGE.read_text()
    assert f"2 of {len(lines)} slices are worse" in page
    assert "✗ worse" in page
    assert "Least certain" in page


def test_a_slice_gate_names_the_slice_with_its_interval_and_rows(project: Project) -> None:
    project("image_classification")
    params = params_with(
        "image_classification",
        {},
        slice_gates={"accuracy": {"min": 0.75, "max": None}},
        slice_min_rows=5,
    )
    evaluate.run(params)
    text = "\n".join(result.text for result in not_passed(read_gates(evaluate.GATES).results))
    assert "accuracy in group north" not in text
    assert "accuracy in group south is 0.7273 (95 % interval" in text
    assert "11 rows), required at least 0.75 (evaluate.slice_gates.accuracy in params.yaml)" in text
    assert all(path.is_file() for path in OUTPUTS)


def test_error_names_a_missing_slice_column_before_anything_is_written(
    project: Project, tmp_path: Path
) -> None:
    project("image_classification")
    number_sources()
    params = params_with("image_classification", {}, slices=["kamera"])
    with pytest.raises(DataError, match="did you mean 'camera'"):
        evaluate.run(with_table(params, tmp_path, camera=["x"] * NUM_TEST_ROWS))
    assert not any(path.exists() for path in OUTPUTS)


def test_a_numeric_target_has_slices_by_rmse_and_no_least_certain_rows(project: Project) -> None:
    project("image_regression")
    evaluate.run(params_with("image_regression", {}, slice_min_rows=5))
    content = json.loads(evaluate.METRICS.read_text())
    assert {entry["metric"] for entry in content["slices"]} == {"rmse"}
    assert {entry["by"] for entry in content["slices"]} >= {"target", "group", "size"}
    page = evaluate.PAGE.read_text()
    assert "Error against target" in page
    assert "Least certain" not in page


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
    content = json.loads(evaluate.METRICS.read_text())
    assert (content["hits"], content["hits_without_leaked"]) == (content["accuracy"], 1)
    assert read_baseline(evaluate.METRICS)["hits"] == read_baseline(evaluate.METRICS)["accuracy"]
    measured = read_metrics(evaluate.METRICS)["hits"]
    assert measured.low < measured.value < measured.high
    results = read_gates(evaluate.GATES).results
    assert (results[0].measured, results[0].outcome) == (measured, "missed")
    assert {result.name for result in results if result.is_of_slice} == {"hits"}
    (code,) = read_user_code(evaluate.METRICS)
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
    report = read_gates(evaluate.GATES)
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
    assert changed == {evaluate.GATES, evaluate.PAGE}


def test_a_gate_file_whose_verdict_contradicts_its_results_is_refused(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.9, "max": None}}))
    content = json.loads(evaluate.GATES.read_text())
    evaluate.GATES.write_text(json.dumps(content | {"gates": "passed"}))
    with pytest.raises(SchemaError, match="gates is 'passed', but the results say 'missed'"):
        read_gates(evaluate.GATES)
    evaluate.GATES.unlink()
    with pytest.raises(SchemaError, match="dvc repro evaluate"):
        read_gates(evaluate.GATES)


def test_without_a_gate_the_verdict_is_none(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    assert read_gates(evaluate.GATES).gates == "none"


def test_every_metric_is_shown_beside_its_baseline(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every split has the same rows, so the baseline's accuracy is the majority's fraction."""
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    baseline, share = (
        read_baseline(evaluate.METRICS),
        np.bincount(targets("image_classification").astype(int)).max() / NUM_TEST_ROWS,
    )
    assert baseline.keys() == read_metrics(evaluate.METRICS).keys()
    assert baseline["accuracy"] == pytest.approx(share)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.strip().startswith("accuracy ")]
    assert f"), baseline {share:.4f}; f1_macro" in line
    assert len(printed.splitlines()) <= 6
    assert f"baseline {share:.4f}" in evaluate.PAGE.read_text()


def test_the_baseline_of_a_number_is_the_mean_target_of_the_training_rows(project: Project) -> None:
    project("image_regression")
    evaluate.run(params_with("image_regression", {}))
    baseline = read_baseline(evaluate.METRICS)
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
    assert "top_k_accuracy" not in read_metrics(evaluate.METRICS)
    gates: dict[str, dict[str, float | None]] = {
        "top_k_accuracy": {"min": 0.5, "max": None},
        "accuracy": {"min": 0.1, "max": None},
    }
    evaluate.run(params_with("image_classification", gates, top_k=3))
    report = read_gates(evaluate.GATES)
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
    assert set(read_metrics(evaluate.METRICS)) == set(CLASS.metrics)


def test_without_a_top_k_its_metric_is_absent_and_no_line_mentions_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}, top_k=None))
    assert "top_k" not in capsys.readouterr().out
    assert set(read_metrics(evaluate.METRICS)) == set(CLASS.metrics) - {"top_k_accuracy"}


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


# refusals


def test_an_altered_test_row_is_refused(project: Project) -> None:
    project("image_classification")
    path = Path("data/packed/test/inputs.npy")
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError):
        evaluate.run(params_with("image_classification", {}))
    assert not any(path.exists() for path in OUTPUTS)


def test_a_checkpoint_of_different_classes_is_refused(project: Project) -> None:
    project("image_classification")
    path = Path("data/packed/manifest.json")
    path.write_text(path.read_text().replace("ape", "cow"))
    with pytest.raises(SchemaError) as caught:
        evaluate.run(params_with("image_classification", {}))
    assert "cow" in str(caught.value)
    assert "ape" in str(caught.value)


def test_a_missing_checkpoint_is_refused(project: Project) -> None:
    project("image_classification")
    Path("artifacts/model/model.json").unlink()
    with pytest.raises(SchemaError, match="dvc repro train"):
        evaluate.run(params_with("image_classification", {}))


def test_evaluate_refuses_non_finite_answers() -> None:
    diverged = network("image_classification")
    next(diverged.parameters()).data.fill_(float("nan"))
    with pytest.raises(TrainingError, match="3 of 3 rows"):
        predict(diverged, np.zeros((3, 8, 8, 1), dtype=np.uint8), batch_size=2, device="cpu")


def test_probabilities_are_float32_and_sum_to_one() -> None:
    answers = predict(network("image_classification"), images(7), batch_size=3, device="cpu")
    assert answers.shape == (7, 3)
    assert answers.dtype == np.float32
    assert np.allclose(answers.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["", "not json", "{}", '{"metrics": [{"name": "accuracy"}]}', '{"metrics": 3}']
)
def test_a_missing_or_malformed_metrics_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evaluate.json"
    with pytest.raises(SchemaError, match="is missing"):
        read_metrics(path)
    path.write_text(text)
    with pytest.raises(SchemaError, match="dvc repro --force evaluate"):
        read_metrics(path)
