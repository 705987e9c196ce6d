"""Slices of the test rows are measured, gated and shown, and so are all rows but the leaked."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from slipway.artifacts import locations
from slipway.artifacts.gates import not_passed, read_gates
from slipway.config.params import Params
from slipway.data.engine.rows import PACKED_ROWS, read_table
from slipway.data.store.packed import write_split
from slipway.reports.evaluation.tables import predictions_schema
from slipway.system.errors import DataError
from stages import evaluate
from tests.reports.conftest import (
    CLASSES,
    NUM_TEST_ROWS,
    params_with,
)
from tests.reports.evaluated import OUTPUTS, Project, mark_leaked


def test_outputs_do_not_mention_leaks_if_there_are_none(project: Project) -> None:
    project("image_classification")
    evaluate.run(params_with("image_classification", {}))
    assert "leaked" not in locations.METRICS.read_text()
    assert "leaked" not in evaluate.PAGE.read_text()


def test_every_metric_is_also_measured_without_the_leaked_rows(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project("image_classification")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_classification", {}))
    content = json.loads(locations.METRICS.read_text())
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
    table = read_table(locations.PREDICTIONS, predictions_schema("image_classification"))
    honest = table.filter(pc.invert(table["leaked"]))
    assert honest.num_rows == 16
    assert honest["target"].equals(honest["prediction"])


def test_the_gates_judge_the_numbers_of_all_rows(project: Project) -> None:
    project("image_classification")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_classification", {"accuracy": {"min": 0.9, "max": None}}))
    assert read_gates(locations.GATES).gates == "missed"


def test_a_numeric_target_is_measured_without_the_leaked_rows(project: Project) -> None:
    project("image_regression")
    mark_leaked(wrong_rows=True)
    evaluate.run(params_with("image_regression", {}))
    assert json.loads(locations.METRICS.read_text())["rmse_without_leaked"] == pytest.approx(
        0, abs=1e-5
    )


@pytest.mark.parametrize("num_leaked", [20, 21])
def test_the_page_says_if_too_few_rows_remain_without_the_leaked_ones(
    project: Project, num_leaked: int
) -> None:
    project("image_regression")
    mark_leaked(wrong_rows=False, num_rows=num_leaked)
    evaluate.run(params_with("image_regression", {}))
    content = json.loads(locations.METRICS.read_text())
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
    content = json.loads(locations.METRICS.read_text())
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
    text = "\n".join(result.text for result in not_passed(read_gates(locations.GATES).results))
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
    content = json.loads(locations.METRICS.read_text())
    assert {entry["metric"] for entry in content["slices"]} == {"rmse"}
    assert {entry["by"] for entry in content["slices"]} >= {"target", "group", "size"}
    page = evaluate.PAGE.read_text()
    assert "Error against target" in page
    assert "Least certain" not in page
