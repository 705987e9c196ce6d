"""Finds the rows of a group in raw tables, and removes them.

The lines of all other rows of a .csv or .jsonl stay as they are, byte for byte; a .parquet keeps
its schema, its metadata and its row groups. The new table is written beside the old one and
replaces it atomically.
"""

import csv
import io
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.data.sources.annotations import annotation_text
from slipway.data.sources.archives import is_archive
from slipway.data.sources.formats.csv_files import find_csv_start
from slipway.data.sources.formats.json_lines import holds_array, is_jsonl, json_record
from slipway.data.sources.image_tables import FILE_NAME, image_cell, missing_column
from slipway.data.sources.joined import source_names
from slipway.data.sources.shards import is_parquet, parquet_errors, table_files
from slipway.data.sources.sources import each_source, find_layout
from slipway.data.sources.text_folders import is_text_folder
from slipway.data.sources.text_format import is_utf8
from slipway.data.tables.source import find_table
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import DataError, IntegrityError

_BATCH_ROWS = 64
_BYTE_ORDER_MARK = "\ufeff"
_DVC_CACHE = ("files", "md5")  # folders in the path of an object in DVC's cache


@dataclass(frozen=True)
class FoundRows:
    """The rows of one table that should be removed."""

    path: Path
    sha256: str  # digest of the table when it was searched
    is_found: NDArray[np.bool_]  # (N,) for every row, malformed ones included
    # Rows of too many or too few cells, one of which is the value; counted from 1.
    unclear: list[int] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)  # files that only these rows name
    shared: list[Path] = field(default_factory=list)  # image files that other rows name as well

    @property
    def num_rows(self) -> int:
        return int(self.is_found.sum())


@dataclass(frozen=True)
class _Record:
    """A row of a text table; its cells are None if it is malformed."""

    text: str
    cells: Mapping[str, Any] | None


def raw_tables(data: DataParams) -> list[Path]:
    """Return the table files of `data.path`, or [] for folders of classes.

    Raises DataError for an archive or a workbook, because their other rows would not stay
    unchanged.
    """
    root = Path(data.path)
    names = source_names(data) if data.sources is not None and root.is_dir() else []
    if packed := [path for path in (root, *(root / name for name in names)) if is_archive(path)]:
        raise DataError(
            f"{packed[0]} is an archive or a workbook, expected files from which single rows can "
            "be removed. Unpack it or save its table, point data.path at the result, erase there, "
            "and delete the original."
        )
    if kind_of(data.task).input.has_pixels:
        return [part.path for part in find_layout(data).tables]
    own = [data] if data.sources is None else list(each_source(data).values())
    tables = [find_table(one) for one in own]
    return [path for table in tables if not is_text_folder(table) for path in table_files(table)]


def named_files(data: DataParams, names: Sequence[str]) -> list[Path]:
    """Return the existing files with the given names below `data.path`, for folders of classes.

    Raises DataError for a name that leads outside `data.path`, or if the data is a table.
    """
    if not names:
        return []
    root = Path(data.path)
    if not root.is_dir() or raw_tables(data):
        raise DataError(
            f"--file {names[0]} is a file of a folder of classes, but data.path {data.path!r} is a "
            "table. Name the rows with --group or --request-id."
        )
    found = []
    for name in names:
        path = root / name
        if not path.parent.resolve().is_relative_to(root.resolve()) or path.is_dir():
            raise DataError(
                f"--file {name} is not a file below {data.path!r}, expected a name such as "
                "cat/1.png. Check its path."
            )
        found += [path] if path.is_symlink() or path.exists() else []
    return found


def find_group(path: Path, data: DataParams, groups: frozenset[str]) -> FoundRows:
    """Return the rows of the given groups.

    Raises DataError if the table lacks `data.group_column`.
    """
    column = data.group_column
    assert column is not None
    digest = files.sha256_file(path)
    has_pixels = kind_of(data.task).input.has_pixels
    found: list[bool] = []
    unclear: list[int] = []
    named: list[Path | None] = []
    for number, cells in enumerate(_rows(path, data, column), start=1):
        if isinstance(cells, str):
            found.append(False)
            named.append(None)
            if any(group in cells for group in groups):
                unclear.append(number)
            continue
        found.append(annotation_text(cells[column]) in groups)
        named.append(_image_of(path, cells, data) if has_pixels else None)
    is_found = np.array(found, np.bool_)
    images = Counter(file for file in named if file is not None)
    own = Counter(file for file in compress(named, found) if file is not None)
    shared = sorted(file for file in own if own[file] < images[file])
    return FoundRows(path, digest, is_found, unclear, sorted(set(own) - set(shared)), shared)


def remove(rows: FoundRows, data: DataParams) -> None:
    """Delete the images that only the found rows name, then remove the rows from their table.

    If the process is killed in between, the rows remain, and the next call finds the images by
    them. Raises IntegrityError if the table has changed since the search.
    """
    if files.sha256_file(rows.path) != rows.sha256:
        raise IntegrityError(
            f"{rows.path} changed while it was searched, expected the same rows. Nothing of it was "
            "removed; run the same command again."
        )
    for image in rows.images:
        image.unlink(missing_ok=True)
    if not rows.num_rows:
        return
    target = _written_path(rows.path)
    mode = stat.S_IMODE(target.stat().st_mode)
    with files.new_file(target, mode) as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        if is_parquet(rows.path):
            _write_parquet(rows, file)
        else:
            head, records, encoding = _text_records(rows.path, data)
            kept = compress(records, ~rows.is_found)
            text = "".join([head, *(record.text for record in kept)])
            file.write(text.encode(encoding, "surrogateescape"))


def _rows(path: Path, data: DataParams, column: str) -> Iterator[Mapping[str, Any] | str]:
    """Yield the cells of each row that the search needs, or the text of a malformed row."""
    if not is_parquet(path):
        _, records, _ = _text_records(path, data)
        names = list(dict.fromkeys(name for one in records for name in one.cells or ()))
        _check_column(path, column, names)
        for record in records:
            yield record.text if record.cells is None else {column: None, **record.cells}
        return
    with parquet_errors(path), pq.ParquetFile(path) as file:
        present = file.schema_arrow.names
        _check_column(path, column, present)
        images = [data.image_column, FILE_NAME] if kind_of(data.task).input.has_pixels else []
        names = [name for name in dict.fromkeys([column, *images]) if name in present]
        for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            yield from batch.to_pylist()


def _check_column(path: Path, column: str, present: list[str]) -> None:
    if column not in present:
        raise DataError(
            f"{path} has the columns {', '.join(present) or 'none'}. data.group_column is "
            f"{column!r}, {missing_column(column, present)}"
        )


def _image_of(path: Path, cells: Mapping[str, Any], data: DataParams) -> Path | None:
    name = data.image_column if data.image_column in cells else FILE_NAME
    file = image_cell(path.parent, cells.get(name)).path
    return None if file is None else Path(file)


def _text_records(path: Path, data: DataParams) -> tuple[str, list[_Record], str]:
    """Return the text before the first row, the rows, and the encoding of a .csv or .jsonl file."""
    encoding = "utf-8" if is_jsonl(path) or is_utf8(data.encoding) else data.encoding
    payload = path.read_bytes()
    text = payload.decode(encoding, "surrogateescape")
    if text.encode(encoding, "surrogateescape") != payload:
        raise DataError(
            f"{path} cannot be written as it is in data.encoding {data.encoding!r}, expected an "
            "encoding that gives the same bytes. Save it as UTF-8, and set data.encoding to utf-8."
        )
    mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
    text = text.removeprefix(mark)
    if is_jsonl(path):
        if holds_array(text):
            raise DataError(
                f"{path} is one JSON array, expected one object per line, so that the other lines "
                "stay as they are. Write it again in this form, and erase there."
            )
        return mark, list(_json_records(text)), encoding
    limit = csv.field_size_limit(len(text) + 1)  # a text may be a long cell
    try:
        head, records = _csv_records(text)
    except csv.Error as error:
        raise DataError(
            f"{path} is not a readable CSV: {error}. Expected {data.encoding} text and quotes that "
            "close."
        ) from error
    finally:
        csv.field_size_limit(limit)
    return mark + head, records, encoding


def _csv_records(text: str) -> tuple[str, list[_Record]]:
    start = find_csv_start(text)
    lines = list(io.StringIO(text, newline=""))
    begin = start.num_lines
    reader = csv.reader(iter(lines[begin:]), delimiter=start.delimiter, strict=True)
    header, head = list[str](), ""
    records: list[_Record] = []
    pending = 0  # lines up to the row before
    for cells in reader:
        if not header:
            header, pending = [cell.strip() for cell in cells], reader.line_num
            head = "".join(lines[: begin + pending])
        elif cells:  # empty lines before a row belong to it
            own = "".join(lines[begin + pending : begin + reader.line_num])
            is_whole = len(cells) == len(header)
            records.append(
                _Record(own, dict(zip(header, cells, strict=True)) if is_whole else None)
            )
            pending = reader.line_num
    if not header:
        raise csv.Error("there is no header")
    return head, _ended(records, "".join(lines[begin + pending :]))


def _json_records(text: str) -> Iterator[_Record]:
    for line in io.StringIO(text, newline=""):
        yield _Record(line, json_record(line) if line.strip() else {})


def _ended(records: list[_Record], rest: str) -> list[_Record]:
    """Append `rest`, the empty lines after the last row, to the text of that row."""
    if not rest or not records:
        return records
    return [*records[:-1], _Record(records[-1].text + rest, records[-1].cells)]


def _write_parquet(rows: FoundRows, out: Any) -> None:
    with parquet_errors(rows.path), pq.ParquetFile(rows.path) as file:
        schema, parts = file.schema_arrow, file.metadata
        codec = parts.row_group(0).column(0).compression.lower() if parts.num_row_groups else "none"
        with pq.ParquetWriter(out, schema, compression=codec) as writer:
            begin = 0
            for number in range(parts.num_row_groups):
                table = file.read_row_group(number)
                is_kept = ~rows.is_found[begin : begin + table.num_rows]
                begin += table.num_rows
                writer.write_table(table.filter(pa.array(is_kept)))


def _written_path(path: Path) -> Path:
    """Return the file to replace: a link's target, or the link if it leads into DVC's cache."""
    target = path.resolve()
    parts = target.parts
    is_cached = any(pair == _DVC_CACHE for pair in pairwise(parts))
    return path if is_cached else target
