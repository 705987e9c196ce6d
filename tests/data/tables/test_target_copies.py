"""Tests of near copies of the target: each planted one is found, and no ordinary column is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.config.sections import DataParams
from slipway.data.splits.report import summary
from slipway.data.splits.split import split_rows
from slipway.data.tables.clean_files import TableColumns, write_cells
from slipway.data.tables.source import columns_of
from slipway.data.tables.target_copies import ColumnScore, score_columns, score_report
from slipway.reports.pages.split_page import split_page
from tests.data.raw_files import cleaned, data_params, write_csv
from tests.project_params import PROJECT

WINE = Path("data/demo/wine.csv")
HOUSING = Path("../shared/data/housing/housing.csv")
NUM_ROWS = 600
RANDOM = np.random.default_rng(5)
PRICES = np.exp(RANDOM.normal(size=NUM_ROWS)) * 1000  # with a long tail
ANIMALS = RANDOM.choice(["cat", "dog", "cow"], NUM_ROWS, p=[0.7, 0.2, 0.1])
NOISE = RANDOM.normal(size=NUM_ROWS)
HEIGHTS = np.random.default_rng(6).normal(170, 9, NUM_ROWS)
OTHER = RANDOM.permutation(NUM_ROWS)  # the row whose target another cell has
IS_ODD = RANDOM.permutation(NUM_ROWS) < NUM_ROWS // 100
STARS = RANDOM.integers(1, 6, NUM_ROWS)


def found(data: DataParams, folder: Path) -> list[dict[str, Any]]:
    """Return the suspicious columns of a table after the earlier stages."""
    table = cleaned(data, rules={"conflicting_label": "flag", "outlier": None})
    split = split_rows(table.cleaned.rows, PROJECT.split, PROJECT.seed)
    columns = TableColumns(inputs=table.types, ignored=table.ignored)
    write_cells(folder, table.cells, columns, table.ledger.bad_cell_table())
    report = score_report(score_columns(split.rows, folder), of_classes=split.has_classes)
    assert {column["column"] for column in report["column_scores"]} <= set(columns_of(data))
    found: list[dict[str, Any]] = report["target_copies"]
    return found


def planted(
    folder: Path, targets: Sequence[object], cells: Sequence[object], **changes: str
) -> dict[str, float]:
    """Return the scores of the suspicious columns, given a planted column and one of noise."""
    rows = [
        f"{noise},{cell},{target}"
        for noise, cell, target in zip(NOISE, cells, targets, strict=True)
    ]
    path = write_csv(folder / "t.csv", "\n".join(["noise,planted,target", *rows]) + "\n")
    task = "table_classification" if isinstance(targets[0], str) else "table_regression"
    return {
        copy["column"]: copy["score"] for copy in found(data_params(path, task, **changes), folder)
    }


def test_a_number_equal_to_the_target_in_all_rows_but_two_is_suspicious(tmp_path: Path) -> None:
    cells = np.where(np.arange(NUM_ROWS) < 2, HEIGHTS[OTHER], HEIGHTS)
    assert planted(tmp_path, HEIGHTS.tolist(), cells.tolist()).keys() == {"planted"}


def test_a_rounded_linear_function_of_the_target_is_suspicious(tmp_path: Path) -> None:
    cells = np.round(PRICES / 1000 * 3 + 7, 3)
    assert planted(tmp_path, PRICES.tolist(), cells.tolist())["planted"] > 0.99


def test_any_increasing_function_of_the_target_is_suspicious(tmp_path: Path) -> None:
    assert planted(tmp_path, PRICES.tolist(), np.exp(-PRICES / 1000).tolist())["planted"] > 0.99


def test_a_date_that_follows_the_target_is_suspicious(tmp_path: Path) -> None:
    order = HEIGHTS.argsort().argsort()
    days = np.datetime64("2020-01-01") + order
    assert planted(tmp_path, HEIGHTS.tolist(), days.astype(str).tolist())["planted"] > 0.99


def test_a_category_that_names_the_values_of_a_numeric_target_is_suspicious(tmp_path: Path) -> None:
    names = np.array(["none", "poor", "fair", "good", "best", "top"])[STARS]
    assert planted(tmp_path, STARS.tolist(), names.tolist())["planted"] == pytest.approx(1)


def test_a_category_that_names_the_class_in_99_percent_of_the_rows_is_suspicious(
    tmp_path: Path,
) -> None:
    names = {"cat": "felis", "dog": "canis", "cow": "bos"}
    cells = [names[animal] for animal in np.where(IS_ODD, ANIMALS[OTHER], ANIMALS)]
    assert planted(tmp_path, ANIMALS.tolist(), cells).keys() == {"planted"}


def test_a_category_that_subdivides_the_classes_is_suspicious(tmp_path: Path) -> None:
    cells = [f"{animal} {row % 7}" for row, animal in enumerate(ANIMALS)]
    assert planted(tmp_path, ANIMALS.tolist(), cells)["planted"] == 1


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_number_that_encodes_the_class_is_suspicious(tmp_path: Path, spread: float) -> None:
    codes = {"cat": 3, "dog": 1, "cow": 2}
    cells = (
        np.array([codes[animal] for animal in np.where(IS_ODD, ANIMALS[OTHER], ANIMALS)])
        + spread * NOISE
    )
    assert planted(tmp_path, ANIMALS.tolist(), cells.tolist()).keys() == {"planted"}


def test_a_boolean_that_marks_a_rare_class_is_suspicious(tmp_path: Path) -> None:
    is_rare = np.arange(NUM_ROWS) % 10 == 0
    cells = np.where(is_rare ^ IS_ODD, "yes", "no")
    labels = np.where(is_rare, "ill", "well")
    assert planted(tmp_path, labels.tolist(), cells.tolist()).keys() == {"planted"}


def test_a_column_with_values_missing_in_only_one_class_is_suspicious(tmp_path: Path) -> None:
    labels = np.where(np.arange(NUM_ROWS) % 2 == 0, "open", "closed")
    cells = [
        "" if label == "open" else f"{noise}" for label, noise in zip(labels, OTHER, strict=True)
    ]
    assert planted(tmp_path, labels.tolist(), cells)["planted"] == 1


def test_a_partly_filled_column_that_copies_the_target_is_suspicious(tmp_path: Path) -> None:
    cells = [
        "" if row % 2 else f"{price + noise}"
        for row, (price, noise) in enumerate(zip(PRICES, NOISE, strict=True))
    ]
    assert planted(tmp_path, PRICES.tolist(), cells)["planted"] > 0.99


def test_strong_and_useless_features_are_not_suspicious(tmp_path: Path) -> None:
    strong = PRICES * (1 + 0.15 * NOISE)  # correlation of the logarithms 0.99
    assert planted(tmp_path, PRICES.tolist(), strong.tolist()) == {}
    rare = np.where(
        np.arange(NUM_ROWS) % 100 == 0, "ill", "well"
    )  # 99 % of the rows are right without any column
    assert planted(tmp_path, rare.tolist(), (OTHER % 3).tolist()) == {}
    assert planted(tmp_path, ANIMALS.tolist(), [f"id {row % 290}" for row in OTHER]) == {}


def test_a_column_that_only_identifies_the_group_is_not_suspicious(tmp_path: Path) -> None:
    groups = (
        np.arange(NUM_ROWS) % 60
    )  # the rows of a group are alike, and lie in one split together
    labels = np.where(RANDOM.random(60)[groups] < 0.5, "ill", "well")
    assert planted(tmp_path, labels.tolist(), [f"street {group}" for group in groups]).keys() == {
        "planted"
    }
    rows = [
        f"{noise},street {group},{group},{label}"
        for noise, group, label in zip(NOISE, groups, labels, strict=True)
    ]
    path = write_csv(tmp_path / "g.csv", "\n".join(["noise,street,person,target", *rows]) + "\n")
    assert found(data_params(path, "table_classification", group_column="person"), tmp_path) == []


def test_the_embedded_wines_have_no_suspicious_column(tmp_path: Path) -> None:
    assert found(data_params(WINE, "table_classification", "cultivar"), tmp_path) == []


@pytest.mark.skipif(not HOUSING.exists(), reason=f"{HOUSING} is not there")
def test_the_california_houses_have_no_suspicious_column(tmp_path: Path) -> None:
    assert found(data_params(HOUSING, target="median_house_value"), tmp_path) == []


def test_console_and_page_name_a_suspicious_column_with_its_score(tmp_path: Path) -> None:
    scores = [ColumnScore("fee", 0.9912, 87), ColumnScore("age", 0.4, 87)]
    scored = score_report(scores, of_classes=True)
    described = scored["target_copies"]
    assert [column["column"] for column in scored["column_scores"]] == ["fee", "age"]
    finding = "'fee' alone predicts the target (balanced accuracy 0.991 on 87 rows, each held out)"
    assert described == [{"column": "fee", "score": 0.9912, "rows": 87, "finding": finding}]
    target = {"mean": 0.0, "std": 1.0, "low": -2.0, "high": 2.0, "histogram": [1, 4, 4]}
    splits = {name: {"rows": 9, "leaked": 0, "target": target} for name in ("train", "val", "test")}
    report = {
        "seed": 7, "way": "stable", "splits": splits, "fractions": None, "largest_deviation": None,
        "classes_missing": {}, "units": {"number": 27, "largest": 1}, "folds": [], "purged": 0,
        "cut_from_train": [], "cut_by_time": False, "val_is_test": False,
        "leaks": {"rows": 0, "shared": {"id": {}}, "time_order": None}, "target_copies": described,
    }  # fmt: skip
    assert f"suspected leak: {finding}" in summary(report)
    assert "0.991" in split_page(report)
    assert "suspected" not in summary(report | {"target_copies": []})
    assert "Suspected" not in split_page(report | {"target_copies": []})
    assert "Each column alone" not in split_page(report)
    assert "0.400" in split_page(report | scored)
