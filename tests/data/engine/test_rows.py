"""Tests of tables between stages: only the declared schema can be written and read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.engine.rows import QUARANTINE, ROWS, read_table, row_numbers, write_table
from slipway.system.errors import SchemaError
from tests.data.pictures import row


def test_a_table_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(1), row(2, label=None, target=2.5)], schema=ROWS)
    write_table(tmp_path / "deep" / "rows.parquet", table, ROWS)
    assert read_table(tmp_path / "deep" / "rows.parquet", ROWS).equals(table)


def test_equal_tables_are_written_as_equal_bytes(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(1)], schema=ROWS)
    for name in ("a", "b"):
        write_table(tmp_path / name, table, ROWS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_write_table_refuses_a_different_schema(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="expected"):
        write_table(tmp_path / "rows.parquet", pa.Table.from_pylist([], schema=QUARANTINE), ROWS)
    assert list(tmp_path.iterdir()) == []


def test_read_table_refuses_a_different_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(SchemaError, match="has the columns"):
        read_table(tmp_path / "rows.parquet", ROWS)


def test_error_for_a_missing_table_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"rows\.parquet is missing.*slipway run"):
        read_table(tmp_path / "rows.parquet", ROWS)


@pytest.mark.parametrize("content", [b"", b"words"])
def test_a_damaged_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(SchemaError, match="not a readable Parquet file"):
        read_table(tmp_path / "rows.parquet", ROWS)


def test_row_numbers_are_minus_one_for_sources_that_are_files() -> None:
    sources = pa.chunked_array([["2", "10:images/1.png", "7/1.png", "cat/2.png", "9" * 30]])
    assert row_numbers(sources).to_pylist() == [2, 10, -1, -1, -1]
