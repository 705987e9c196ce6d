"""What `clean` leaves of a table for the stages after it, beside `rows.parquet` and `quarantine.parquet`.

cells.parquet       the kept rows' inputs, typed, under their ids
columns.json        the types of the inputs, in their order, and the names of the columns that are no inputs
bad_cells.parquet   every cell that broke a rule, by row and column
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.data.engine.rows import write_table
from slipway.inputs.columns import ColumnType
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SchemaError

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
        pa.field(
            "value", pa.string(), nullable=False
        ),  # as it stands in the file, cut where it is long
        pa.field(
            "action", pa.string(), nullable=False
        ),  # "refuse": the row is in the quarantine; "flag": the row is kept
    ]
)


class TableColumns(Contract):
    """The content of `columns.json`."""

    inputs: list[ColumnType]
    ignored: list[str]  # every other column but the target


def write_cells(folder: Path, cells: pa.Table, columns: TableColumns, bad_cells: pa.Table) -> None:
    write_table(folder / CELLS, cells, cell_schema(columns.inputs))
    files.write_json(folder / "columns.json", columns.model_dump(mode="json"))
    write_table(folder / "bad_cells.parquet", bad_cells, BAD_CELLS)


def read_cells(folder: Path) -> tuple[pa.Table, TableColumns]:
    """Read the cells and columns; SchemaError if they are missing or do not match."""
    try:
        columns = TableColumns.model_validate_json((folder / "columns.json").read_bytes())
        cells = pq.read_table(folder / CELLS, partitioning=None)
    except (OSError, ValueError) as error:
        raise SchemaError(
            f"{folder} has no readable cells.parquet and columns.json: {error}. Run `dvc repro --force clean`."
        ) from error
    if not cells.schema.equals(cell_schema(columns.inputs)):
        raise SchemaError(
            f"{folder}/cells.parquet does not have the columns of columns.json. Run `dvc repro --force clean`."
        )
    return cells, columns


def cell_schema(types: list[ColumnType]) -> pa.Schema:
    """Return the schema of `cells.parquet`."""
    return pa.schema(
        [
            pa.field(ID_COLUMN, pa.string()),
            *(pa.field(column.name, CELL_TYPES[column.kind]) for column in types),
        ]
    )
