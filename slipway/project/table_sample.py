"""Samples the rows of a table, and counts all its rows.

The sample is the whole of a small CSV, evenly spaced pieces of a large one, the first rows of each
row group of a Parquet file, or the beginning of a JSON lines file or a workbook.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipway.data.sources.archives import shown_as
from slipway.data.sources.formats.csv_files import START_CHARACTERS, csv_names, find_csv_start
from slipway.data.sources.formats.json_lines import holds_array, is_jsonl, json_texts
from slipway.data.sources.raw_tables import RawTable, join_tables, read_raw_table, stored_column
from slipway.data.sources.shards import is_parquet, parquet_errors
from slipway.data.sources.text_format import TextFormat, as_utf8, without_lists

_SAMPLE_BYTES = 4_000_000  # bytes read of a text file; more would leave scratch files
_PIECES = 16
_MOST_ROWS, _MOST_CELLS = 50_000, 2_000_000
_MOST_GROUPS = 20
_COUNTED_BYTES = 1 << 28  # bytes of a text file whose lines are counted
_CHUNK_BYTES = 1 << 22
# Encodings that can fail, so that reading without an error is evidence.
_ENCODINGS = ("utf-8", "windows-1252", "gb18030", "shift_jis")
_GB = "gb18030"
# The 3,755 usual characters of GB 2312. Windows-1252 has a letter for nearly every byte, but in its
# languages two such letters are rarely neighbours.
_USUAL_CHINESE = re.compile(rb"[\xb0-\xd7][\xa1-\xfe]")
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]")
_MOST_ARE_CHINESE = 0.7  # part of the bytes beyond ASCII; others are punctuation or rare characters


class TableSample(NamedTuple):
    """Sampled rows of one file, and the number of all its rows."""

    raw: RawTable
    num_rows: int
    is_exact: bool
    encoding: str = "utf-8"


class TablesSample(NamedTuple):
    """Sampled rows of several files of equal columns."""

    raw: RawTable
    parts: list[TableSample]
    is_exact: bool
    encoding: str


def sample_tables(paths: Sequence[Path]) -> TablesSample:
    """Sample the rows of tables of equal columns; raises DataError if one cannot be read."""
    samples = {str(path): sample_table(path, len(paths)) for path in paths}
    parts = list(samples.values())
    raw = parts[0].raw
    if len(parts) > 1:
        raw = join_tables({name: sample.raw for name, sample in samples.items()})
    encoding = next((part.encoding for part in parts if part.encoding != "utf-8"), "utf-8")
    return TablesSample(raw, parts, all(part.is_exact for part in parts), encoding)


def sample_table(path: Path, num_files: int = 1) -> TableSample:
    """Sample one file, of a table of `num_files`."""
    if is_parquet(path):
        with parquet_errors(path):
            return _sample_parquet(path, num_files)
    budget = _SAMPLE_BYTES // num_files
    return _sample_jsonl(path, budget) if is_jsonl(path) else _sample_csv(path, budget)


def encoding_of(payload: bytes) -> str:
    """Guess the encoding of text: the first one that decodes it, or GB 18030 for Chinese text."""
    for mark, encoding in ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if payload.startswith(mark):
            return encoding
    chinese = 2 * len(_USUAL_CHINESE.findall(payload))
    is_chinese = chinese > _MOST_ARE_CHINESE * len(_BEYOND_ASCII.findall(payload))
    first, *others = _ENCODINGS
    for encoding in [first, *[_GB] * is_chinese, *others]:
        try:
            payload.decode(encoding)
        except UnicodeDecodeError as error:
            if error.start > len(payload) - 4:  # the last character may be cut
                return encoding
        else:
            return encoding
    return "utf-8"


def _sample_csv(path: Path, budget: int) -> TableSample:
    size = path.stat().st_size
    with path.open("rb") as file:
        payload = file.read(min(budget, size))
    encoding = encoding_of(payload)
    if size <= budget:  # the file itself, which an error then names
        raw = read_raw_table(path, written=TextFormat(encoding))
        return TableSample(raw, raw.num_read, True, encoding)
    csv_names(path, encoding)  # its errors name the file, not the sample of it
    payload = _pieces(path, payload, size, budget, encoding)
    with tempfile.TemporaryDirectory() as folder, shown_as({Path(folder): path.parent}):
        part = Path(folder, path.name)
        part.write_bytes(payload)
        raw = read_raw_table(part, written=TextFormat(encoding))
    counted, lines = _count_lines(path)
    num_rows = round(lines * size / counted) - 1
    return TableSample(raw, num_rows, counted == size and b'"' not in payload, encoding)


def _pieces(path: Path, start: bytes, size: int, budget: int, encoding: str) -> bytes:
    """Return the beginning of a CSV, and whole lines from evenly spaced positions after it.

    Returns only the beginning if lines cannot be found safely: if quoted cells may contain line
    breaks, or if characters have several bytes.
    """
    start = start[: start.rfind(b"\n") + 1]
    if b'"' in start or encoding == "utf-16":
        return start
    piece = budget // _PIECES
    text = as_utf8(path, start[:START_CHARACTERS], encoding).decode(errors="replace")
    header = sum(map(len, start.splitlines(keepends=True)[: find_csv_start(text).num_lines + 1]))
    found = [start[: max(header, start.rfind(b"\n", 0, piece) + 1)]]
    with path.open("rb") as file:
        for number in range(1, _PIECES):
            file.seek(number * (size - piece) // (_PIECES - 1))
            lines = file.read(piece)
            begin, end = lines.find(b"\n") + 1, lines.rfind(b"\n") + 1
            if b'"' in lines:
                return start
            found.append(lines[begin:end])
    return b"".join(found)


def _count_lines(path: Path) -> tuple[int, int]:
    """Return the number of bytes read, and the number of lines in them."""
    counted = lines = 0
    with path.open("rb") as file:
        while counted < _COUNTED_BYTES and (chunk := file.read(_CHUNK_BYTES)):
            counted, lines = counted + len(chunk), lines + chunk.count(b"\n")
    return counted, lines


def _sample_jsonl(path: Path, budget: int) -> TableSample:
    size = path.stat().st_size
    if size <= budget:
        raw = read_raw_table(path, written=TextFormat(list_columns=None))
        return TableSample(raw, raw.num_read, True)
    with tempfile.TemporaryDirectory() as folder, shown_as({Path(folder): path.parent}):
        part = Path(folder, path.name)
        with part.open("w", encoding="utf-8", errors="surrogateescape") as file:
            for text in json_texts(path):
                file.write(text.rstrip("\n") + "\n")
                if file.tell() > budget:
                    break
        num_bytes = part.stat().st_size
        raw = read_raw_table(part, written=TextFormat(list_columns=None))
    with path.open(encoding="utf-8", errors="replace") as file:
        is_array = holds_array(file.read(START_CHARACTERS))
    if is_array:
        return TableSample(raw, round(raw.num_read * size / num_bytes), False)
    counted, lines = _count_lines(path)
    return TableSample(raw, round(lines * size / counted), counted == size)


def _sample_parquet(path: Path, num_files: int) -> TableSample:
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK_BYTES)
    names = [field.name for field in file.schema_arrow if not holds_bytes(field.type)]
    most = min(_MOST_ROWS, _MOST_CELLS // max(1, len(names))) // num_files
    table = pa.Table.from_batches(
        list(_batches(file, max(1, most), names)),
        pa.schema([file.schema_arrow.field(name) for name in names]),
    )
    columns = {name: stored_column(name, without_lists(table[name])) for name in names}
    raw = RawTable(columns, np.arange(table.num_rows), [])
    return TableSample(raw, int(file.metadata.num_rows), True)


def _batches(file: pq.ParquetFile, most: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    groups = file.num_row_groups
    chosen = sorted(
        {round(place) for place in np.linspace(0, groups - 1, min(groups, _MOST_GROUPS))}
    )
    if file.metadata.num_rows <= most:
        chosen = list(range(groups))
    per_group = max(1, most // max(1, len(chosen)))
    for group in chosen:
        rows = min(per_group, file.metadata.row_group(group).num_rows)
        if rows:
            yield from islice(file.iter_batches(rows, row_groups=[group], columns=names), 1)


def holds_bytes(kind: pa.DataType) -> bool:
    """Return True for a column that may hold encoded images: binary, or a struct with `bytes`."""
    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def without(raw: RawTable, names: Sequence[str]) -> RawTable:
    """Return the table without some columns."""
    return replace(
        raw, columns={name: column for name, column in raw.columns.items() if name not in names}
    )
