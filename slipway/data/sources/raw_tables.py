"""Holds tables as columns of distinct cells and codes, read from a file of any format.

A column stores its distinct cells once and a code per row, so cells are parsed once per distinct
cell, whatever the number of rows. A malformed row is reported and left out; a file that is
unreadable as a whole raises DataError.
"""

import bisect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.data.engine.scratch import (
    distinct_texts,
    scratch_array,
    store_array,
    store_table,
    true_rows,
)
from slipway.data.sources.formats.csv_files import csv_names, csv_types, read_csv
from slipway.data.sources.formats.json_lines import is_jsonl, json_columns, read_json_lines
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.shard_types import common_type, plain_type
from slipway.data.sources.shards import (
    has_rows,
    is_csv,
    is_parquet,
    listed,
    parquet_columns,
    parquet_errors,
    read_parquet,
    shard_splits,
    table_files,
)
from slipway.data.sources.text_format import POINT, USUAL_FORMAT, NumberMarks, TextFormat
from slipway.system.errors import DataError

Stored = Literal["text", "number", "boolean", "other"]
EXACT_INTEGERS = 2**53  # float64 holds every whole number up to here
COLLECTED = "slipway_collected"  # marks rows from the service's traffic (slipway/data/merge)
# The names of a row index that pandas writes and reads back, and of our own marks: neither says
# anything of the row itself.
_INDEX_NAME = rf"\s*|__index_level_\d+__|Unnamed: \d+|{COLLECTED}|{GIVEN_SPLIT}"
_EMPTY = "empty"  # the type of a column without cells, which takes that of other tables
_MIXABLE = frozenset(("text", "number", "boolean", _EMPTY))
_MAX_SHOWN = 10
_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 12
_LONG_CELL_BYTES = 24  # a column with a larger average size holds texts, not names or numbers


@dataclass(frozen=True)
class RawColumn:
    """A raw column: its distinct cells, and for each row the code of its cell.

    Dates are text (ISO 8601), as are integers that float64 cannot hold. The type `other` stands for
    types that Slipway does not support (lists, bytes).
    """

    name: str
    stored: Stored
    values: pa.Array  # (U,) distinct cells without null: stripped text, float64 or bool
    codes: NDArray[np.int64]  # (N,) index into `values`, -1 for no cell
    arrow_type: str
    written: TextFormat = USUAL_FORMAT

    @property
    def unreadable(self) -> str:
        """Return the name and the type of an unsupported column, for a message."""
        return f"the column {self.name!r}, whose type {self.arrow_type} Slipway cannot read"


@dataclass(frozen=True)
class RawTable:
    """The columns of a table by name, the number of each row (from 0), and the malformed rows."""

    columns: dict[str, RawColumn]
    numbers: NDArray[np.int64]  # (N,) increasing
    malformed: list[tuple[int, str]]  # number of the row, and the text that was found
    # First number and name of each joined table or text file.
    origins: Sequence[tuple[int, str]] = ()

    @property
    def num_read(self) -> int:
        """The number of rows in the file, malformed ones included."""
        return len(self.numbers) + len(self.malformed)

    def source(self, number: int) -> str:
        """Return the name of a row in reports: its number, and its joined source, if any."""
        place = bisect.bisect_right(self.origins, number, key=lambda origin: origin[0]) - 1
        return f"{number}:{self.origins[place][1]}" if self.origins else str(number)

    def sources(self, numbers: NDArray[np.int64]) -> pa.Array:
        """Return the names of the rows `numbers`, as `source` does for one row."""
        texts = pa.array(numbers).cast(pa.string())
        if not self.origins:
            return texts
        begins, names = zip(*self.origins, strict=True)
        places = np.searchsorted(begins, numbers, "right") - 1
        return pc.binary_join_element_wise(texts, pa.array(names).take(pa.array(places)), ":")


def join_tables(tables: Mapping[str, RawTable]) -> RawTable:
    """Concatenate tables by the names of their columns.

    A column whose types differ between tables becomes text. Raises DataError if the tables have
    different columns.
    """
    all_types = {name: _types(table) for name, table in tables.items()}
    first = next(iter(tables))
    expected = {
        column: next(
            (own[column] for own in all_types.values() if own.get(column, _EMPTY) != _EMPTY), kind
        )
        for column, kind in all_types[first].items()
    }
    problems = [
        f"  {name}: {column} is {types.get(column, 'missing')}, {expected.get(column, 'missing')} "
        f"in {first}"
        for name, types in all_types.items()
        for column in sorted(types.keys() | expected.keys())
        if not _are_joinable({types.get(column, "missing"), expected.get(column, "missing")})
    ]
    if problems:
        raise DataError(
            "the tables that are joined have different columns:\n"
            + "\n".join(problems[:_MAX_SHOWN])
        )
    begins = np.cumsum([0, *(table.num_read for table in tables.values())]).tolist()
    placed = list(zip(begins, tables.values(), strict=False))
    return RawTable(
        {
            name: _joined([table.columns[name] for table in tables.values()])
            for name in tables[first].columns
        },
        np.concatenate([begin + table.numbers for begin, table in placed]),
        [(begin + number, found) for begin, table in placed for number, found in table.malformed],
        [
            (begin + first, f"{name}/{inside}" if inside else name)
            for begin, (name, table) in zip(begins, tables.items(), strict=False)
            for first, inside in table.origins or [(0, "")]
        ],
    )


def _types(table: RawTable) -> dict[str, str]:
    return {
        name: _EMPTY if column.arrow_type == "null" else column.stored
        for name, column in table.columns.items()
    }


def _are_joinable(types: set[str]) -> bool:
    return len(types) == 1 or types <= _MIXABLE or types == {"other", _EMPTY}


def _joined(columns: Sequence[RawColumn]) -> RawColumn:
    filled = [column for column in columns if column.arrow_type != "null"] or columns
    first = filled[0]
    if any(column.stored != first.stored for column in filled):
        first = replace(first, stored="text", values=pa.array([], pa.string()), arrow_type="string")
    cells = [_cells_as(first, column) for column in columns]
    found = pa.concat_arrays(cells).dictionary_encode()
    indices = found.indices.to_numpy(zero_copy_only=False)
    codes = scratch_array((sum(len(column.codes) for column in columns),), np.int64)
    begin = offset = 0
    for column in columns:
        own = np.append(indices[offset : offset + len(column.values)], -1)  # -1: no cell
        codes[begin : begin + len(column.codes)] = own[column.codes]
        begin, offset = begin + len(column.codes), offset + len(column.values)
    return replace(first, values=found.dictionary, codes=codes)


def _cells_as(first: RawColumn, column: RawColumn) -> pa.Array:
    if first.stored == "text" and column.stored in ("number", "boolean"):
        marks = column.written.marks
        texts = (_cell_text(value, marks) for value in column.values.to_pylist())
        return pa.array(texts, pa.string())
    return column.values.cast(first.values.type)


def cell_text(value: str | float | bool) -> str:
    """Return a cell as text, in the form of a label: a whole float has no decimal point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _cell_text(value: str | float | bool, marks: NumberMarks) -> str:
    if isinstance(value, float) and not value.is_integer():
        return marks.number_text(value)
    return cell_text(value)


def is_row_index(name: str) -> bool:
    """Return True if `name` is that of a row index, or of a marker column that Slipway writes."""
    return re.fullmatch(_INDEX_NAME, name) is not None


def read_raw_table(
    path: Path, only: Collection[str] | None = None, written: TextFormat = USUAL_FORMAT
) -> RawTable:
    """Read a CSV or Parquet file, a folder of shards of one of them, or a file of JSON lines.

    Reads all columns, or `only` these. Shards whose names give splits also get the column
    GIVEN_SPLIT. Raises DataError if a file cannot be read.
    """
    if is_jsonl(path):
        return _raw_table(*read_json_lines(path, only, written), only, written)
    paths = table_files(path)
    if paths and is_csv(paths[0]):
        return _read_csv_files(paths, only, written)
    splits = shard_splits(paths)
    wanted = None if only is None else [name for name in only if not splits or name != GIVEN_SPLIT]
    tables = []
    for part in paths:
        with parquet_errors(part):
            tables.append(read_parquet(part, wanted, written))
    with parquet_errors(path):
        cells = _join_shards(paths, tables, written.marks)
        return _raw_table(cells, cells.num_rows, [], only, written)


def _read_csv_files(
    paths: Sequence[Path], only: Collection[str] | None, written: TextFormat
) -> RawTable:
    tables, malformed, num_read = [], list[tuple[int, str]](), 0
    for path in paths:
        cells, faults = read_csv(path, written.encoding)
        tables.append(cells)
        malformed += [(num_read + number, found) for number, found in faults]
        num_read += cells.num_rows + len(faults)
    cells = _join_shards(paths, tables, written.marks)
    return _raw_table(cells, num_read, malformed, only, written)


def _join_shards(paths: Sequence[Path], tables: Sequence[pa.Table], marks: NumberMarks) -> pa.Table:
    """Concatenate the tables of shards, with GIVEN_SPLIT if their names give splits.

    Columns of different types get the one that holds all of their cells.
    """
    splits = shard_splits(paths)
    # The types and columns of a table without rows say nothing.
    filled = [pair for pair in zip(paths, tables, strict=True) if pair[1].num_rows]
    paths, tables = zip(*(filled or [(paths[0], tables[0])]), strict=True)
    kinds = {
        name: _type_of_all([table[name] for table in tables]) for name in tables[0].schema.names
    }
    table = pa.concat_tables(
        pa.table({name: cells_as(table[name], kind, marks) for name, kind in kinds.items()})
        for table in tables
    )
    if not splits:
        return table
    given = [
        pa.array([splits.get(part)] * rows.num_rows, pa.string())
        for part, rows in zip(paths, tables, strict=True)
    ]
    others = table.select([name for name in table.column_names if name != GIVEN_SPLIT])
    return others.append_column(GIVEN_SPLIT, pa.chunked_array(given))


def shard_schema(paths: Sequence[Path]) -> pa.Schema:
    """Return the columns of Parquet shards with the types that `_join_shards` gives them.

    Cells are read only of columns of different types, one of which is of whole numbers.
    """
    filled = [path for path in paths if has_rows(path)] or list(paths[:1])
    each = {path: parquet_columns(path) for path in filled}
    fields = []
    for name in each[filled[0]]:
        kinds = {path: columns[name] for path, columns in each.items()}
        kind = common_type(kinds.values())
        if len(set(kinds.values())) > 1 and any(map(pa.types.is_integer, kinds.values())):
            kind = _type_of_all([pq.read_table(path, columns=[name])[name] for path in filled])
        fields.append((name, kind))
    return pa.schema(fields)


def shard_note(paths: Sequence[Path], written: TextFormat) -> str:
    """Say in one line which columns of shards differ in type, and how they are joined.

    CSV files are text: of them, only columns are named that are text in some files and numbers,
    dates or booleans in others.
    """
    each = [columns for path in paths if (columns := _types_in(path, written))]
    if len(each) < 2:
        return ""
    joined = (
        {name: common_type([columns[name] for columns in each]) or pa.string() for name in each[0]}
        if is_csv(paths[0])
        else {field.name: field.type for field in shard_schema(paths)}
    )
    found = []
    for name, kind in joined.items():
        kinds = [columns[name] for columns in each]
        if is_csv(paths[0]):
            kinds = [one for one in kinds if kind == pa.string() and not pa.types.is_null(one)]
        names = dict.fromkeys(map(_shown_type, kinds))
        if len(names) > 1:
            found.append(f"{name} ({' and '.join(names)}, joined as {_shown_type(kind)})")
    return f"columns of different types in different files: {listed(found)}" if found else ""


def _types_in(path: Path, written: TextFormat) -> dict[str, pa.DataType]:
    """Return the types of a shard's columns; empty if it has no rows to tell them."""
    if is_csv(path):
        return csv_types(path, written.encoding, written.marks.decimal)
    return parquet_columns(path) if is_parquet(path) and has_rows(path) else {}


def _shown_type(kind: pa.DataType) -> str:
    plain = plain_type(kind)
    return "text" if pa.types.is_string(plain) else str(plain)


def _type_of_all(columns: Sequence[pa.ChunkedArray]) -> pa.DataType:
    """Return the type that holds every cell: the common type, or text if a cell does not fit."""
    kinds = dict.fromkeys(column.type for column in columns)
    kind = common_type(kinds)
    if kind is None:
        raise pa.ArrowInvalid(f"no type suits {', '.join(map(str, kinds))}")
    if len(kinds) == 1:
        return kind
    try:
        for column in columns:
            cells_as(column, kind)
    except pa.ArrowInvalid:  # such as a whole number that float64 cannot hold
        return pa.string()
    return kind


def cells_as(
    column: pa.ChunkedArray, kind: pa.DataType, marks: NumberMarks = POINT
) -> pa.ChunkedArray:
    """Convert a column to a type of `common_type`; a number as text gets the marks of the numbers.

    Raises ArrowInvalid if a cell does not fit.
    """
    if column.type == kind:
        return column
    plain = column.cast(plain_type(column.type))
    if not pa.types.is_string(kind) or pa.types.is_null(plain.type):
        return plain.cast(kind)
    raw = stored_column("", plain)
    texts = pa.array((_cell_text(value, marks) for value in raw.values.to_pylist()), pa.string())
    return pa.chunked_array([texts.take(pa.array(raw.codes, mask=raw.codes < 0))])


def _raw_table(
    cells: pa.Table,
    num_read: int,
    malformed: list[tuple[int, str]],
    only: Collection[str] | None,
    written: TextFormat,
) -> RawTable:
    columns = {
        name: replace(stored_column(name, cells[name]), written=written)
        for name in cells.column_names
        if only is None or name in only
    }
    is_kept = scratch_array((num_read,), np.bool_)
    is_kept[:] = True
    is_kept[[number for number, _ in malformed]] = False
    return RawTable(columns, true_rows(is_kept), malformed)


def column_names(path: Path, written: TextFormat = USUAL_FORMAT) -> list[str]:
    """Return the names of a table's columns in order. Raises DataError if it cannot be read."""
    if is_jsonl(path):
        return json_columns(path)
    paths = table_files(path)
    if is_csv(paths[0]):
        return csv_names(paths[0], written.encoding)
    path = next(filter(has_rows, paths), paths[0])
    with parquet_errors(path):
        return list(pq.read_schema(path).names)


def stored_column(name: str, column: pa.ChunkedArray) -> RawColumn:
    """Return a typed column as its distinct cells and a code for each row."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return stored_column(name, column.cast(kind.value_type))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _text_column(name, column.cast(pa.string()))
    if pa.types.is_boolean(kind):
        return _encoded(name, "boolean", column, kind)
    if pa.types.is_integer(kind) and _is_beyond_float(column):
        return _encoded(name, "text", column.cast(pa.string()), kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _encoded(name, "number", pc.cast(column, pa.float64(), safe=False), kind)
    if pa.types.is_date(kind):
        return _encoded(name, "text", pc.strftime(column.cast(pa.timestamp("s")), "%Y-%m-%d"), kind)
    if pa.types.is_timestamp(kind):
        # An unsafe cast, because nanoseconds are cut.
        utc = pc.cast(column, pa.timestamp("us", kind.tz and "UTC"), safe=False)
        return _encoded(name, "text", pc.strftime(utc, "%Y-%m-%dT%H:%M:%S"), kind)
    codes = scratch_array((len(column),), np.int64)
    codes[:] = -1
    return RawColumn(name, "other", pa.array([], pa.string()), codes, str(kind))


def _is_beyond_float(column: pa.ChunkedArray) -> bool:
    ends = [end for end in pc.min_max(column).as_py().values() if end is not None]
    return any(abs(end) > EXACT_INTEGERS for end in ends)


def _encoded(name: str, stored: Stored, column: pa.ChunkedArray, kind: pa.DataType) -> RawColumn:
    chunks = column.dictionary_encode().chunks  # all chunks have one dictionary
    codes = scratch_array((len(column),), np.int64)
    begin = 0
    for chunk in chunks:
        indices = chunk.indices.fill_null(-1)
        codes[begin : begin + len(chunk)] = indices.to_numpy(zero_copy_only=False)
        begin += len(chunk)
    values = store_array(chunks[-1].dictionary) if chunks else pa.array([], column.type)
    return RawColumn(name, stored, values, codes, str(kind))


def _text_column(name: str, column: pa.ChunkedArray) -> RawColumn:
    if column.nbytes > max(_BLOCK_BYTES, _LONG_CELL_BYTES * len(column)):
        return _long_text_column(name, column)
    raw = _encoded(name, "text", column, pa.string())
    values = store_array(pc.utf8_trim_whitespace(raw.values))
    return RawColumn(name, "text", values, raw.codes, "string")


def _long_text_column(name: str, column: pa.ChunkedArray) -> RawColumn:
    """Return a column of long texts, stored in scratch files; each row may have its own text."""
    batches = pa.table({name: column}).to_batches(max_chunksize=_BLOCK_ROWS)
    trimmed = (pa.record_batch([pc.utf8_trim_whitespace(each[name])], [name]) for each in batches)
    cells = store_table(trimmed, pa.schema([(name, pa.string())]))[name]
    try:
        values, codes = distinct_texts(cells.chunks)
    except OverflowError as error:
        raise DataError(
            f"the column {name!r} is too large: {error}, expected less. "
            "Take some of the rows, or shorten the longest texts."
        ) from error
    return RawColumn(name, "text", values, codes, "string")
