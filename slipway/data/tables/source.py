"""Where the table is, and its rows again as JSON objects, as a client of the service would send them.

Cells are read by the same code as in `clean`, with the kinds that `clean` wrote down, and each row's id is made anew from the raw
file: a file that changed since gives other ids.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipway.config.sections import DataParams
from slipway.data.sources.image_tables import TABLES
from slipway.data.sources.raw_tables import RawColumn, RawTable, is_row_index, read_raw_table
from slipway.data.sources.sources import existing_path, table_in
from slipway.data.tables.cells import TypedColumn, row_digests, typed_column
from slipway.inputs.columns import ColumnContract, ColumnType
from slipway.system.errors import DataError, IntegrityError

ID_DIGITS = 32  # hex, the beginning of it

JsonRow = dict[str, float | str | bool | None]


def find_table(data: DataParams) -> Path:
    """Return the table at `data.path` or at its top, or the folder of shards; DataError if none."""
    root = existing_path(data, "a .csv or .parquet file")
    if root.is_dir():
        table = table_in(root)
        if table is None:
            raise DataError(
                f"data.path {data.path!r} holds no table at its top. Point it at a .csv or .parquet file for {data.task}."
            )
        return table
    if root.suffix.lower() not in TABLES:
        raise DataError(
            f"data.path {data.path!r} ends in {root.suffix!r}, expected a .csv or .parquet file for {data.task}."
        )
    return root


def identified_columns(raw: RawTable) -> list[RawColumn]:
    """The columns that make a row what it is: all but row indices.

    What `data.columns` says does not count: leaving a column out moves no row to another split.
    """
    return [column for name, column in raw.columns.items() if not is_row_index(name)]


def read_json_rows(
    data: DataParams, types: Sequence[ColumnType], wanted: Collection[str]
) -> Iterator[tuple[str, str, JsonRow]]:
    """(source, id, row) of each of the `wanted` sources, in the order of the file.

    Numbers are finite floats, categories text, booleans bool, dates ISO 8601 text, and null where `clean` found nothing that it took.
    IntegrityError if a column or a wanted row is no longer there.
    """
    raw = read_raw_table(find_table(data))
    missing = [column.name for column in types if column.name not in raw.columns]
    rows = np.flatnonzero(
        np.isin(raw.numbers, np.array([int(source) for source in wanted], np.int64))
    )
    if missing or len(rows) != len(set(wanted)):
        raise IntegrityError(
            f"{data.path!r} changed since it was cleaned: {len(set(wanted)) - len(rows)} rows and "
            f"{len(missing)} columns ({', '.join(missing)}) are gone. Put it back, or run `dvc repro`."
        )
    columns = [(column, typed_column(raw.columns[column.name], column.kind)) for column in types]
    digests, _ = row_digests(identified_columns(raw), rows)
    for row, digest in zip(rows.tolist(), digests, strict=True):
        cells = {column.name: json_cell(column, typed, row) for column, typed in columns}
        yield str(raw.numbers[row]), digest.tobytes().hex()[:ID_DIGITS], cells


def raw_rows(
    data: DataParams, contract: ColumnContract, wanted: set[str]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield source, id and JSON object of each row, as a client would send it."""
    for source, row_id, row in read_json_rows(data, contract.columns, wanted):
        yield source, row_id, json_row(row)


def json_row(row: Mapping[str, Any]) -> bytes:
    """Encode a row as a JSON object. ValueError if a number is not finite."""
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode()


def json_cell(column: ColumnType, typed: TypedColumn, row: int) -> float | str | bool | None:
    """Return a cell as JSON; None if it is missing, of another kind or out of range."""
    value: Any = typed.cells[row]
    if column.kind == "category":
        return str(value) or None
    number = float(value)
    if math.isnan(number) or is_out_of_range(column, number):
        return None
    if column.kind == "date":
        return str(typed.raw.values[int(typed.raw.codes[row])])
    return bool(number) if column.kind == "boolean" else number


def is_out_of_range(column: ColumnType, number: float) -> bool:
    """True if a number is beyond the user's bounds."""
    return (column.min is not None and number < column.min) or (
        column.max is not None and number > column.max
    )
