"""Reads image tables: Parquet files, a CSV or a metadata.jsonl with one image or path per row.

Files are read in batches, so memory does not grow with the data. In a file named metadata, as in
the Hugging Face `imagefolder`, the column `file_name` names the image.
"""

import csv
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.sources.annotations import annotate
from slipway.data.sources.formats.csv_files import csv_header, csv_start, find_csv_start
from slipway.data.sources.formats.csv_widths import wrong_width
from slipway.data.sources.formats.json_lines import (
    JSON_LINES,
    NOT_AN_OBJECT,
    is_jsonl,
    json_columns,
    json_records,
)
from slipway.data.sources.samples import GIVEN_SPLIT, Fault, RawSample, link_fault
from slipway.data.sources.shards import PARQUET, is_parquet, parquet_errors
from slipway.data.sources.text_format import is_utf8, remedy
from slipway.system.errors import DataError, nearest

TABLES = (*PARQUET, ".csv", *JSON_LINES)
TABLE_ENDINGS = "a .csv, .parquet or .jsonl file"
METADATA = "metadata"  # the stem of the table of a Hugging Face imagefolder
FILE_NAME = "file_name"  # column with the names of images
_BATCH_ROWS = 64
_MAX_SHOWN, _SHOWN_CHARACTERS = 3, 60
_BUFFER_BYTES = 1 << 20  # read a Parquet file by pages, not by whole row groups
_IS_TEXT = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_dictionary,
)
_IS_IMAGE = (pa.types.is_binary, pa.types.is_large_binary, *_IS_TEXT)


class TablePart(NamedTuple):
    """One table of a data set; row numbers continue from the parts before it."""

    path: Path
    prefix: str = ""  # prefix of its images' names in the data set: "" or "train/"
    split: str | None = None  # split of every row
    origin: str = ""  # the name of the joined source
    # If `split` is None: the split for the first folder of an image's name.
    folders: Mapping[str, str] = {}

    def split_of(self, name: str | None) -> str | None:
        """Return the given split of a row, by the name of its image; None if there is none."""
        if self.split is not None or name is None:
            return self.split
        parts = _relative_path(name).parts
        return self.folders.get(parts[0]) if parts else None  # "." has no parts


def is_table_file(name: str) -> bool:
    """Return True if a file's name ends like that of a table."""
    return Path(name).suffix.lower() in TABLES


def is_metadata(path: Path) -> bool:
    """Return True for the table of a Hugging Face imagefolder."""
    return path.stem.lower() == METADATA


def read_rows(
    parts: Sequence[TablePart], data: DataParams, wanted: frozenset[int] | None
) -> Iterator[RawSample]:
    """Yield the rows of the tables, or the `wanted` row numbers, without reading image files."""
    row = 0
    for part in parts:
        for cells in _rows(part.path, data, wanted, row):
            if cells is not None and (wanted is None or row in wanted):
                yield _table_sample(part, row, cells, data)
            row += 1


def count_rows(parts: Sequence[TablePart]) -> int | None:
    """Return the number of rows, or None if that requires reading a file (CSV)."""
    if not all(is_parquet(part.path) for part in parts):
        return None
    return sum(int(_open_parquet(part.path).metadata.num_rows) for part in parts)


# The needed cells by column; or a sentence that says why the row is malformed.
_Row = dict[str, Any] | str


def _rows(
    path: Path, data: DataParams, wanted: frozenset[int] | None, begin: int
) -> Iterator[_Row | None]:
    """Yield the rows of one file, numbered from `begin`.

    For rows that are not `wanted`, it may yield None.
    """
    if is_parquet(path):
        return _parquet_rows(path, data, wanted, begin)
    return _jsonl_rows(path, data) if is_jsonl(path) else _csv_rows(path, data)


def _parquet_rows(
    path: Path, data: DataParams, wanted: frozenset[int] | None, begin: int
) -> Iterator[_Row | None]:
    file = _open_parquet(path)
    if not file.metadata.num_rows:  # the types of an empty shard may say nothing
        return
    columns = _needed_columns(path, data, file.schema_arrow.names)
    _check_image_type(path, columns[0], file.schema_arrow.field(columns[0]).type)
    row = begin
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
            numbers = range(row, row + batch.num_rows)
            is_wanted = [wanted is None or number in wanted for number in numbers]
            found = iter(batch.filter(pa.array(is_wanted)).to_pylist())
            yield from (next(found) if chosen else None for chosen in is_wanted)
            row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.path {str(path)!r} is damaged after row {row - begin}: "
            f"{str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    with parquet_errors(path):
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _check_image_type(path: Path, column: str, found: pa.DataType) -> None:
    is_bytes_and_path = pa.types.is_struct(found) and found.get_field_index("bytes") >= 0
    if not is_bytes_and_path and not any(is_type(found) for is_type in _IS_IMAGE):
        raise DataError(
            f"data.image_column {column!r} of {str(path)!r} has the type {found}, expected encoded "
            "image bytes (binary, or a struct with 'bytes' and 'path') or paths (string)."
        )


def _csv_rows(path: Path, data: DataParams) -> Iterator[_Row]:
    encoding = "utf-8-sig" if is_utf8(data.encoding) else data.encoding
    start, _ = csv_header(path, csv_start(path, data.encoding), data.encoding)
    num_lines, _, delimiter = start
    with path.open(newline="", encoding=encoding) as file:
        lines = itertools.islice(file, num_lines, None)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(filter(None, reader), None)
            if header is None:
                raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")
            columns = _needed_columns(path, data, header)
            positions = {name: header.index(name) for name in columns}
            for line in filter(None, reader):
                if len(line) == len(header):
                    yield {name: line[position] for name, position in positions.items()}
                else:
                    yield wrong_width(len(line), len(header))
        except (csv.Error, UnicodeDecodeError) as error:
            fix = f" {remedy(path)}" if isinstance(error, UnicodeDecodeError) else ""
            raise DataError(
                f"data.path {str(path)!r} is not a readable CSV near line "
                f"{num_lines + reader.line_num + 1}: {error}. "
                f"Expected {data.encoding} text and quotes that close.{fix}"
            ) from error


def skipped_comments(path: Path, encoding: str) -> str:
    """Return a text on the comments above a CSV's header, for the error of a missing column."""
    if path.suffix.lower() != ".csv":
        return ""
    text = csv_start(path, encoding).decode()
    number = find_csv_start(text).num_lines
    lines = [line for line in text.split("\n")[:number] if line.startswith("#")]
    if not lines:
        return ""
    shown = ", ".join(repr(line.strip()[:_SHOWN_CHARACTERS]) for line in lines[:_MAX_SHOWN])
    return (
        f"\nIts header is line {number + 1}; {len(lines)} lines above it were skipped as comments: "
        f"{shown}{', ...' * (len(lines) > _MAX_SHOWN)}. Remove the # if one of them is the header."
    )


def _jsonl_rows(path: Path, data: DataParams) -> Iterator[_Row]:
    columns = _needed_columns(path, data, json_columns(path))
    for record in json_records(path):
        if record is None:
            yield NOT_AN_OBJECT
        else:
            yield {name: record.get(name) for name in columns}


def special_columns(data: DataParams) -> dict[str, str]:
    """Return the columns that params.yaml uses for anything but inputs, by key of `data`.

    If the target has several columns, each has its own key, such as "target_column[0]".
    """
    keys = ("target_column", "group_column", "time_column", "weight_column", "split_column")
    columns = {key: getattr(data, key) for key in keys}
    if isinstance(data.target_column, list):
        del columns["target_column"]
        columns |= {f"target_column[{i}]": name for i, name in enumerate(data.target_column)}
    return {key: name for key, name in columns.items() if name is not None}


def missing_column(name: str, present: Sequence[str]) -> str:
    """Return the part of an error message that says which column is missing."""
    same = [column for column in present if column.lower() == name.strip().lower()]
    close = same or nearest(name, present)
    return f"which is not there; did you mean {close[0]!r}?" if close else "which is not there"


def _needed_columns(path: Path, data: DataParams, present: Sequence[str]) -> list[str]:
    """Return the columns to read, the image column first.

    Raises DataError, which names the columns that are missing.
    """
    image = data.image_column
    if is_metadata(path) and image not in present and FILE_NAME in present:
        image = FILE_NAME
    needed = {"image_column": image, **special_columns(data)}
    if GIVEN_SPLIT not in present:  # without the column, folders or shards give the split
        needed = {key: name for key, name in needed.items() if name != GIVEN_SPLIT}
    problems = [
        f"  data.{key} is {name!r}, {missing_column(name, present)}"
        for key, name in needed.items()
        if name not in present
    ]
    counts = {name: list(present).count(name) for name in sorted(set(needed.values()))}
    problems += [
        f"  the column {name!r} occurs {count} times" for name, count in counts.items() if count > 1
    ]
    if problems:
        columns = ", ".join(present) if present else "none"
        raise DataError(
            f"{str(path)!r} has the columns {columns}.\n"
            + "\n".join(problems)
            + skipped_comments(path, data.encoding)
        )
    return list(dict.fromkeys(needed.values()))


def _table_sample(part: TablePart, row: int, cells: _Row, data: DataParams) -> RawSample:
    if isinstance(cells, str):
        return RawSample(_source(row, part), b"", None, None, None, Fault("malformed_row", cells))
    column = data.image_column if data.image_column in cells else FILE_NAME
    image = image_cell(part.path.parent, cells[column])
    if data.split_column == GIVEN_SPLIT and GIVEN_SPLIT not in cells:
        cells = cells | {GIVEN_SPLIT: part.split_of(image.name)}
    annotation = annotate(cells, data)
    fault = image.fault or annotation.fault
    name = f"{part.prefix}{image.name}" if image.name else ""
    return RawSample(
        source=_source(row, part, name),
        payload=image.payload,
        fault=fault,
        path=None if fault else image.path,
        label=annotation.label,
        target=annotation.target,
        group=annotation.group,
        time=annotation.time,
        weight=annotation.weight,
        given_split=annotation.given_split,
        corrections=annotation.corrections,
    )


def _source(row: int, part: TablePart, name: str = "") -> str:
    return ":".join(filter(None, (str(row), part.origin, name)))


class _ImageCell(NamedTuple):
    name: str | None  # the path that the cell contains
    payload: bytes = b""
    fault: Fault | None = None
    path: str | None = None  # path of the file to read


def image_cell(folder: Path, cell: Any) -> _ImageCell:
    name, content = cell, cell
    if isinstance(cell, dict):
        name, content = cell.get("path"), cell.get("bytes")
    name = name if isinstance(name, str) else None
    if isinstance(content, bytes):
        return _ImageCell(name, content)
    if not name:
        return _ImageCell(None, fault=Fault("missing_image", "the image column is empty"))
    path = _relative_path(name)
    if path.is_absolute() or path.parts[:1] == ("..",):
        detail = f"{name} leads out of {folder}, expected a path relative to the table's folder"
        return _ImageCell(name, fault=Fault("outside_folder", detail))
    file = folder / path
    for place in (file, *file.parents[: len(path.parts) - 1]):
        if fault := link_fault(place, folder):
            return _ImageCell(name, fault=fault)
    return _ImageCell(name, path=str(file))


def _relative_path(name: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(name.replace("\\", "/")))
