"""A CSV, Parquet file or folder of Parquet shards, column by column: each column as its distinct cells and the code of each row.

Work on a column then happens once for each distinct cell, whatever the number of rows. A row with too many or too few
cells is named and left out; what makes the file as a whole unreadable is a DataError. The file itself is read into memory.
"""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.data.engine.scratch import scratch_array, store_array, store_table
from slipway.data.sources.image_tables import NOT_AN_OBJECT, is_jsonl, json_records
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.shards import shard_splits, table_files
from slipway.system.errors import DataError

Stored = Literal["text", "number", "boolean", "other"]
DELIMITERS = (",", ";", "\t")
NOT_UTF8 = "\ufffd"  # in a cell: bytes that are no UTF-8 were there
EXACT_INTEGERS = 2**53  # up to here a float64 holds every whole number
COLLECTED = "slipway_collected"  # of a row that came from the service's traffic: slipway/data/merge
# As pandas writes its row index into files, and reads it back; and marks of ours that say as little of the row itself.
_INDEX_NAME = rf"\s*|__index_level_\d+__|Unnamed: \d+|{COLLECTED}|{GIVEN_SPLIT}"
_BLOCK_BYTES = 1 << 22
_MAX_BLOCK_BYTES = (1 << 31) - 1
_PARQUET_FAULTS = (
    pa.ArrowException,
    OSError,
    UnicodeDecodeError,
    MemoryError,
    OverflowError,
    ValueError,
)


@dataclass(frozen=True)
class RawColumn:
    """One column as it is stored. Dates are text (ISO 8601); `other` is what Slipway has no kind for (lists, bytes).

    `values` are its U distinct cells: stripped text (also for integers that float64 cannot hold), float64 or bool, without null.
    `codes` (N,) is the index of each row's cell in it, -1 where there is none.
    """

    name: str
    stored: Stored
    values: pa.Array
    codes: NDArray[np.int64]
    arrow_type: str

    @property
    def unreadable(self) -> str:
        """The name and type of a column that is stored as `other`, for a message."""
        return f"the column {self.name!r}, whose type {self.arrow_type} no reader takes"


@dataclass(frozen=True)
class RawTable:
    """The columns by name, the number of each row in the file (from 0), and the malformed rows."""

    columns: dict[str, RawColumn]
    numbers: NDArray[np.int64]  # (N,) increasing
    malformed: list[tuple[int, str]]  # number, and what was found

    @property
    def num_read(self) -> int:
        """Number of rows in the file."""
        return len(self.numbers) + len(self.malformed)


def is_row_index(name: str) -> bool:
    """True if the name is that of a row index or of a mark written by Slipway."""
    return re.fullmatch(_INDEX_NAME, name) is not None


def read_raw_table(path: Path, only: Collection[str] | None = None) -> RawTable:
    """Read a `.csv`, `.parquet` or `.pq` file, a folder of shards, or a `metadata.jsonl`, whole or `only` these of its columns.

    Shards whose names say splits have the column GIVEN_SPLIT besides. DataError if a file cannot be read.
    """
    if path.is_dir():
        return _read_shards(table_files(path), only)
    if is_jsonl(path):
        return _read_jsonl(path, only)
    return _read_csv(path, only) if path.suffix.lower() == ".csv" else _read_parquet(path, only)


def column_names(path: Path) -> list[str]:
    """Return the columns of a table in order; DataError if it cannot be read."""
    if path.suffix.lower() == ".csv":
        return [name.strip() for name in _header(path, _first_bytes(path))[1]]
    if is_jsonl(path):
        return list(dict.fromkeys(name for record in json_records(path) for name in record or ()))
    path = table_files(path)[0]
    try:
        names: list[str] = pq.read_schema(path).names
    except _PARQUET_FAULTS as error:
        raise _unreadable_parquet(path, error) from error
    return names


def _read_csv(path: Path, only: Collection[str] | None) -> RawTable:
    payload = _payload(path)
    delimiter, names = _header(path, payload)
    malformed: list[tuple[int, str]] = []
    try:
        table = _parse(payload, delimiter, names, malformed, min(_BLOCK_BYTES, len(payload)))
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise _unreadable_csv(path, error) from error
        malformed.clear()  # a row is longer than a block
        try:
            table = _parse(
                payload, delimiter, names, malformed, min(len(payload), _MAX_BLOCK_BYTES)
            )
        except pa.ArrowInvalid as again:
            raise _unreadable_csv(path, again) from again
    del payload  # as large as the file
    kept = np.full(table.num_rows + len(malformed), True, np.bool_)
    kept[[number for number, _ in malformed]] = False
    wanted = [index for index, name in enumerate(names) if only is None or name.strip() in only]
    columns = {
        names[index].strip(): _text_column(names[index].strip(), table.column(index))
        for index in wanted
    }
    return RawTable(columns, np.flatnonzero(kept), malformed)


def _parse(
    payload: bytes,
    delimiter: str,
    names: list[str],
    malformed: list[tuple[int, str]],
    block_bytes: int,
) -> pa.Table:
    def skip(row: Any) -> str:  # the header is row 1, empty lines are not counted
        malformed.append(
            (row.number - 2, f"{row.actual_columns} columns, the header has {row.expected_columns}")
        )
        return "skip"

    reader = pyarrow.csv.open_csv(
        io.BytesIO(payload),
        pyarrow.csv.ReadOptions(
            use_threads=False, block_size=block_bytes
        ),  # only one thread tells the number of a malformed row
        pyarrow.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=b'"' in payload, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            check_utf8=False,
            strings_can_be_null=False,
        ),
    )
    return reader.read_all() if len(payload) <= _BLOCK_BYTES else store_table(reader, reader.schema)


def _unreadable_csv(path: Path, error: Exception | str) -> DataError:
    return DataError(
        f"data.path {str(path)!r} is not a readable CSV: {error}. Expected UTF-8 text, a header, and quotes that close."
    )


def _payload(path: Path) -> bytes:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise _cannot_be_read(path, error) from error
    if not payload or payload.isspace():
        raise _is_empty(path)
    if payload.count(b'"') % 2:  # it would swallow every row that follows, in silence
        raise DataError(
            f"data.path {str(path)!r} has a quotation mark that does not close. Write one inside a quoted cell twice."
        )
    return _as_utf8(
        payload.removeprefix(b"\xef\xbb\xbf") + (b"" if payload.endswith(b"\n") else b"\n")
    )


def _first_bytes(path: Path) -> bytes:
    """Return the beginning of a CSV up to a whole line, which includes its header."""
    try:
        with path.open("rb") as file:
            first = file.read(_BLOCK_BYTES)
    except OSError as error:
        raise _cannot_be_read(path, error) from error
    whole = first if len(first) < _BLOCK_BYTES else first[: first.rfind(b"\n") + 1] or first
    if not whole or whole.isspace():
        raise _is_empty(path)
    return _as_utf8(whole.removeprefix(b"\xef\xbb\xbf"))


def _cannot_be_read(path: Path, error: OSError) -> DataError:
    return DataError(
        f"data.path {str(path)!r} cannot be read: {error.strerror}. Copy the file again."
    )


def _is_empty(path: Path) -> DataError:
    return DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")


def _as_utf8(payload: bytes) -> bytes:
    """Return valid UTF-8, with NOT_UTF8 in place of each invalid byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(payload), _BLOCK_BYTES):
            decoder.decode(payload[begin : begin + _BLOCK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return payload.decode(errors="replace").encode()
    return payload


def _header(path: Path, payload: bytes) -> tuple[str, list[str]]:
    """Return the delimiter and the column names; DataError if there is no header."""
    lines = io.TextIOWrapper(io.BytesIO(payload), encoding="utf-8", newline="")
    try:
        first = next(line for line in lines if line.strip("\r\n"))
        delimiter = next((mark for mark in DELIMITERS if mark in first), ",")
        lines.seek(0)
        names = next(row for row in csv.reader(lines, delimiter=delimiter) if row)
    except (csv.Error, StopIteration) as error:
        raise _unreadable_csv(path, error) from error
    if any(NOT_UTF8 in name for name in names):
        raise _unreadable_csv(path, f"its header is no UTF-8: {', '.join(names)[:200]}")
    _check_names(path, [name.strip() for name in names])
    return delimiter, names


def _check_names(path: Path, names: list[str]) -> None:
    twice = [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{str(path)!r} has the column {', '.join(twice)}, expected each name once. Rename or remove the others."
        )


def _read_parquet(path: Path, only: Collection[str] | None) -> RawTable:
    try:
        file = pq.ParquetFile(path, pre_buffer=False)
        table = file.read(columns=None if only is None else list(only), use_threads=False)
        if table.num_rows != file.metadata.num_rows:  # pyarrow does not compare them
            raise pa.ArrowInvalid(
                f"it has {table.num_rows} rows and says that it has {file.metadata.num_rows}"
            )
        table.validate(full=True)  # a damaged file may hold text that is none
        _check_names(path, table.schema.names)
        columns = {
            name: stored_column(name, table.column(index))
            for index, name in enumerate(table.schema.names)
        }
    except _PARQUET_FAULTS as error:
        raise _unreadable_parquet(path, error) from error
    return RawTable(columns, np.arange(table.num_rows), [])


def _read_shards(paths: list[Path], only: Collection[str] | None) -> RawTable:
    """Read shards as one table, one after the other."""
    wanted = list(column_names(paths[0]) if only is None else only)
    given = only is None or GIVEN_SPLIT in wanted
    wanted = [name for name in wanted if name != GIVEN_SPLIT]
    try:
        tables = [
            pq.ParquetFile(path, pre_buffer=False)
            .read(columns=wanted, use_threads=False)
            .select(wanted)
            for path in paths
        ]
        table = pa.concat_tables(
            [table.replace_schema_metadata(None) for table in tables], promote_options="permissive"
        )
        table.validate(full=True)
        _check_names(paths[0].parent, table.schema.names)
        columns = {name: stored_column(name, table.column(name)) for name in table.schema.names}
    except _PARQUET_FAULTS as error:
        raise _unreadable_parquet(paths[0].parent, error) from error
    splits = shard_splits(paths)
    if splits and given:
        said = [
            pa.array([splits.get(path)] * table.num_rows, pa.string())
            for path, table in zip(paths, tables, strict=True)
        ]
        columns[GIVEN_SPLIT] = stored_column(GIVEN_SPLIT, pa.chunked_array(said))
    return RawTable(columns, np.arange(table.num_rows), [])


def _read_jsonl(path: Path, only: Collection[str] | None) -> RawTable:
    records = list(json_records(path))
    rows = [record for record in records if record is not None]
    names = [name for name in column_names(path) if only is None or name in only]
    columns = {
        name: stored_column(name, _cells_of([row.get(name) for row in rows])) for name in names
    }
    numbers = [number for number, record in enumerate(records) if record is not None]
    malformed = [(number, NOT_AN_OBJECT) for number, record in enumerate(records) if record is None]
    return RawTable(columns, np.array(numbers, np.int64), malformed)


def _cells_of(cells: list[Any]) -> pa.ChunkedArray:
    """Return cells of one type as they are, mixed ones as text."""
    try:
        return pa.chunked_array([pa.array(cells)])
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        return pa.chunked_array(
            [pa.array([None if cell is None else str(cell) for cell in cells], pa.string())]
        )


def _unreadable_parquet(path: Path, error: Exception) -> DataError:
    text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return DataError(
        f"data.path {str(path)!r} is not a readable Parquet file: {text}. Write or copy the file again."
    )


def stored_column(name: str, column: pa.ChunkedArray) -> RawColumn:
    """Return a typed column as its distinct cells and the code of each row."""
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
        utc = pc.cast(
            column, pa.timestamp("us", kind.tz and "UTC"), safe=False
        )  # below microseconds it is cut
        return _encoded(name, "text", pc.strftime(utc, "%Y-%m-%dT%H:%M:%S"), kind)
    return RawColumn(name, "other", pa.array([], pa.string()), np.full(len(column), -1), str(kind))


def _is_beyond_float(column: pa.ChunkedArray) -> bool:
    ends = [end for end in pc.min_max(column).as_py().values() if end is not None]
    return any(abs(end) > EXACT_INTEGERS for end in ends)


def _encoded(name: str, stored: Stored, column: pa.ChunkedArray, kind: pa.DataType) -> RawColumn:
    chunks = column.dictionary_encode().chunks  # of one dictionary
    codes, begin = scratch_array((len(column),), np.int64), 0
    for chunk in chunks:
        codes[begin : begin + len(chunk)] = chunk.indices.fill_null(-1).to_numpy(
            zero_copy_only=False
        )
        begin += len(chunk)
    values = store_array(chunks[-1].dictionary) if chunks else pa.array([], column.type)
    return RawColumn(name, stored, values, codes, str(kind))


def _text_column(name: str, column: pa.ChunkedArray) -> RawColumn:
    raw = _encoded(name, "text", column, pa.string())
    return RawColumn(
        name, "text", store_array(pc.utf8_trim_whitespace(raw.values)), raw.codes, "string"
    )
