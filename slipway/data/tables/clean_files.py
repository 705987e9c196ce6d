"""Reads and writes the files of `clean` that only tables and tables of texts have.

cells.parquet        the typed inputs of the kept rows, under their ids
columns.json         the types of the inputs in order, and the names of all other columns
bad_cells.parquet    every cell that broke a rule, by row and column
unlabelled.parquet   the rows without a target as they were read, for `slipway predict`
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.rows import read_record, read_table, row_numbers, write_table
from slipway.data.engine.scratch import slices, store_table
from slipway.data.sources.raw_tables import RawTable
from slipway.inputs.columns import ColumnType
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError

CELLS = "cells.parquet"
UNLABELLED = "unlabelled.parquet"
_WRITTEN_ROWS = 1 << 14  # rows written at a time
ID_COLUMN = "slipway_id"
CELL_TYPES = {
    "number": pa.float64(),
    "date": pa.float64(),
    "boolean": pa.bool_(),
    "category": pa.string(),
}
BAD_CELLS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        # Values as in the file; long ones are cut.
        pa.field("value", pa.string(), nullable=False),
        # "refuse": the row is in the quarantine; "flag": the row is kept.
        pa.field("action", pa.string(), nullable=False),
    ]
)


class TableColumns(Contract):
    """The content of `columns.json`."""

    inputs: list[ColumnType]
    ignored: list[str]  # every other column but the target
    decimal: str = "."  # the marks of numbers in the file, which the bundle keeps
    thousands: str | None = None


def write_cells(folder: Path, cells: pa.Table, columns: TableColumns, bad_cells: pa.Table) -> None:
    """Write cells, columns and bad cells to files in `folder`."""
    write_table(folder / CELLS, cells, cell_schema(columns.inputs))
    files.write_json(folder / "columns.json", columns.model_dump(mode="json"))
    write_table(folder / "bad_cells.parquet", bad_cells, BAD_CELLS)


def write_unlabelled(folder: Path, raw: RawTable, quarantine: pa.Table) -> None:
    """Write the raw cells of the rows without a target, if there are any, in the file's order."""
    sources = quarantine["source"].filter(pc.equal(quarantine["severity"], "unlabelled"))
    if not len(sources):
        return
    rows = np.searchsorted(raw.numbers, np.sort(row_numbers(sources).to_numpy()))
    write_raw_rows(folder / UNLABELLED, raw, rows)


def write_raw_rows(path: Path, raw: RawTable, rows: NDArray[np.int64]) -> None:
    """Write the raw cells of some rows to a Parquet file, without columns of unknown types."""
    columns = [column for column in raw.columns.values() if column.stored != "other"]
    schema = pa.schema([(column.name, column.values.type) for column in columns])

    def batches() -> Iterator[pa.RecordBatch]:
        for part in slices(len(rows), _WRITTEN_ROWS):
            codes = [column.codes[rows[part]] for column in columns]
            cells = [
                column.values.take(pa.array(chosen, mask=chosen < 0))
                for column, chosen in zip(columns, codes, strict=True)
            ]
            yield pa.record_batch(cells, schema=schema)

    write_table(path, store_table(batches(), schema), schema)


def read_cells(folder: Path) -> tuple[pa.Table, TableColumns]:
    """Read the cells and the columns. Raises SchemaError if they are missing or do not match."""
    columns = read_record(TableColumns, folder / "columns.json", "clean")
    return read_table(folder / CELLS, cell_schema(columns.inputs)), columns


def in_order_of(rows: pa.Table, found: pa.Table, what: str) -> pa.Table:
    """Return what `clean` wrote under the ids of `rows`, in their order.

    Raises IntegrityError if an id is missing; `what` names the cells or texts.
    """
    positions = pc.index_in(rows["id"].combine_chunks(), found[ID_COLUMN].combine_chunks())
    if positions.null_count:
        raise IntegrityError(
            f"{positions.null_count} of {rows.num_rows} rows have no {what} in data/clean. "
            "Run `dvc repro --force clean split`."
        )
    return found.take(positions)


def cell_schema(types: list[ColumnType]) -> pa.Schema:
    """Return the schema of `cells.parquet` for columns of these types."""
    return pa.schema(
        [
            pa.field(ID_COLUMN, pa.string()),
            *(pa.field(column.name, CELL_TYPES[column.kind]) for column in types),
        ]
    )
