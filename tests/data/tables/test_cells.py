import math
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.engine.rows import hex_strings
from slipway.data.sources.raw_tables import RawTable, read_raw_table
from slipway.data.tables.cells import (
    BAD,
    GOOD,
    MISSING,
    MISSING_WORDS,
    row_digests,
    typed_column,
)
from tests.data.raw_files import write_csv


def raw_csv(folder: Path, *cells: str) -> RawTable:
    return read_raw_table(
        write_csv(folder / "t.csv", "a,b\n" + "".join(f"{cell},0\n" for cell in cells))
    )


def digests(table: RawTable) -> list[str]:
    found, _ = row_digests(list(table.columns.values()), np.arange(len(table.numbers)))
    return [str(text) for text in hex_strings(found).to_pylist()]


def test_words_for_missing_values_count_as_missing_in_upper_and_lower_case(tmp_path: Path) -> None:
    words = [variant for word in MISSING_WORDS for variant in (word, word.upper(), f" {word} ")]
    for kind in ("number", "category", "boolean", "date"):
        states = typed_column(raw_csv(tmp_path, *words).columns["a"], kind).cell_states
        assert set(states.tolist()) == {MISSING}, kind


@pytest.mark.parametrize(
    "cell", ["1,2", "0x10", "1_0", "12abc", "1e", "-", "inf", "-Infinity", "1e999", "١"]
)
def test_a_cell_of_a_number_column_that_is_no_finite_number_is_bad(
    tmp_path: Path, cell: str
) -> None:
    column = typed_column(raw_csv(tmp_path, f'"{cell}"', "5").columns["a"], "number")
    assert column.cell_states.tolist() == [BAD, GOOD]
    assert math.isnan(column.cells[0])


@pytest.mark.parametrize(
    ("cell", "number"),
    [("5", 5), ("+5", 5), (" -5. ", -5), (".5", 0.5), ("1E+05", 1e5), ("-0.0", 0)],
)
def test_a_number_is_read_the_same_beside_good_and_bad_cells(
    tmp_path: Path, cell: str, number: float
) -> None:
    for others in ([], ["bad"]):
        column = typed_column(raw_csv(tmp_path, cell, *others).columns["a"], "number")
        assert column.cells[0] == number
        assert math.copysign(1, float(column.cells[0])) == math.copysign(1, number)


def test_typed_column_reads_booleans_dates_and_categories(tmp_path: Path) -> None:
    boolean = typed_column(raw_csv(tmp_path, "Yes", "F", "1", "perhaps").columns["a"], "boolean")
    assert boolean.cells[:3].tolist() == [1, 0, 1]
    assert boolean.cell_states[3] == BAD
    texts = ("1970-01-02", "1970-01-02T12:00:00Z", "1970-01-02T13:00+01:00", "1970-02-31")
    dates = typed_column(raw_csv(tmp_path, *texts).columns["a"], "date")
    assert dates.cells[:3].tolist() == [1, 1.5, 1.5]
    assert dates.cell_states[3] == BAD
    category = typed_column(raw_csv(tmp_path, " x ", "y" * 257).columns["a"], "category")
    assert category.cells[0] == "x"
    assert category.cell_states[1] == BAD


def test_a_row_has_one_digest_in_csv_and_parquet_whatever_the_order_of_columns(
    tmp_path: Path,
) -> None:
    write_csv(tmp_path / "t.csv", "n,t,d\n1.0,x,2026-11-20\n-0,NA,\n")
    columns = {"d": [date(2026, 11, 20), None], "t": ["x", None], "n": pa.array([1, 0], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert digests(read_raw_table(tmp_path / "t.csv")) == digests(
        read_raw_table(tmp_path / "t.parquet")
    )


def test_every_difference_of_a_row_changes_its_digest(tmp_path: Path) -> None:
    tables = [
        "a,b\n1,x\n",
        "a,b\n2,x\n",
        "a,b\n1,y\n",
        "a,b\nx,1\n",
        "a,c\n1,x\n",
        "a,b\n,x\n",
        "a,b,c\n1,x,\n",
    ]
    found = [digests(read_raw_table(write_csv(tmp_path / "t.csv", text)))[0] for text in tables]
    assert len(set(found)) == len(tables)


def test_integers_that_float64_cannot_hold_are_different_rows_in_csv_and_parquet_alike(
    tmp_path: Path,
) -> None:
    numbers = [2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, -(2**62) - 1, 5, None]
    pq.write_table(
        pa.table({"a": pa.array(numbers, pa.int64()), "b": [0] * len(numbers)}),
        tmp_path / "t.parquet",
    )
    stored = read_raw_table(tmp_path / "t.parquet")
    written = raw_csv(tmp_path, *("" if number is None else str(number) for number in numbers))
    assert digests(stored) == digests(written)
    assert len(set(digests(stored))) == len(numbers)
    assert typed_column(stored.columns["a"], "number").cells[-2] == 5.0
    assert (
        digests(raw_csv(tmp_path, "9007199254740992"))
        == digests(raw_csv(tmp_path, "9007199254740992.0", "5"))[:1]
    )
