"""Reads a CSV or Parquet file, or a folder of shards, as columns of distinct cells and codes.

A column stores its distinct cells once and a code per row, so cells are parsed once per distinct
cell, whatever the number of rows. A row with too many or too few cells is reported and left out; a
file that is unreadable as a whole raises DataError.
"""

import bisect
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.data.engine.scratch import (
    distinct_texts,
    scratch_array,
    store_array,
    store_bytes,
    store_table,
    true_rows,
)
from slipway.data.sources.csv_start import START_CHARACTERS, CsvStart, find_csv_start
from slipway.data.sources.image_tables import NOT_AN_OBJECT, is_jsonl, json_blocks, json_columns
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.shards import parquet_errors, shard_splits, table_files
from slipway.data.sources.text_format import (
    NOT_UTF8,
    USUAL_FORMAT,
    TextFormat,
    as_utf8,
    remedy,
    utf8_blocks,
)
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
_BUFFER_BYTES = 1 << 20  # read at once from a Parquet file, in place of whole row groups
_LONG_CELL_BYTES = 24  # a column with a larger average size holds texts, not names or numbers
_MAX_BLOCK_BYTES = (1 << 31) - 1


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
        column: next((own[column] for own in all_types.values() if _has_cells(own, column)), kind)
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
            "data.sources joins tables of different columns:\n" + "\n".join(problems[:_MAX_SHOWN])
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


def _has_cells(types: Mapping[str, str], column: str) -> bool:
    return types.get(column, _EMPTY) != _EMPTY


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
        return pa.array(map(cell_text, column.values.to_pylist()), pa.string())
    return column.values.cast(first.values.type)


def cell_text(value: str | float | bool) -> str:
    """Return a cell as text, in the form of a label: a whole float has no decimal point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_row_index(name: str) -> bool:
    """Return True if `name` is that of a row index, or of a marker column that Slipway writes."""
    return re.fullmatch(_INDEX_NAME, name) is not None


def read_raw_table(
    path: Path, only: Collection[str] | None = None, written: TextFormat = USUAL_FORMAT
) -> RawTable:
    """Read a CSV or Parquet file, a folder of shards, or a file of JSON lines.

    Reads all columns, or `only` these. Shards whose names give splits also get the column
    GIVEN_SPLIT. Raises DataError if a file cannot be read.
    """
    if is_jsonl(path):
        table = _read_jsonl(path, only, written)
    elif path.suffix.lower() == ".csv":
        table = _read_csv(path, only, written.encoding)
    else:
        table = _read_parquet(path, only, written)
    columns = {name: replace(column, written=written) for name, column in table.columns.items()}
    return replace(table, columns=columns)


def column_names(path: Path, written: TextFormat = USUAL_FORMAT) -> list[str]:
    """Return the names of a table's columns in order. Raises DataError if it cannot be read."""
    if path.suffix.lower() == ".csv":
        start = next(_file_blocks(path))
        if len(start) >= _BLOCK_BYTES:  # the last line may be incomplete
            start = start[: start.rfind(b"\n") + 1] or start
        payload = as_utf8(path, start, written.encoding)
        return [name.strip() for name in csv_header(path, payload, written.encoding)[1]]
    if is_jsonl(path):
        return json_columns(path)
    path = table_files(path)[0]
    with parquet_errors(path):
        return list(pq.read_schema(path).names)


def _read_csv(path: Path, only: Collection[str] | None, encoding: str) -> RawTable:
    num_quotes, last = 0, b""

    def blocks() -> Iterator[bytes]:
        nonlocal num_quotes, last
        for block in utf8_blocks(path, _file_blocks(path), encoding):
            num_quotes += block.count(b'"')
            last = block[-1:] or last
            yield block
        if last != b"\n":
            yield b"\n"

    content = store_bytes(blocks())
    start = content[:_BLOCK_BYTES].to_pybytes()
    if content.size > len(start):  # the last line may be incomplete
        start = start[: start.rfind(b"\n") + 1] or content.to_pybytes()
    (_, begin, delimiter), names = csv_header(path, start, encoding)
    num_quotes -= start[:begin].count(b'"')
    if num_quotes % 2:  # an open quotation would silently swallow every row that follows
        raise DataError(
            f"data.path {str(path)!r} has a quotation mark that is not closed. "
            "Double each quotation mark inside a quoted cell."
        )
    rows = content[begin:]
    malformed: list[tuple[int, str]] = []
    form = _CsvForm(delimiter, names, has_quotes=num_quotes > 0)
    try:
        try:
            table = _parse(rows, form, malformed, _BLOCK_BYTES)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            malformed.clear()  # a row is longer than a block
            table = _parse(rows, form, malformed, _MAX_BLOCK_BYTES)
    except pa.ArrowInvalid as error:
        raise _unreadable_csv(path, error) from error
    columns = {
        name.strip(): _text_column(name.strip(), table.column(index))
        for index, name in enumerate(names)
        if only is None or name.strip() in only
    }
    return RawTable(columns, _numbers(table.num_rows + len(malformed), malformed), malformed)


def _numbers(num_read: int, malformed: Sequence[tuple[int, str]]) -> NDArray[np.int64]:
    """Return the ascending numbers of the rows that are not malformed."""
    is_kept = scratch_array((num_read,), np.bool_)
    is_kept[:] = True
    is_kept[[number for number, _ in malformed]] = False
    return true_rows(is_kept)


class _CsvForm(NamedTuple):
    delimiter: str
    names: list[str]
    has_quotes: bool


def _parse(
    content: pa.Buffer, form: _CsvForm, malformed: list[tuple[int, str]], max_block_bytes: int
) -> pa.Table:
    def skip(row: Any) -> str:  # the header is row 1, empty lines are not counted
        found = f"{row.actual_columns} columns, the header has {row.expected_columns}"
        malformed.append((row.number - 2, found))
        return "skip"

    reader = pyarrow.csv.open_csv(
        pa.BufferReader(content),
        # Only with a single thread does the reader know the number of a malformed row.
        pyarrow.csv.ReadOptions(use_threads=False, block_size=min(max_block_bytes, content.size)),
        pyarrow.csv.ParseOptions(
            delimiter=form.delimiter, newlines_in_values=form.has_quotes, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(form.names, pa.string()),
            check_utf8=False,
            strings_can_be_null=False,
        ),
    )
    return reader.read_all() if content.size <= _BLOCK_BYTES else store_table(reader, reader.schema)


def _unreadable_csv(path: Path, error: Exception | str) -> DataError:
    return DataError(
        f"data.path {str(path)!r} is not a readable CSV: {error}. "
        "Expected UTF-8 text, a header, and quotes that close."
    )


def _file_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks. Raises DataError if it is blank or cannot be read."""
    is_blank = True
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                is_blank = is_blank and block.isspace()
                if is_blank and len(block) < _BLOCK_BYTES:
                    break
                yield block
    except OSError as error:
        raise DataError(
            f"data.path {str(path)!r} cannot be read: {error.strerror}. Copy the file again."
        ) from error
    if is_blank:
        raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")


def csv_header(path: Path, payload: bytes, encoding: str) -> tuple[CsvStart, list[str]]:
    """Find a CSV's header in its first bytes; return its position and the names of the columns.

    Raises DataError if there is no header.
    """
    start = find_csv_start(payload[:START_CHARACTERS].decode(errors="replace"))
    lines = io.TextIOWrapper(io.BytesIO(payload), encoding="utf-8", newline="")
    lines.seek(start.num_bytes)
    try:
        names = next(row for row in csv.reader(lines, delimiter=start.delimiter) if row)
    except (csv.Error, StopIteration) as error:
        raise _unreadable_csv(path, error) from error
    if any(NOT_UTF8 in name for name in names):
        raise DataError(
            f"data.path {str(path)!r} has a header that is not {encoding.upper()}: "
            f"{', '.join(names)[:200]}. {remedy(path)}"
        )
    _check_names(path, [name.strip() for name in names])
    return start, names


def _check_names(path: Path, names: list[str]) -> None:
    twice = [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{str(path)!r} has the column {', '.join(twice)}, expected each name once. "
            "Rename or remove the others."
        )


def _read_parquet(path: Path, only: Collection[str] | None, written: TextFormat) -> RawTable:
    """Read a Parquet file, or the shards of a folder one after the other."""
    paths = table_files(path)
    splits = shard_splits(paths)
    wanted = None if only is None else [name for name in only if not splits or name != GIVEN_SPLIT]
    with parquet_errors(path):
        tables = [_read_parquet_file(part, wanted, written) for part in paths]
        table = pa.concat_tables(tables, promote_options="permissive")
        columns = {name: stored_column(name, table[name]) for name in table.column_names}
    if splits and (only is None or GIVEN_SPLIT in only):
        chunks = [
            pa.array([splits.get(part)] * rows.num_rows, pa.string())
            for part, rows in zip(paths, tables, strict=True)
        ]
        columns[GIVEN_SPLIT] = stored_column(GIVEN_SPLIT, pa.chunked_array(chunks))
    return RawTable(columns, _numbers(table.num_rows, []), [])


def _read_parquet_file(path: Path, wanted: list[str] | None, written: TextFormat) -> pa.Table:
    """Read the `wanted` columns, converted by `_plain_cells`, in batches if the file is large."""
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    names = [name for name in file.schema_arrow.names if wanted is None or name in wanted]
    _check_names(path, names)
    metadata = file.metadata
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    num_bytes = sum(group.total_byte_size for group in groups)
    rows_of_a_block = _BLOCK_BYTES * metadata.num_rows // max(1, num_bytes)
    size = min(max(1, rows_of_a_block), _BLOCK_ROWS)
    fields = pa.schema([file.schema_arrow.field(name) for name in names])
    empty = pa.RecordBatch.from_pylist([], fields)
    schema, num_rows = _plain_cells(empty, written).schema, 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal num_rows
        for batch in file.iter_batches(size, columns=wanted, use_threads=False):
            batch.validate(full=True)  # a damaged file may contain invalid text
            num_rows += batch.num_rows
            yield _plain_cells(batch, written)

    is_large = num_bytes > _BLOCK_BYTES
    table = (store_table if is_large else pa.Table.from_batches)(batches(), schema)
    if num_rows != metadata.num_rows:  # pyarrow does not compare the numbers of rows
        declared = metadata.num_rows
        raise pa.ArrowInvalid(f"it has {num_rows} rows, but its metadata declares {declared}")
    return table


def _plain_cells(batch: pa.RecordBatch, written: TextFormat) -> pa.RecordBatch:
    """Convert text of any Arrow type to `pa.string()`, and lists to JSON text.

    Lists are converted only in columns that may hold them, see `TextFormat.takes_lists`.
    """
    names = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    return pa.record_batch(
        [_plain(cells, written.takes_lists(name)) for name, cells in columns], names
    )


def _plain(cells: pa.Array, takes_lists: bool) -> pa.Array:
    if pa.types.is_dictionary(cells.type):
        return _plain(cells.cast(cells.type.value_type), takes_lists)
    if pa.types.is_large_string(cells.type) or pa.types.is_string_view(cells.type):
        return cells.cast(pa.string())
    return list_texts(cells.to_pylist()) if takes_lists and _is_list(cells.type) else cells


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def without_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of lists to JSON text; return any other column unchanged."""
    return pa.chunked_array([list_texts(column.to_pylist())]) if _is_list(column.type) else column


def list_texts(cells: Sequence[Any]) -> pa.Array:
    """Return each list as JSON text, and each other cell as plain text."""
    texts = [
        json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in cells
    ]
    return pa.array([cell if cell is None else str(cell) for cell in texts], pa.string())


def _read_jsonl(path: Path, only: Collection[str] | None, written: TextFormat) -> RawTable:
    """Read a file of JSON lines in two passes: first the types of all columns, then the cells."""
    kinds: dict[str, dict[_JsonKind, None]] = {}  # in order of appearance
    malformed: list[tuple[int, str]] = []
    num_read = num_blocks = 0
    for block in json_blocks(path):
        rows = [record for record in block if record is not None]
        names = dict.fromkeys(name for row in rows for name in row if only is None or name in only)
        for name in names:
            cells = [row.get(name) for row in rows]
            kinds.setdefault(name, {})[_json_kind(cells, written.takes_lists(name))] = None
        faults = (place for place, record in enumerate(block) if record is None)
        malformed += [(num_read + place, NOT_AN_OBJECT) for place in faults]
        num_read, num_blocks = num_read + len(block), num_blocks + 1
    chosen = {name: _common_kind(found) for name, found in kinds.items()}
    while True:
        try:
            batches = _json_batches(path, chosen)
            schema = next(batches).schema if num_blocks else pa.schema([])
            table = (pa.Table.from_batches if num_blocks < 2 else store_table)(batches, schema)
            break
        except _UnlikeCellsError as error:
            chosen[str(error)] = "texts"
    columns = {name: stored_column(name, table[name]) for name in table.column_names}
    return RawTable(columns, _numbers(num_read, malformed), malformed)


class _UnlikeCellsError(Exception):
    """The cells of the column that this error names have different types."""


# "texts": cells of different types; "lists": lists that are read as text
_JsonKind: TypeAlias = pa.DataType | Literal["texts", "lists"]


def _json_kind(cells: list[Any], takes_lists: bool) -> _JsonKind:
    if takes_lists and any(isinstance(cell, list) for cell in cells):
        return "lists"
    try:
        return pa.array(cells).type
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        return "texts"


def _common_kind(kinds: Collection[_JsonKind]) -> _JsonKind:
    if "lists" in kinds or "texts" in kinds:
        return "lists" if "lists" in kinds else "texts"
    schemas = [pa.schema([("cells", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("cells").type
    except pa.ArrowException:
        return "texts"


def _json_batches(path: Path, kinds: Mapping[str, _JsonKind]) -> Iterator[pa.RecordBatch]:
    """Yield a batch without rows, then a batch for each block of rows.

    `kinds` gives the type of each column. Raises _UnlikeCellsError if a cell has another type.
    """
    for block in itertools.chain([[]], json_blocks(path)):
        rows = [record for record in block if record is not None]
        cells = [
            _json_cells(name, [row.get(name) for row in rows], kind) for name, kind in kinds.items()
        ]
        yield pa.record_batch(cells, [*kinds])


def _json_cells(name: str, cells: list[Any], kind: _JsonKind) -> pa.Array:
    if kind == "lists":
        return list_texts(cells)
    if kind == "texts":
        return pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise _UnlikeCellsError(name) from error


def cells_of(cells: list[Any]) -> pa.ChunkedArray:
    """Return cells of one type unchanged, and cells of mixed types as text."""
    try:
        return pa.chunked_array([pa.array(cells)])
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        texts = [None if cell is None else str(cell) for cell in cells]
        return pa.chunked_array([pa.array(texts, pa.string())])


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
