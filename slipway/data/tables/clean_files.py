"""Reads and writes the files of `clean` that only tables have.

cells.parquet       the typed inputs of the kept rows, under their ids
columns.json        the types of the inputs in order, and the names of all other columns
bad_cells.parquet   every cell that broke a rule, by row and column
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from slipway.data.engine.rows import read_record, read_table, write_table
from slipway.inputs.columns import ColumnType
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError

CELLS = "cells.parquet"
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
