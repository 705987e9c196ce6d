"""What `clean` leaves of a table for the stages after it, beside `rows.parquet` and `quarantine.parquet`.

cells.parquet       the kept rows' inputs, typed, under their ids
columns.json        the types of the inputs, in their order
bad_cells.parquet   every cell that broke a rule, by row and column
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.data.engine.rows import write_table
from slipway.inputs.columns import ColumnType
from slipway.system import files
from slipway.system.errors import SchemaError

ID_COLUMN = "slipway_id"
CELL_TYPES = {"number": pa.float64(), "date": pa.float64(), "boolean": pa.bool_(), "category": pa.string()}
BAD_CELLS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),  # as it stands in the file, cut where it is long
        pa.field("action", pa.string(), nullable=False),  # "refuse": the row is in the quarantine; "flag": the row is kept
    ]
)


def write_cells(folder: Path, cells: pa.Table, types: list[ColumnType], bad_cells: pa.Table) -> None:
    """Write the three files."""
    write_table(folder / "cells.parquet", cells, cell_schema(types))
    files.write_json(folder / "columns.json", [column.model_dump(mode="json") for column in types])
    write_table(folder / "bad_cells.parquet", bad_cells, BAD_CELLS)


def read_cells(folder: Path) -> tuple[pa.Table, list[ColumnType]]:
    """The cells and their types; SchemaError if they are missing or do not fit each other."""
    try:
        types = [ColumnType.model_validate(entry) for entry in json.loads((folder / "columns.json").read_bytes())]
        cells = pq.read_table(folder / "cells.parquet", partitioning=None)
    except (OSError, ValueError) as error:
        raise SchemaError(f"{folder} has no readable cells.parquet and columns.json: {error}. Run `dvc repro --force clean`.") from error
    if not cells.schema.equals(cell_schema(types)):
        raise SchemaError(f"{folder}/cells.parquet does not have the columns of columns.json. Run `dvc repro --force clean`.")
    return cells, types


def cell_schema(types: list[ColumnType]) -> pa.Schema:
    """Of cells.parquet."""
    return pa.schema([pa.field(ID_COLUMN, pa.string()), *(pa.field(column.name, CELL_TYPES[column.kind]) for column in types)])
