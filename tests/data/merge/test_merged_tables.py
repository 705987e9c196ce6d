"""Merged tables keep the ids, types and notation of the base data."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.merge.__main__ import merge
from slipway.data.sources.raw_tables import COLLECTED as MARK
from slipway.system.errors import DataError
from tests.data import raw_files
from tests.data.merge.merge_cases import counts, write_base_table, write_collected_table
from tests.data.raw_files import cleaned, said, write_csv


@pytest.mark.parametrize("stored", ["csv", "parquet"])
def test_merging_a_table_keeps_the_ids_of_base_rows_and_the_inputs(
    tmp_path: Path, stored: str
) -> None:
    old = write_base_table(tmp_path / f"old.{stored}", stored=stored)
    data = raw_files.data_params(old, "table_classification", "label")
    out = tmp_path / "next.parquet"
    report = merge(data, write_collected_table(tmp_path / "collected.parquet"), out)
    assert counts(report) == (30, 2, 1, 0)
    before, after = cleaned(data), cleaned(data.model_copy(update={"path": str(out)}))
    assert [(each.name, each.kind) for each in after.types] == [
        (each.name, each.kind) for each in before.types
    ]
    labels, merged_labels = (
        dict(zip(*(table.cleaned.rows[name].to_pylist() for name in ("id", "label")), strict=True))
        for table in (before, after)
    )
    assert len(merged_labels) == 32
    assert (
        labels.items() < merged_labels.items()
    )  # by the same ids, so that a stable split moves none of them
    assert pq.read_table(out)[MARK].to_pylist() == [False] * 30 + [True] * 2


def merged_columns(
    tmp_path: Path, rows: list[dict[str, Any]], new: dict[str, list[Any]], **changes: Any
) -> tuple[list[str], list[str]]:
    """Return the inputs before and after rows with other labels are merged into a table."""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    data = raw_files.data_params(
        tmp_path / "old.parquet", "table_classification", "label", **changes
    )
    merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    before, after = (
        cleaned(data),
        cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")})),
    )
    old, all_ids = (set(table.cleaned.rows["id"].to_pylist()) for table in (before, after))
    assert old < all_ids
    return [each.name for each in before.types], [each.name for each in after.types]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (lambda row: ("a", "b")[row % 2], "other names of the classes"),
        (lambda row: row + 5, "a counter of the rows"),
        (lambda row: ("1", "1.0")[row % 2], "one value in two forms"),
        (lambda row: math.nan if row % 5 == 0 else float(row % 4), "a twin with missing cells"),
        (lambda row: ("true", "false")[row % 3 == 0], "a twin in other words"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merge_does_not_turn_ignored_columns_into_inputs(
    tmp_path: Path, cells: Callable[[int], Any], reason: str
) -> None:
    rows = [
        {
            "a": (7 * row) % 61 + 0.5, "c": math.nan if row % 5 == 0 else float(row % 4),
            "yes": ("yes", "no")[row % 3 == 0], "no input": cells(row), "label": str(row % 2),
        }
        for row in range(60)
    ]  # fmt: skip
    new: dict[str, list[Any]] = {
        "a": [0.25, 100.5],
        "c": [3.0, None],
        "yes": [True, False],
        "label": ["0", "1"],
    }
    before, after = merged_columns(tmp_path, rows, new)
    assert before == after == ["a", "c", "yes"], reason


@pytest.mark.parametrize(
    ("labels", "new_labels", "label_map"),
    [
        ([True, False], ["True", "False"], {}),
        (["Cat", "dog"], ["cat", "dog"], {"Cat": "cat"}),
        ([0, 1], ["0", "1"], {}),
    ],
    ids=["booleans", "spelling variants", "numbers"],
)
def test_merge_keeps_base_classes_and_ids_for_every_type_of_class_column(
    tmp_path: Path, labels: list[Any], new_labels: list[str], label_map: dict[str, str]
) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "b": float(row % 9), "label": labels[row % 2]}
        for row in range(60)
    ]
    merged_columns(
        tmp_path,
        rows,
        {"a": [0.25, 100.5], "b": [1.0, 2.0], "label": new_labels},
        label_map=label_map,
    )
    data = raw_files.data_params(
        tmp_path / "next.parquet", "table_classification", "label", label_map=label_map
    )
    assert set(cleaned(data).cleaned.rows["label"].to_pylist()) == set(new_labels)


def test_merge_accepts_base_rows_without_any_label(tmp_path: Path) -> None:
    rows = [{"a": (7 * row) % 61 + 0.5, "other": f"{row % 3}", "label": None} for row in range(60)]
    pq.write_table(
        pa.Table.from_pylist(
            rows, pa.schema([("a", pa.float64()), ("other", pa.string()), ("label", pa.string())])
        ),
        tmp_path / "o.parquet",
    )
    pq.write_table(pa.table({"a": [0.25], "label": ["0"]}), tmp_path / "new.parquet")
    data = raw_files.data_params(tmp_path / "o.parquet", "table_classification", "label")
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 1, 0, 0)


def test_merge_treats_a_date_in_two_forms_as_equal(tmp_path: Path) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "day": f"2020-01-{1 + row % 28:02d}", "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    pq.write_table(
        pa.table(
            {"a": [0.5, 7.5], "day": ["2020-01-01T00:00:00Z", "2020-02-01"], "label": ["0", "1"]}
        ),
        tmp_path / "new.parquet",
    )
    data = raw_files.data_params(tmp_path / "old.parquet", "table_classification", "label")
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 1, 1, 0)


@pytest.mark.parametrize(
    "labels",
    [["0", "1"], [None, "1"], ["1", None]],
    ids=["another truth", "the last has one", "the first has one"],
)
def test_merge_adds_a_new_row_once_if_it_is_written_in_two_forms(
    tmp_path: Path, labels: list[str | None]
) -> None:
    rows = [
        {"a": (7 * row) % 61 + 0.5, "day": f"2020-01-{1 + row % 28:02d}", "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    forms = ["2021-05-05", "2021-05-05T00:00:00"]
    pq.write_table(
        pa.table({"a": [0.5, 0.5], "day": forms, "label": pa.array(labels, pa.string())}),
        tmp_path / "new.parquet",
    )
    data = raw_files.data_params(tmp_path / "old.parquet", "table_classification", "label")
    out = tmp_path / "next.parquet"
    assert counts(merge(data, tmp_path / "new.parquet", out)) == (60, 1, 1, 0)
    assert pq.read_table(out)["label"].to_pylist()[60:] == ["1"]
    again = data.model_copy(update={"path": str(out)})
    for _ in range(2):
        assert counts(merge(again, tmp_path / "new.parquet", out)) == (61, 0, 2, 0)


@pytest.mark.parametrize("stored", ["text", "numbers"])
def test_merge_compares_categories_as_text_and_numbers_by_value(
    tmp_path: Path, stored: str
) -> None:
    zips: list[Any] = ["0123", "456", "789"] if stored == "text" else [123, 456, 789]
    rows = [
        {"a": f"{(7 * row) % 61}.50", "zip": zips[row % 3], "label": str(row % 2)}
        for row in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    new: dict[str, list[Any]] = {
        "a": [0.5, 7.5, 14.5],
        "zip": ["123" if stored == "text" else "0123", "456", None],
        "label": ["0", "1", "0"],
    }
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    data = raw_files.data_params(
        tmp_path / "old.parquet", "table_classification", "label", columns={"zip": said("category")}
    )
    assert counts(merge(data, tmp_path / "new.parquet", tmp_path / "next.parquet")) == (60, 2, 1, 0)
    assert pq.read_table(tmp_path / "next.parquet")["zip"].to_pylist()[60:] == [new["zip"][0], None]


def test_merging_a_regression_table_keeps_its_targets(tmp_path: Path) -> None:
    data = raw_files.data_params(raw_files.numbered_csv(tmp_path / "old.csv"))
    pq.write_table(
        pa.table({"a": [0.5, 1.25], "b": [0.0, 3.0], "target": [0.0, 7.5]}),
        tmp_path / "collected.parquet",
    )
    report = merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    assert counts(report) == (30, 1, 1, 0)
    after = cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")}))
    before = cleaned(data).cleaned.rows["target"].to_pylist()
    assert Counter(after.cleaned.rows["target"].to_pylist()) == Counter([*before, 7.5])


def test_merge_keeps_column_kinds_that_the_user_corrected(tmp_path: Path) -> None:
    old = write_base_table(tmp_path / "old.csv")
    data = raw_files.data_params(
        old,
        "table_classification",
        "label",
        columns={"colour": said("category"), "same": said("ignore")},
    )
    merge(data, write_collected_table(tmp_path / "collected.parquet"), tmp_path / "next.parquet")
    before, after = (
        cleaned(data),
        cleaned(data.model_copy(update={"path": str(tmp_path / "next.parquet")})),
    )
    assert [each.name for each in after.types] == [each.name for each in before.types]


def test_merge_refuses_tables_with_different_columns(tmp_path: Path) -> None:
    data = raw_files.data_params(raw_files.numbered_csv(tmp_path / "old.csv"))
    pq.write_table(
        pa.table({"a": [0.5], "c": [0.0], "target": [0.0]}), tmp_path / "collected.parquet"
    )
    with pytest.raises(DataError, match="do not both have the columns c"):
        merge(data, tmp_path / "collected.parquet", tmp_path / "next.parquet")
    assert not (tmp_path / "next.parquet").exists()


def test_merge_writes_new_numbers_and_dates_in_the_notation_of_the_base_data(
    tmp_path: Path,
) -> None:
    lines = [f"{(7 * row) % 31}.5%,{row % 28 + 1:02}/12/2020,{row % 9}" for row in range(30)]
    base = write_csv(tmp_path / "t.csv", "\n".join(["rate,day,target", *lines, ""]))
    data = raw_files.data_params(base, date_format="%d/%m/%Y")
    new = {"rate": [0.5, 99.25], "day": ["2020-12-01", "2020-12-31"], "target": [0.0, 7.0]}
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "collected.parquet", out)
    assert (report.num_base, report.num_added) == (30, 1)
    merged = data.model_copy(update={"path": str(out)})
    before, after = cleaned(data), cleaned(merged)
    assert not len(after.cleaned.quarantine)
    cells = after.cells.to_pylist()
    assert {"rate": 99.25, "day": 18627.0} in [{k: c[k] for k in ("rate", "day")} for c in cells]
    ids = before.cleaned.rows["id"].to_pylist()
    assert set(ids) < set(after.cleaned.rows["id"].to_pylist())


def test_merge_reads_and_writes_numbers_with_the_marks_of_the_base_data(tmp_path: Path) -> None:
    lines = [f"{row % 7 + 1}.{(37 * row) % 900 + 100};{row % 9 + 1}.000,5 €" for row in range(30)]
    base = write_csv(tmp_path / "t.csv", "\n".join(["area;target", *lines, ""]))
    data = raw_files.data_params(base, decimal=",", thousands=".")
    new = {"area": [1100.0, 2.234, 2234.0], "target": [1000.5, 7.25, 3.0]}
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "collected.parquet", out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (30, 2, 1)
    after = cleaned(data.model_copy(update={"path": str(out)}))
    assert not len(after.cleaned.quarantine)
    assert {2.234, 2234.0} <= set(after.cells["area"].to_pylist())
    assert {7.25, 3.0} <= set(after.cleaned.rows["target"].to_pylist())
    before = cleaned(data).cleaned.rows["id"].to_pylist()
    assert set(before) < set(after.cleaned.rows["id"].to_pylist())


def test_merge_compares_targets_with_units_and_thousands_separators_by_value(
    tmp_path: Path,
) -> None:
    rows = "".join(f'"{number},{number}50.25",{number}.5%\n' for number in range(1, 10))
    base = write_csv(tmp_path / "t.csv", f"price,target\n{rows}")
    data = raw_files.data_params(base, task="table_regression")
    new = {"price": [1150.25, 77.5], "target": [1.5, 8.25]}
    pq.write_table(pa.table(new), tmp_path / "collected.parquet")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "collected.parquet", out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (9, 1, 1)
    assert pq.read_table(out)["target"].to_pylist()[-1] == "8.25%"
    after = cleaned(data.model_copy(update={"path": str(out)}))
    assert not len(after.cleaned.quarantine)
