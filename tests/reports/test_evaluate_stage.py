"""The evaluate stage as a whole: each row once, every output, gates that are missed and reached."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from slipway.artifacts import locations
from slipway.data.engine.rows import read_table
from slipway.kinds.registry import Task
from slipway.reports.evaluation.record import read_metrics
from slipway.reports.evaluation.tables import predictions_schema
from slipway.system.errors import IntegrityError, SchemaError, TrainingError
from slipway.training.uncertainty.prediction import predict
from stages import evaluate
from tests.reports.conftest import (
    CLASSES,
    NUM_TEST_ROWS,
    ROOT,
    images,
    network,
    params_with,
)
from tests.reports.evaluated import OUTPUTS, Project


def test_a_classification_writes_every_output(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    content = json.loads(locations.METRICS.read_text())
    assert content["rows"] == NUM_TEST_ROWS
    assert content["accuracy"] == pytest.approx(
        16 / 21
    )  # rows 0, 5, 10, 15 and 20 have another target
    assert content["accuracy"] == read_metrics(locations.METRICS)["accuracy"].value
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
    table = read_table(locations.PREDICTIONS, predictions_schema("image_classification"))
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
    table = read_table(locations.PREDICTIONS, predictions_schema("image_classification"))
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
    content = json.loads(locations.METRICS.read_text())
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
        "ood_fraction",
        "calibration",
    }
    table = read_table(locations.PREDICTIONS, predictions_schema("image_regression"))
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
