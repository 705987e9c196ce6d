"""Shards whose types differ are one table, in folders of Parquet and of CSV files alike."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.raw_tables import cell_text, read_raw_table, shard_note, shard_schema
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.shard_types import common_type
from slipway.data.sources.shards import table_files
from slipway.data.sources.sources import find_layout
from slipway.data.sources.text_format import USUAL_FORMAT, NumberMarks
from slipway.data.tables.source import find_table, read_table_of
from slipway.system.errors import DataError
from tests.data.pictures import data_params as image_params
from tests.data.raw_files import cleaned, data_params
from tests.data.sources.split_folders import read
from tests.data.sources.test_given_shards import write_shard

CLASSES = "table_classification"
DICTIONARY = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([pa.null(), pa.string()], pa.string()),
        ([pa.null(), pa.list_(pa.int64())], pa.list_(pa.int64())),
        ([pa.int64(), pa.float64()], pa.float64()),
        ([pa.int8(), pa.null(), pa.int64()], pa.int64()),
        ([DICTIONARY, pa.string(), pa.large_string()], pa.string()),
        ([pa.dictionary(pa.int8(), pa.int64()), pa.float64()], pa.float64()),
        ([pa.timestamp("s"), pa.timestamp("ns")], pa.timestamp("ns")),
        ([pa.bool_(), pa.int64()], pa.string()),
        ([pa.date32(), pa.string()], pa.string()),
        ([pa.string(), pa.binary()], None),
        ([pa.struct([("bytes", pa.binary())]), pa.binary()], None),
        ([pa.list_(pa.string()), pa.string()], None),
    ],
)
def test_types_are_promoted_permissively_and_otherwise_become_text_where_cells_have_one(
    kinds: list[pa.DataType], expected: pa.DataType | None
) -> None:
    assert common_type(kinds) == expected


def write_shards(folder: Path, *shards: Sequence[pa.Array]) -> Path:
    """Write Parquet shards with a column x of these cells, and a number and a target beside it."""
    folder.mkdir()
    for number, cells in enumerate(shards):
        rows = range(len(cells))
        target = [["no", "yes"][row % 2] for row in rows]
        columns = {"x": cells, "z": [0.5 + row for row in rows], "target": target}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return folder


def as_csv(folder: Path) -> Path:
    """Write the shards of a folder as CSV files; a cell is written as its label would be."""
    copy = folder.with_name(f"{folder.name}_csv")
    copy.mkdir()
    for path in table_files(folder):
        table = pq.read_table(path)
        with (copy / f"{path.stem}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.column_names)
            for row in table.to_pylist():
                writer.writerow("" if cell is None else cell_text(cell) for cell in row.values())
    return copy


def cells_of(folder: Path, name: str = "x") -> list[Any]:
    column = read_raw_table(folder).columns[name]
    return [column.values[code].as_py() if code >= 0 else None for code in column.codes.tolist()]


SHARDS: dict[str, tuple[list[pa.Array], list[Any], str]] = {
    "null and text": (
        [pa.nulls(2), pa.array(["a", None])],
        [None, None, "a", None],
        "x (null and text, joined as text)",
    ),
    "int64 and double": (
        [pa.array([1, 2]), pa.array([0.5, None])],
        [1.0, 2.0, 0.5, None],
        "x (int64 and double, joined as double)",
    ),
    "bool and int64": (
        [pa.array([True, False]), pa.array([1, 0])],
        ["true", "false", "1", "0"],
        "x (bool and int64, joined as text)",
    ),
    "dictionary and text": (
        [pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "c"])],
        ["a", "b", "b", "c"],
        "",
    ),
    "an empty last shard": ([pa.array([1, 2]), pa.nulls(0)], [1.0, 2.0], ""),
    "large whole numbers and double": (
        [pa.array([2**53 + 1, 7]), pa.array([1.5, 2.0])],
        [str(2**53 + 1), "7", "1.5", "2"],
        "x (int64 and double, joined as text)",
    ),
}


@pytest.mark.parametrize(("shards", "cells", "note"), SHARDS.values(), ids=SHARDS)
def test_shards_of_different_types_are_read_as_one_table_and_one_line_says_so(
    tmp_path: Path, shards: list[pa.Array], cells: list[Any], note: str
) -> None:
    folder = write_shards(tmp_path / "raw", *shards)
    data = data_params(folder, CLASSES)
    assert find_table(data) == folder
    assert cells_of(folder) == cells
    said = f"columns of different types in different files: {note}" if note else ""
    assert shard_note(table_files(folder), USUAL_FORMAT) == said
    layout = find_layout(data)
    rows = pa.table({"given_split": [], "time": []})
    assert layout.described(rows, USUAL_FORMAT) == (f"{said}\n" if said else "")
    assert shard_schema(table_files(folder)).field("target").type == pa.string()


@pytest.mark.parametrize("shards", [shards for shards, _, _ in SHARDS.values()], ids=SHARDS)
def test_a_folder_of_csv_files_is_cleaned_like_the_same_folder_of_parquet_files(
    tmp_path: Path, shards: list[pa.Array]
) -> None:
    folder = write_shards(tmp_path / "raw", *(pa.concat_arrays([cells] * 8) for cells in shards))
    rules = {"max_bad_fraction": 1.0}
    tables = [cleaned(data_params(path, CLASSES), **rules) for path in (folder, as_csv(folder))]
    kinds = [{column.name: column.kind for column in table.columns} for table in tables]
    assert kinds[0] == kinds[1]
    parquet, text = (table.cleaned.rows.drop_columns(["id"]).to_pylist() for table in tables)
    assert parquet == text
    assert len(parquet) + tables[0].cleaned.quarantine.num_rows == 8 * sum(map(len, shards))


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ("x\ntrue\nfalse\n", "x\n1\n0\n", "x (bool and int64, joined as text)"),
        ("y;x\n1;2.5\n", "x;y\nlow;7\n", "x (double and text, joined as text)"),
        ("x\n1\n", "x\n2020-01-01\n", "x (int64 and date32[day], joined as text)"),
        ("x\n1\n", "x\n2.5\n", ""),
        ("x\nNA\nNA\n", "x\nlow\n", ""),
        ("x,y\n1,2\n3\n", "x,y\n4,5\n", ""),
    ],
)
def test_csv_files_are_said_to_differ_where_only_some_of_them_hold_text(
    tmp_path: Path, first: str, second: str, note: str
) -> None:
    for name, content in (("a", first), ("b", second)):
        (tmp_path / f"{name}.csv").write_text(content)
    said = f"columns of different types in different files: {note}" if note else ""
    assert shard_note(table_files(tmp_path), USUAL_FORMAT) == said


def test_a_decimal_comma_is_no_other_type(tmp_path: Path) -> None:
    for name, content in (("a", "x;y\n1;2\n"), ("b", "x;y\n1,5;2\n")):
        (tmp_path / f"{name}.csv").write_text(content)
    assert "x (int64 and text" in shard_note(table_files(tmp_path), USUAL_FORMAT)
    written = USUAL_FORMAT._replace(marks=NumberMarks(",", None))
    assert shard_note(table_files(tmp_path), written) == ""


def test_a_column_of_booleans_and_of_0_and_1_is_boolean(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "raw", pa.array([True, False] * 9), pa.array([0, 1] * 9))
    table = cleaned(data_params(folder, CLASSES), max_bad_fraction=1.0)
    assert {column.name: column.kind for column in table.columns}["x"] == "boolean"


def test_csv_files_of_different_columns_are_refused_with_the_difference(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,target\n1,2\n")
    (tmp_path / "b.csv").write_text("x,size\n1,2\n")
    with pytest.raises(DataError, match=r"(?s)holds 2 CSV files.*b\.csv: lacks target; also has s"):
        find_table(data_params(tmp_path))


def test_csv_files_that_name_splits_give_the_split_as_parquet_files_do(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,target\n1,2\n3,4\n5\n")
    (tmp_path / "test.csv").write_text("target;x\n6;7\n")
    raw = read_table_of(data_params(tmp_path))
    given = raw.columns[GIVEN_SPLIT]
    assert given.values.take(pa.array(given.codes)).to_pylist() == ["test", "train", "train"]
    assert cells_of(tmp_path) == ["7", "1", "3"]
    assert raw.malformed == [(3, "1 cells, the header names 2")]
    assert raw.numbers.tolist() == [0, 1, 2]


def test_a_split_file_among_the_shards_of_a_table_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("x,target\n1,2\n")
    (tmp_path / "splits.csv").write_text("x,split\n1,train\n")
    data = data_params(tmp_path, split_file=str(tmp_path / "splits.csv"))
    with pytest.raises(DataError, match=r"splits\.csv' lies among the 2 files of the table"):
        find_table(data)


def test_an_image_shard_without_rows_or_types_adds_nothing(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [1, 2])
    pq.write_table(pa.table({"image": pa.nulls(0), "label": pa.nulls(0)}), tmp_path / "b.parquet")
    assert [sample.label for sample in read(tmp_path)] == ["b", "a"]
    assert find_layout(image_params(tmp_path)).type_notes(USUAL_FORMAT) == []


@pytest.mark.parametrize("cell", [True, 7, 0.25, 1e16, 12345678901.5, "a"])
def test_a_cell_that_becomes_text_is_written_as_joined_tables_write_it(
    tmp_path: Path, cell: Any
) -> None:
    folder = write_shards(tmp_path / "raw", pa.array([cell]), pa.array(["text"]))
    assert cells_of(folder) == [cell_text(cell), "text"]
