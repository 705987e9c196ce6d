from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from slipway.data.sources.raw_tables import read_raw_table, stored_column
from slipway.data.tables.column_types import ColumnGuess, column_types, columns_yaml, infer
from slipway.inputs.columns import ColumnType
from tests.data.raw_files import said, write_csv


def guess(folder: Path, cells: list[str], name: str = "a") -> ColumnGuess:
    table = read_raw_table(
        write_csv(folder / "t.csv", f"{name},other\n" + "".join(f"{cell},0\n" for cell in cells))
    )
    return infer(table.columns[name.strip()])


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "2.5", "NA"], "number"),
        (["3", "1", "2"] * 30 + ["oops"], "number"),
        (["yes", "no", ""], "boolean"),
        (["true", "False"], "boolean"),
        (["yes", "no", "maybe"], "category"),
        (["2026-11-20", "2026-11-21T10:00:00Z"], "date"),
        (["red", "blue", "2"], "category"),
        (["1", "2", "3", "x"], "category"),
    ],
)
def test_the_kind_of_a_column_is_inferred_from_nearly_all_of_its_cells(
    tmp_path: Path, cells: list[str], kind: str
) -> None:
    assert guess(tmp_path, cells).kind == kind


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["", "NA"], "it is empty: no row has a value"),
        ([f"id {number}" for number in range(50)], "ids or free text: 50 different values"),
        (["x" * 300, "y" * 300], "free text: 2 cells"),
        ([str(number) for number in range(100, 150)], "counts the rows from 100 to 149"),
    ],
)
def test_columns_that_cannot_be_inputs_are_ignored_with_a_reason(
    tmp_path: Path, cells: list[str], reason: str
) -> None:
    found = guess(tmp_path, cells)
    assert found.kind == "ignore"
    assert reason in found.reason


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ([2**60 + 3 * row for row in range(60)], "ignore"),  # ids
        ([2**60 + row % 4 for row in range(60)], "category"),
        ([1_700_000_000_000_000_000 + 86_400_000_000_001 * row for row in range(60)], "number"),
    ],
)
def test_integers_that_float64_cannot_tell_apart_are_no_numbers(
    tmp_path: Path, numbers: list[int], kind: str
) -> None:
    assert guess(tmp_path, [str(number) for number in numbers]).kind == kind
    stored = stored_column("n", pa.chunked_array([pa.array(numbers, pa.int64())]))
    assert infer(stored).kind == kind


@pytest.mark.parametrize(
    "cells",
    [
        ["-0,35", "2", "NA", "1,5"],
        ["1.234,5", "7,25"],
        ["1,234", "12"],
        ["1'000", "12"],
        ["1\u00a0000,5", "3,1"],
    ],
)
def test_numbers_with_decimal_commas_are_reported_with_a_remedy(
    tmp_path: Path, cells: list[str]
) -> None:
    found = guess(tmp_path, [f'"{cell}"' for cell in cells] * 10)
    assert found.kind == "ignore"
    assert "which holds for all columns" in found.reason
    assert repr(cells[0]) in found.reason


@pytest.mark.parametrize(
    "cells",
    [
        ["1,2,3", "4,5"],
        ["1-2", "3-4"],
        ["20.2.2025", "1.3.2025"],
        ["a,5", "b,5"],
        ["192.168.0.1", "10.0.0.1"],
    ],
)
def test_text_with_commas_and_points_is_not_taken_for_numbers(
    tmp_path: Path, cells: list[str]
) -> None:
    assert guess(tmp_path, [f'"{cell}"' for cell in cells] * 10).kind == "category"


@pytest.mark.parametrize("name", ["", " ", "__index_level_0__", "Unnamed: 0"])
def test_the_row_index_of_another_program_is_not_an_input(tmp_path: Path, name: str) -> None:
    assert "row index" in guess(tmp_path, ["5", "3"], name=name).reason
    assert guess(tmp_path, ["5", "3"], name="index").kind == "number"


def test_column_kinds_in_the_params_override_inferred_kinds(tmp_path: Path) -> None:
    raw = read_raw_table(write_csv(tmp_path / "t.csv", "a,b\n1,2\n3,4\n")).columns
    kinds = [
        column.kind for column in column_types(raw, {"a": said("category"), "b": said("ignore")})
    ]
    assert kinds == ["category", "ignore"]


def test_the_text_of_columns_yaml_can_be_pasted_into_params(tmp_path: Path) -> None:
    name = 'odd: "name" # 1'
    columns = [ColumnType(name=name, kind="number", required=False, min=0.0, max=None)]
    text = columns_yaml(columns, {"id": "counts\nthe rows # from 0"})
    loaded = yaml.safe_load(text)
    assert loaded == {
        name: {"kind": "number", "min": 0.0, "max": None, "required": False},
        "id": {"kind": "ignore", "min": None, "max": None, "required": False},
    }
    assert list(loaded[name]) == ["kind", "min", "max", "required"]
    assert "counts the rows # from 0" in text
    assert yaml.safe_load(columns_yaml([], {})) == {}
