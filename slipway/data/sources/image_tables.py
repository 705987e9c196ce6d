"""Raw images that Parquet files, a CSV or a metadata.jsonl hold or name, one per row.

A file is read by batches, so memory does not grow with the data. In a file called metadata, as the Hugging Face `imagefolder` has it,
the column `file_name` names the image.
"""

import csv
import difflib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.sources.annotations import annotate
from slipway.data.sources.samples import GIVEN_SPLIT, Fault, RawSample
from slipway.system.errors import DataError

TABLES = (".parquet", ".pq", ".csv")
PARQUET = (".parquet", ".pq")
METADATA = "metadata"  # the stem of the table of a Hugging Face imagefolder
FILE_NAME = "file_name"  # its column of images
NOT_AN_OBJECT = "the line is not a JSON object of UTF-8 text"
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


Rows = Generator[RawSample, None, int]  # returns the number of the row after the last


class TablePart(NamedTuple):
    """One table of a data set; row numbers continue from the parts before it."""

    path: Path
    prefix: str = ""  # before its images' names in the data set: "" or "train/"
    split: str | None = None  # given to every row
    folders: Mapping[
        str, str
    ] = {}  # given by the first folder of an image's name, where `split` is None

    def split_of(self, name: str | None) -> str | None:
        """Return the given split of the row that names this image."""
        if self.split is not None or name is None:
            return self.split
        path = PurePosixPath(os.path.normpath(name.replace("\\", "/")))
        return self.folders.get(path.parts[0]) if path.parts else None  # "." has none


def is_table_file(name: str) -> bool:
    """True for the name of a table: by its extension, or `metadata.jsonl`."""
    return Path(name).suffix.lower() in TABLES or is_jsonl(Path(name))


def is_jsonl(path: Path) -> bool:
    """True for `metadata.jsonl`, the only JSON lines file that is a table."""
    return path.name.lower() == f"{METADATA}.jsonl"


def is_metadata(path: Path) -> bool:
    """True for the table of a Hugging Face imagefolder."""
    return path.stem.lower() == METADATA


def read_rows(
    parts: Sequence[TablePart], data: DataParams, wanted: frozenset[int] | None
) -> Iterator[RawSample]:
    """Yield the rows of the tables, or the `wanted` row numbers; image files are not read yet."""
    begin = 0
    for part in parts:
        begin = yield from _reader(part.path)(part, data, wanted, begin)


def count_rows(parts: Sequence[TablePart]) -> int | None:
    """Count the rows; None if counting means reading (CSV)."""
    if not all(part.path.suffix.lower() in PARQUET for part in parts):
        return None
    return sum(int(_open_parquet(part.path).metadata.num_rows) for part in parts)


def _reader(path: Path) -> Callable[[TablePart, DataParams, frozenset[int] | None, int], Rows]:
    if path.suffix.lower() == ".csv":
        return _read_csv
    return _read_jsonl if is_jsonl(path) else _read_parquet


def _read_parquet(
    part: TablePart, data: DataParams, wanted: frozenset[int] | None, begin: int
) -> Rows:
    path = part.path
    file = _open_parquet(path)
    columns = _Columns(path, data, file.schema_arrow.names)
    _check_image_type(path, columns.image, file.schema_arrow.field(columns.image).type)
    row = begin
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns.names, use_threads=False):
            chosen = [
                index for index in range(batch.num_rows) if wanted is None or row + index in wanted
            ]
            for index, cells in zip(
                chosen, batch.take(pa.array(chosen, pa.int64())).to_pylist(), strict=True
            ):
                yield _table_sample(part, row + index, cells[columns.image], cells, data)
            row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.path {str(path)!r} is damaged after row {row - begin}: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error
    return row


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER_BYTES
        )  # by pages, not by whole row groups
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data.path {str(path)!r} is not a readable Parquet file: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _check_image_type(path: Path, column: str, found: pa.DataType) -> None:
    is_bytes_and_path = pa.types.is_struct(found) and found.get_field_index("bytes") >= 0
    if is_bytes_and_path or any(
        test(found) for test in (pa.types.is_binary, pa.types.is_large_binary, *_STRING_TYPES)
    ):
        return
    raise DataError(
        f"data.image_column {column!r} of {str(path)!r} has the type {found}, expected encoded image bytes "
        "(binary, or a struct with 'bytes' and 'path') or paths (string)."
    )


_STRING_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_dictionary,
)


def _read_csv(part: TablePart, data: DataParams, wanted: frozenset[int] | None, begin: int) -> Rows:
    path, row = part.path, begin
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next((line for line in reader if line), None)
            if header is None:
                raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")
            columns = _Columns(path, data, header)
            positions = {name: header.index(name) for name in columns.names}
            for row, line in enumerate((line for line in reader if line), begin + 1):
                if wanted is not None and row - 1 not in wanted:
                    continue
                if len(line) != len(header):
                    yield _malformed(row - 1, f"{len(line)} columns, the header has {len(header)}")
                    continue
                cells = {name: line[position] for name, position in positions.items()}
                yield _table_sample(part, row - 1, cells[columns.image], cells, data)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"data.path {str(path)!r} is not a readable CSV near line {reader.line_num + 1}: {error}. "
                "Expected UTF-8 text, commas between the columns and quotes that close."
            ) from error
    return row


def _read_jsonl(
    part: TablePart, data: DataParams, wanted: frozenset[int] | None, begin: int
) -> Rows:
    names: dict[str, None] = {}
    for record in json_records(part.path):
        names |= dict.fromkeys(record or ())
    columns, row = _Columns(part.path, data, list(names)), begin
    for row, record in enumerate(json_records(part.path), begin + 1):
        if wanted is not None and row - 1 not in wanted:
            continue
        if record is None:
            yield _malformed(row - 1, NOT_AN_OBJECT)
            continue
        cells = {name: record.get(name) for name in columns.names}
        yield _table_sample(part, row - 1, cells[columns.image], cells, data)
    return row


def json_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line of a file of JSON lines that is not empty.

    None for one that is not a JSON object, that is nested too deeply, or whose text is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\u" in line:  # an escape may stand for half a character, which is no UTF-8
                    json.dumps(record, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def _malformed(row: int, detail: str) -> RawSample:
    return RawSample(str(row), b"", None, None, None, Fault("malformed_row", detail))


class _Columns:
    """The needed columns and the image column; DataError naming those that are missing."""

    def __init__(self, path: Path, data: DataParams, present: Sequence[str]) -> None:
        self.image = (
            FILE_NAME
            if is_metadata(path) and data.image_column not in present and FILE_NAME in present
            else data.image_column
        )
        self.names = _needed_columns(path, data, self.image, list(present))


def _needed_columns(path: Path, data: DataParams, image: str, present: list[str]) -> list[str]:
    needed = {"image_column": image, "target_column": data.target_column}
    optional = {
        key: getattr(data, key)
        for key in ("group_column", "time_column", "weight_column", "split_column")
    }
    needed |= {
        key: name
        for key, name in optional.items()
        if name is not None and (name != GIVEN_SPLIT or name in present)
    }
    problems = [
        f"  data.{key} is {name!r}, {_hint(name, present)}"
        for key, name in needed.items()
        if name not in present
    ]
    twice = [name for name in needed.values() if present.count(name) > 1]
    problems += [
        f"  the column {name!r} is there {present.count(name)} times" for name in sorted(set(twice))
    ]
    if problems:
        columns = ", ".join(present) if present else "none"
        raise DataError(f"{str(path)!r} has the columns {columns}.\n" + "\n".join(problems))
    return list(dict.fromkeys(needed.values()))


def _hint(name: str, present: list[str]) -> str:
    if len(present) == 1 and any(mark in present[0] for mark in ";\t"):
        return "which is not there: the columns are not separated by commas"
    close = difflib.get_close_matches(name, present, n=1, cutoff=0.5)
    return f"which is not there; did you mean {close[0]!r}?" if close else "which is not there"


def _table_sample(
    part: TablePart, row: int, cell: Any, cells: dict[str, Any], data: DataParams
) -> RawSample:
    image = _image_cell(part.path.parent, cell)
    if data.split_column == GIVEN_SPLIT and GIVEN_SPLIT not in cells:
        cells = cells | {GIVEN_SPLIT: part.split_of(image.name)}
    said = annotate(cells, data)
    source = f"{row}:{part.prefix}{image.name}" if image.name else str(row)
    fault = image.fault or said.fault
    path = image.path if fault is None else None
    rest = (said.time, said.weight, said.given_split, said.corrections, path)
    return RawSample(source, image.payload, said.label, said.target, said.group, fault, *rest)


class _ImageCell(NamedTuple):
    name: str | None  # the path as the cell has it
    payload: bytes = b""
    fault: Fault | None = None
    path: str | None = None  # of the file to read


def _image_cell(folder: Path, cell: Any) -> _ImageCell:
    name = cell.get("path") if isinstance(cell, dict) else cell
    name = name if isinstance(name, str) else None
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(content, bytes):
        return _ImageCell(name, content)
    if not name:
        return _ImageCell(None, fault=Fault("missing_image", "the image column is empty"))
    path = PurePosixPath(os.path.normpath(name.replace("\\", "/")))
    # By the text of the path alone: a link inside the folder is the owner's own decision (DVC's cache makes such links).
    if path.is_absolute() or path.parts[:1] == ("..",):
        fault = Fault(
            "outside_folder",
            f"{name} leads out of {folder}, expected a path relative to the table's folder",
        )
        return _ImageCell(name, fault=fault)
    return _ImageCell(name, path=str(folder / path))
