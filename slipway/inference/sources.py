"""Reads the inputs of file prediction: images, texts, or the rows of a table file or workbook.

A source is read from start to end in pieces, so that memory does not grow with the number of rows.
Every row is in exactly one piece; a row that cannot be read is there with its fault.
"""

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.config.sections import WORKBOOK
from slipway.data.sources.archives import ArchiveLimits, shown_as, unpack
from slipway.data.sources.formats import excel
from slipway.data.sources.formats.csv_files import CsvForm, csv_header, open_rows
from slipway.data.sources.formats.json_lines import (
    NOT_AN_OBJECT,
    cells_of,
    is_jsonl,
    json_record,
    json_texts,
    read_json_lines,
)
from slipway.data.sources.image_tables import TABLE_ENDINGS, TABLES
from slipway.data.sources.raw_tables import cells_as, shard_schema
from slipway.data.sources.samples import visible_entries
from slipway.data.sources.shards import (
    check_shards,
    is_csv,
    is_parquet,
    parquet_errors,
    table_files,
)
from slipway.data.sources.text_folders import read_text_file
from slipway.data.sources.text_format import NumberMarks, TextFormat, as_utf8, is_utf8, remedy
from slipway.inference.images import ImageReader
from slipway.inference.rows import ReadRows, as_in_training, read_table, require_columns
from slipway.inference.texts import read_text_table
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract, encode_texts, read_text, text_faults
from slipway.system import files
from slipway.system.errors import CellError, DataError, ImageError

RowContract = TypeVar("RowContract", ColumnContract, TextContract)
JSON_ROW = "row"  # the column with the text of a JSON line
# Bytes of CSV or JSON lines read at once, which limit the length of a CSV row. pyarrow reads 32
# blocks ahead.
_BLOCK_BYTES = 1 << 22
_BOM_BYTES = 3
_ROW_FILES = (*TABLES, WORKBOOK)
_MOST_MEMBERS, _MOST_RATIO = 1_000_000, 200  # of a workbook, as clean.max_archive_* by default
_FILES = pa.schema([("file", pa.string())])
Batch = tuple[Sequence[int], NDArray[Any]]  # positions in the piece, and their inputs


class RowFault(NamedTuple):
    """The reason why a row has no answer."""

    code: str  # the rule that it breaks
    message: str


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a source: their cells, network inputs and faults.

    `faults` is complete only after all `batches` were consumed.
    """

    carried: pa.Table  # cells to copy beside the answers, one row for each row of the source
    batches: Iterator[Batch]
    faults: dict[int, RowFault] = field(default_factory=dict)  # by position in the piece


class FileSource(Protocol):
    """A file or folder whose rows are read by an input contract. Each kind of input has a class."""

    num_rows: int | None  # None if the whole source must be read to count them
    identity: str  # changes with the content
    piece_rows: int  # rows of a piece, unless the caller chooses
    schema: pa.Schema  # of `carried`

    def pieces(self, skip: int, size: int, batch_size: int) -> Iterator[Piece]:
        """Skip `skip` rows, then yield pieces of `size` rows; the last may be shorter."""

    def close(self) -> None:
        """End the threads."""


class ImageFiles:
    """A single image, or every file of a folder and its subfolders, in order of names.

    Hidden files are left out. Any other file that is not an image is a bad row.
    """

    piece_rows = 1024
    schema = _FILES

    def __init__(self, contract: ImageContract, path: Path, written: TextFormat) -> None:
        if path.suffix.lower() in TABLES:
            raise DataError(
                f"{str(path)!r} is a table, and this model takes images: name a folder of images."
            )
        if not path.exists():
            raise DataError(f"{str(path)!r} does not exist, expected an image or a folder of them.")
        self._path = path
        self._reader = ImageReader(contract)
        digest, self.num_rows = hashlib.sha256(), 0
        for name in file_names(path):
            digest.update(os.fsencode(name) + b"\0")
            self.num_rows += 1
        if not self.num_rows:
            raise DataError(f"{str(path)!r} holds no files, expected images.")
        self.identity = digest.hexdigest()

    def pieces(self, skip: int, size: int, batch_size: int) -> Iterator[Piece]:
        names = islice(file_names(self._path), skip, None)
        while part := list(islice(names, size)):
            faults: dict[int, RowFault] = {}
            batches = self._batches(part, batch_size, faults)
            yield Piece(_named(part), batches, faults)

    def close(self) -> None:
        self._reader.close()

    def _batches(
        self, names: Sequence[str], batch_size: int, faults: dict[int, RowFault]
    ) -> Iterator[Batch]:
        root = self._path.parent if self._path.is_file() else self._path
        positions: list[int] = []
        inputs: list[NDArray[np.uint8]] = []
        waiting = self._reader.in_order(
            lambda name: self._reader.decode(root / name), names, 2 * batch_size
        )
        for position, future in enumerate(waiting):
            if fault := _fault_of(future):
                faults[position] = fault
            else:
                positions.append(position)
                inputs.append(future.result())
            if inputs and (len(inputs) == batch_size or position == len(names) - 1):
                yield positions, np.stack(inputs)
                positions, inputs = [], []


def file_names(path: Path) -> Iterator[str]:
    """Yield the files of a folder relative to it, in an order that depends only on names.

    A file yields its own name; hidden files are left out.
    """
    if path.is_file():
        yield path.name
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(folder, path)
        for name in sorted(name for name in names if not name.startswith(".")):
            yield name if inside == "." else f"{inside}/{name}"


def _named(names: Sequence[str]) -> pa.Table:
    shown = pa.array([os.fsencode(name).decode(errors="replace") for name in names])
    return pa.Table.from_arrays([shown], schema=_FILES)


def _fault_of(future: Future[Any]) -> RowFault | None:
    error = future.exception()
    if isinstance(error, ImageError):
        return RowFault(error.rule, error.detail)
    if isinstance(error, DataError):  # it vanished, or may not be read
        return RowFault("unreadable", str(error))
    if error:
        raise error
    return None


class RowFile(ABC, Generic[RowContract]):
    """The rows of a CSV or Parquet file, a folder of shards of one of them, or JSON lines."""

    piece_rows = 8192

    def __init__(self, contract: RowContract, path: Path, written: TextFormat) -> None:
        names = self.names_of(contract)
        paths = table_files(path)
        if not paths or (not path.is_dir() and path.suffix.lower() not in _ROW_FILES):
            raise DataError(
                f"{str(path)!r} is not a table, expected {TABLE_ENDINGS}, an .xlsx, or a folder of "
                ".parquet or .csv files."
            )
        if not paths[0].is_file():
            raise DataError(f"{str(path)!r} does not exist, expected {TABLE_ENDINGS}.")
        if len(paths) > 1:
            check_shards(paths, written.encoding)
        self._contract: RowContract = contract
        self._written: TextFormat = written
        self.num_rows: int | None = None
        self._tables: Callable[[int], Iterator[_Rows]]
        if is_jsonl(path):
            self.schema = pa.schema([(JSON_ROW, pa.string())])
            self._tables = partial(_json_rows, path, names, written.marks)
        elif path.suffix.lower() == WORKBOOK:
            table = _read_workbook(path, written)
            self.schema, self.num_rows = table.schema, table.num_rows
            self._tables = partial(_table_rows, table)
        elif is_csv(paths[0]):
            csv_files = [_CsvFile(part, written.encoding) for part in paths]
            self.schema = csv_files[0].schema
            self._tables = partial(_csv_rows, csv_files)
        else:
            with parquet_errors(path):
                one = pq.read_schema(paths[0]).remove_metadata()
                self.schema = one if len(paths) == 1 else shard_schema(paths)
                self.num_rows = sum(pq.read_metadata(part).num_rows for part in paths)
            self._tables = partial(_parquet_rows, paths, self.schema, written.marks)
        if not is_jsonl(path):
            require_columns(self.schema.names, names)
        self.identity = files.digest_json([files.sha256_file(part) for part in paths])

    @staticmethod
    @abstractmethod
    def names_of(contract: RowContract) -> list[str]:
        """Return the names of the columns that the contract needs."""

    @abstractmethod
    def read(self, cells: pa.Table) -> ReadRows:
        """Convert a table with the needed columns to network inputs, and the faults of bad rows."""

    def pieces(self, skip: int, size: int, batch_size: int) -> Iterator[Piece]:
        """Yield pieces of `size` rows after the first `skip` rows, a multiple of `size`.

        The skipped rows are read too, because a file cannot be entered in the middle.
        """
        for number, rows in enumerate(self._tables(size)):
            if (number + 1) * size > skip:
                yield self._piece(rows, batch_size)

    def close(self) -> None:
        """Do nothing: this source has no threads."""

    def _piece(self, rows: "_Rows", batch_size: int) -> Piece:
        read = self.read(rows.cells)
        faults = {position: _cell_fault(fault) for position, fault in read.faults.items()}
        faults |= {
            position: RowFault("malformed_row", found) for position, found in rows.malformed.items()
        }
        good = ~np.isin(read.positions, list(rows.malformed))
        positions, inputs = read.positions[good], read.inputs[good]
        if self._contract.varies_in_length:  # a batch is as long as its longest row
            order = np.argsort(np.count_nonzero(inputs, axis=1), kind="stable")
            positions, inputs = positions[order], inputs[order]
        slices = (slice(start, start + batch_size) for start in range(0, len(inputs), batch_size))
        batches = ((positions[part].tolist(), inputs[part]) for part in slices)
        return Piece(rows.carried, batches, faults)


class TableFile(RowFile[ColumnContract]):
    """The rows of a table file, for a table model; its numbers are written as in training."""

    def __init__(self, contract: ColumnContract, path: Path, written: TextFormat) -> None:
        super().__init__(contract, path, as_in_training(contract, written))

    @staticmethod
    def names_of(contract: ColumnContract) -> list[str]:
        return [column.name for column in contract.columns]

    def read(self, cells: pa.Table) -> ReadRows:
        return read_table(cells, self._contract, self._written)


class TextFile(RowFile[TextContract]):
    """The text columns of a table file, for a text model."""

    @staticmethod
    def names_of(contract: TextContract) -> list[str]:
        return contract.columns

    def read(self, cells: pa.Table) -> ReadRows:
        return read_text_table(cells, self._contract)


class TextFiles:
    """Every file of a folder and of the folders in it, by name, as one text each; or one file.

    Hidden files are left out.
    """

    piece_rows = 1024
    schema = _FILES

    def __init__(self, contract: TextContract, path: Path, written: TextFormat) -> None:
        if len(contract.columns) != 1:
            raise DataError(
                f"{str(path)!r} holds no table, and this model takes "
                f"{' and '.join(contract.columns)} of each row: name a table, {TABLE_ENDINGS}."
            )
        self._contract, self._encoding = contract, written.encoding
        self._path = path
        self._root = path.parent if path.is_file() else path
        digest, num_rows = hashlib.sha256(), 0
        for name in file_names(path):
            found = os.lstat(self._root / name)
            digest.update(os.fsencode(name) + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
            num_rows += 1
        self.num_rows: int | None = num_rows
        if not num_rows:
            raise DataError(f"{str(path)!r} holds no files, expected texts or {TABLE_ENDINGS}.")
        self.identity = digest.hexdigest()

    def pieces(self, skip: int, size: int, batch_size: int) -> Iterator[Piece]:
        names = islice(file_names(self._path), skip, None)
        while part := list(islice(names, size)):
            faults: dict[int, RowFault] = {}
            yield Piece(_named(part), self._batches(part, batch_size, faults), faults)

    def close(self) -> None:
        """Do nothing: this source has no threads."""

    def _batches(
        self, names: Sequence[str], batch_size: int, faults: dict[int, RowFault]
    ) -> Iterator[Batch]:
        (column,) = self._contract.columns
        for begin in range(0, len(names), batch_size):
            positions, texts = [], []
            for position, name in enumerate(names[begin : begin + batch_size], begin):
                text, problem = read_text_file(str(self._root / name), self._encoding)
                if problem:
                    faults[position] = RowFault("unreadable", problem)
                    continue
                row = {column: text}
                fault = next(text_faults(row, self._contract), None)
                if fault:
                    faults[position] = _cell_fault(fault)
                else:
                    positions.append(position)
                    texts.append(read_text(row, self._contract))
            if texts:
                yield positions, encode_texts(texts, self._contract)


def text_source(contract: TextContract, path: Path, written: TextFormat) -> FileSource:
    """Return the source of a table's texts, or of a folder's files. Raises DataError for none."""
    if path.suffix.lower() in _ROW_FILES or _is_folder_of_shards(path) or not path.exists():
        return TextFile(contract, path, written)
    return TextFiles(contract, path, written)


def _is_folder_of_shards(path: Path) -> bool:
    """Return True unless it is a folder of texts, beside which a CSV may lie."""
    shards = table_files(path) if path.is_dir() else []
    return any(map(is_parquet, shards)) or (
        bool(shards) and len(shards) == len(visible_entries(path))
    )


def _cell_fault(error: CellError) -> RowFault:
    return RowFault(error.rule, str(error))


class _Rows(NamedTuple):
    carried: pa.Table
    cells: pa.Table  # of the model's columns
    malformed: Mapping[int, str]  # what was found in place of a row, by position


def _read_workbook(path: Path, written: TextFormat) -> pa.Table:
    """Read the sheet of the training data, or the first, with the same rules as for training."""
    limits = ArchiveLimits(_MOST_MEMBERS, _MOST_RATIO)
    sheet = written.sheet if written.sheet in excel.sheet_names(path) else None
    with tempfile.TemporaryDirectory() as folder, shown_as({Path(folder): path.parent}):
        content = unpack(path, Path(folder), limits, sheet=sheet)
        table, _, _ = read_json_lines(content / excel.SHEET, None, written)
    empty = [column.name for column in table.schema if pa.types.is_null(column.type)]
    kinds = [
        (name, pa.string() if name in empty else table[name].type) for name in table.schema.names
    ]
    return table.cast(pa.schema(kinds))


def _table_rows(table: pa.Table, size: int) -> Iterator[_Rows]:
    for part in _in_pieces(iter([table]), table.schema, size):
        yield _Rows(part, part, {})


def _parquet_rows(
    paths: Sequence[Path], schema: pa.Schema, marks: NumberMarks, size: int
) -> Iterator[_Rows]:
    for table in _in_pieces(_parquet_batches(paths, schema, marks), schema, size):
        yield _Rows(table, table, {})


def _parquet_batches(
    paths: Sequence[Path], schema: pa.Schema, marks: NumberMarks
) -> Iterator[pa.Table]:
    for path in paths:
        with parquet_errors(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1 << 13, use_threads=False):
                table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                if table.schema == schema:
                    yield table
                    continue
                yield pa.table(
                    [cells_as(table[field.name], field.type, marks) for field in schema], schema
                )


def _in_pieces(tables: Iterator[pa.Table], schema: pa.Schema, size: int) -> Iterator[pa.Table]:
    """Regroup a stream of tables into tables of `size` rows each; the last may be shorter."""
    held, num_rows = [schema.empty_table()], 0
    for table in tables:
        while num_rows + table.num_rows >= size:
            held.append(table.slice(0, size - num_rows))
            yield pa.concat_tables(held).combine_chunks()
            table = table.slice(size - num_rows)
            held, num_rows = [schema.empty_table()], 0
        held.append(table)
        num_rows += table.num_rows
    if num_rows:
        yield pa.concat_tables(held).combine_chunks()


class _CsvFile:
    """Reads a CSV in blocks, with the same rules as for training. Every cell is text."""

    def __init__(self, path: Path, encoding: str) -> None:
        self._path, self._encoding = path, encoding
        with _open(path) as file:
            num_quotes = sum(
                block.count(b'"') for block in iter(partial(file.read, _BLOCK_BYTES), b"")
            )
            file.seek(0)
            start = file.read(1 << 22)
        if b"\n" in start:  # the last line may be incomplete
            start = start[: start.rfind(b"\n") + 1]
        if not start or start.isspace():
            raise DataError(f"{str(path)!r} is empty, expected a header and rows.")
        if num_quotes % 2:  # it would silently swallow every row that follows
            raise DataError(
                f"{str(path)!r} has an unclosed quotation mark. "
                "Double a quotation mark that stands inside a quoted cell."
            )
        payload = as_utf8(path, start, encoding)
        header, names = csv_header(path, payload, encoding)
        before = payload[: header.num_bytes].decode()
        self._begin = len(before.encode(encoding)) if before else 0
        if before and is_utf8(encoding) and start.startswith(b"\xef\xbb\xbf"):
            self._begin = len(before.encode()) + _BOM_BYTES
        self._form = CsvForm(names, header.delimiter, num_quotes > 0)
        self.schema = pa.schema([(name.strip(), pa.string()) for name in names])

    def tables(self, malformed: dict[int, str], number: int) -> Iterator[pa.Table]:
        """Yield all rows, numbered from `number`; one with too many or too few cells is null.

        `malformed` receives the fault of such a row before the row is yielded.
        """
        first = number
        waiting = deque[int]()

        def report(place: int, fault: str) -> None:
            malformed[first + place] = fault
            waiting.append(first + place)

        with _open(self._path) as file:
            file.seek(self._begin)
            for batch in self._batches(file, report):
                table = pa.Table.from_arrays(batch.columns, schema=self.schema)
                rows: list[int | None] = []
                for position in range(batch.num_rows if waiting else 0):
                    while waiting and waiting[0] == number + len(rows):
                        waiting.popleft()
                        rows.append(None)
                    rows.append(position)
                yield table.take(pa.array(rows, pa.int64())) if rows else table
                number += len(rows) or batch.num_rows
        if waiting:
            empty = pa.nulls(len(waiting), pa.string())
            yield pa.Table.from_arrays([empty] * len(self.schema), schema=self.schema)

    def _batches(
        self, file: IO[bytes], report: Callable[[int, str], None]
    ) -> Iterator[pa.RecordBatch]:
        try:
            yield from open_rows(file, self._form, _BLOCK_BYTES, report, self._encoding)
        except pa.ArrowInvalid as error:
            reason = str(error)
            if "UTF8" in reason:
                reason = f"it is not {self._encoding.upper()}. {remedy(self._path)}"
            raise DataError(f"{str(self._path)!r} is not a readable CSV: {reason}") from error


def _csv_rows(parts: Sequence[_CsvFile], size: int) -> Iterator[_Rows]:
    """Yield the rows of CSV files of the same columns, one file after the other."""
    schema, begin = parts[0].schema, 0
    malformed: dict[int, str] = {}  # by number of the row

    def tables() -> Iterator[pa.Table]:
        number = 0
        for part in parts:
            for table in part.tables(malformed, number):
                number += table.num_rows
                yield table.select(schema.names)

    for table in _in_pieces(tables(), schema, size):
        here = {
            number - begin: malformed.pop(number)
            for number in range(begin, begin + table.num_rows)
            if number in malformed
        }
        yield _Rows(table, table, here)
        begin += table.num_rows


def _json_rows(path: Path, names: Sequence[str], marks: NumberMarks, size: int) -> Iterator[_Rows]:
    lines = (line.strip() for line in json_texts(path))
    is_first = True
    while part := list(islice(lines, size)):
        records = [json_record(line) for line in part]
        rows = [record or {} for record in records]
        if is_first:
            require_columns(list({name: None for row in rows for name in row}), names)
        is_first = False
        texts = [
            json.dumps(line) if record is None else line
            for line, record in zip(part, records, strict=True)
        ]
        yield _Rows(
            pa.table({JSON_ROW: pa.array(texts, pa.string())}),
            pa.table({name: cells_of([row.get(name) for row in rows], marks) for name in names}),
            {position: NOT_AN_OBJECT for position, record in enumerate(records) if record is None},
        )


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
