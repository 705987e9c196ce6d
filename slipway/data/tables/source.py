"""Finds the table of the data set, and returns its rows as JSON objects, as clients send them.

Cells are read by the same code as in `clean`, with the kinds that `clean` recorded. The id of each
row is computed again from the raw file, so a changed file is detected by its ids.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.data.engine.rows import ID_DIGITS
from slipway.data.sources.image_tables import TABLE_ENDINGS, TABLES
from slipway.data.sources.joined import origin_of
from slipway.data.sources.raw_tables import (
    RawColumn,
    RawTable,
    column_names,
    is_row_index,
    join_tables,
    read_raw_table,
)
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.sources import each_source, existing_path, find_layout, table_in
from slipway.data.sources.text_folders import (
    is_text_folder,
    read_text_folder,
    text_files,
    text_folder_columns,
)
from slipway.data.sources.text_format import TextFormat
from slipway.data.tables.cells import TypedColumn, row_digests, typed_column
from slipway.data.tables.notation import iso_date
from slipway.inputs.columns import ColumnContract, ColumnType, read_date
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError, IntegrityError

JsonRow = dict[str, float | str | bool | None]


def find_table(data: DataParams) -> Path:
    """Return the table at `data.path`: a file, or a folder of shards.

    If the folder `data.path` holds one table, that file is returned. For a task of texts, any other
    folder is read as text files by class. Raises DataError if there is no table.
    """
    has_texts = kind_of(data.task).input.has_texts
    also = ", or a folder of text files by class" if has_texts else ""
    root = existing_path(data, f"{TABLE_ENDINGS} or an .xlsx{also}")
    if root.is_dir():
        table = table_in(root, data)
        if table is None and has_texts and not find_layout(data).tables:
            return root
        if table is None:
            raise DataError(
                f"data.path {data.path!r} holds no table at its top. "
                f"Point it at {TABLE_ENDINGS} or an .xlsx for {data.task}."
            )
        return table
    if root.suffix.lower() not in TABLES:
        raise DataError(
            f"data.path {data.path!r} ends in {root.suffix!r}, "
            f"expected {TABLE_ENDINGS} or an .xlsx{also} for {data.task}."
        )
    return root


def stored_tables(data: DataParams) -> list[Path]:
    """Return the files or folders of shards that hold the table, or all text files.

    For an unpacked source, the archive is returned.
    """
    if data.sources is None:
        table = find_table(data)
        if is_text_folder(table):
            return [Path(file.path) for file in text_files(data) if file.path]
        return [table]
    found = {Path(data.path, name): source for name, source in each_source(data).items()}
    stored = [
        [path] if Path(source.path) != path else stored_tables(source)
        for path, source in found.items()
    ]
    return [table for tables in stored for table in tables]


def table_of(data: DataParams, source: str) -> Path:
    """Return the file, or the folder of shards, that holds the row with this `source`."""
    if data.sources is None:
        return find_table(data)
    sources = each_source(data)
    return find_table(sources[origin_of(source, list(sources))])


def read_table_of(data: DataParams, only: Collection[str] | None = None) -> RawTable:
    """Read the table, or the joined tables of all sources: all columns, or `only` these."""
    if data.sources is None:
        path = find_table(data)
        if is_text_folder(path):
            return read_text_folder(data, only)
        return read_raw_table(path, only, TextFormat.of(data))
    tables = {name: read_table_of(source, only) for name, source in each_source(data).items()}
    if data.split_column != GIVEN_SPLIT:  # with another value, names of shards are not splits
        for table in tables.values():
            table.columns.pop(GIVEN_SPLIT, None)
    return join_tables(tables)


def columns_of(data: DataParams) -> list[str]:
    """Return the column names of the table, or of the first source, in order."""
    table = first_table(data)
    if is_text_folder(table):
        return text_folder_columns(data)
    return column_names(table, TextFormat.of(data))


def first_table(data: DataParams) -> Path:
    """Return the path of the table, or of the first source."""
    first = data if data.sources is None else next(iter(each_source(data).values()))
    return find_table(first)


def identified_columns(raw: RawTable) -> list[RawColumn]:
    """Return the columns whose values identify a row: all but row indices.

    `data.columns` has no influence, so ignoring a column moves no row to another split.
    """
    return [column for name, column in raw.columns.items() if not is_row_index(name)]


def read_json_rows(
    data: DataParams, types: Sequence[ColumnType], wanted: Collection[str]
) -> Iterator[tuple[str, str, JsonRow]]:
    """Yield source, digest and JSON object of each `wanted` source, in the order of the file.

    The digest is the part of the row's id that `content_of` returns.
    Numbers are finite floats, categories text, booleans bool, dates ISO 8601 text. A cell that
    `clean` did not accept is null. Raises IntegrityError if a column or a wanted row is missing.
    """
    raw = read_table_of(data)
    rows = wanted_rows(raw, data, [column.name for column in types], wanted)
    columns = [
        (column, typed_column(raw.columns[column.name], column.kind, column.map))
        for column in types
    ]
    digests, _ = row_digests(identified_columns(raw), rows)
    for row, digest in zip(rows.tolist(), digests, strict=True):
        cells = {column.name: json_cell(column, typed, row) for column, typed in columns}
        yield raw.source(int(raw.numbers[row])), digest.tobytes().hex()[:ID_DIGITS], cells


def wanted_rows(
    raw: RawTable, data: DataParams, names: Sequence[str], wanted: Collection[str]
) -> NDArray[np.int64]:
    """Return the positions of the `wanted` sources in the table.

    Raises IntegrityError if one of them, or one of the columns `names`, is missing.
    """
    missing = [name for name in names if name not in raw.columns]
    numbers = {int(source.partition(":")[0]) for source in wanted}
    rows = np.flatnonzero(np.isin(raw.numbers, list(numbers)))
    if missing or len(rows) != len(numbers):
        raise IntegrityError(
            f"{data.path!r} changed since it was cleaned: {len(numbers) - len(rows)} rows and "
            f"{len(missing)} columns ({', '.join(missing)}) are gone. "
            "Put it back, or run `slipway run`."
        )
    return rows


def raw_rows(
    data: DataParams, contract: ColumnContract, wanted: set[str]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield source, digest and JSON object of each row, in the form in which clients send rows."""
    for source, digest, row in read_json_rows(data, contract.columns, wanted):
        yield source, digest, json_row(row)


def json_row(row: Mapping[str, Any]) -> bytes:
    """Encode a row as a JSON object. Raises ValueError if a number is not finite."""
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode()


def json_cell(column: ColumnType, typed: TypedColumn, row: int) -> float | str | bool | None:
    """Return the cell of a row as a JSON value.

    Returns None if the cell is missing, of another kind or out of range.
    """
    value: Any = typed.cells[row]
    if column.kind == "category":
        return str(value) or None
    number = float(value)
    if math.isnan(number) or is_out_of_range(column, number):
        return None
    if column.kind == "date":
        text = str(typed.raw.values[int(typed.raw.codes[row])])
        with contextlib.suppress(ValueError):
            if read_date(text) == number:
                return text
        return iso_date(number)  # the service takes only this form
    return bool(number) if column.kind == "boolean" else number


def is_out_of_range(column: ColumnType, numbers: Any) -> Any:
    """Return True if a number is beyond the user's bounds; for an array, return a mask."""
    least = -math.inf if column.min is None else column.min
    most = math.inf if column.max is None else column.max
    return (numbers < least) | (numbers > most)
