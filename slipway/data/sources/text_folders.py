"""Reads text files in class folders as a table with two columns: texts and folder names.

params.yaml names both columns, so that the service uses the same name for the text. Bytes that are
invalid in `data.encoding` become NOT_UTF8, as in the cells of a CSV.
"""

import os
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa

from slipway.config.sections import DataParams
from slipway.data.engine.scratch import store_table
from slipway.data.sources.folders import read_folder
from slipway.data.sources.raw_tables import RawTable, stored_column
from slipway.data.sources.samples import GIVEN_SPLIT, RawSample, looks_like, read_file
from slipway.data.sources.shards import READ_ORDER, table_files
from slipway.data.sources.sources import find_layout
from slipway.data.sources.text_format import as_utf8
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError

MAX_FILE_BYTES = 1 << 24
_BLOCK_FILES = 64


def is_text_folder(path: Path) -> bool:
    """Return True if the result of `find_table` is a folder of text files and not of shards."""
    return path.is_dir() and not table_files(path)


def text_folder_columns(data: DataParams) -> list[str]:
    """Return the column names of the texts and of their classes, as params.yaml gives them.

    Raises DataError if params.yaml describes several texts or several labels for each file.
    """
    if len(data.text_columns) != 1:
        raise DataError(
            f"data.path {data.path!r} is a folder of text files, one text each, but "
            f"data.text_columns is {data.text_columns}. Name one column, such as [text]."
        )
    if kind_of(data.task).target.several or not isinstance(data.target_column, str):
        raise DataError(
            f"data.path {data.path!r} is a folder of class folders, which gives each text one "
            f"label, but data.task is {data.task!r}. Save the texts and their labels as "
            "a .csv, .parquet or .jsonl."
        )
    return [*data.text_columns, data.target_column]


def text_files(data: DataParams) -> Iterator[RawSample]:
    """Yield the files of all class folders; those of a given test split come first.

    `clean` keeps the first of equal rows, so the test split stays complete.
    """
    splits = find_layout(data).folders
    plain = data.model_copy(update={"label_map": {}, "split_column": GIVEN_SPLIT})
    for split in (*READ_ORDER, None) if splits else (None,):
        for sample in read_folder(Path(data.path), None, plain, splits):
            if sample.given_split == split:
                yield sample


def read_text_folder(data: DataParams, only: Collection[str] | None = None) -> RawTable:
    """Read every file as a row: all columns, or `only` these.

    Split folders also give the column GIVEN_SPLIT. A file that is too large, is not text or cannot
    be read becomes a malformed row. Raises DataError if the folder has no class folders, or if the
    params name other columns.
    """
    text, label = text_folder_columns(data)
    names = [text, label, *([GIVEN_SPLIT] if find_layout(data).folders else [])]
    schema = pa.schema([(name, pa.string()) for name in names])
    numbers: list[int] = []
    malformed: list[tuple[int, str]] = []
    origins: list[tuple[int, str]] = []

    def rows() -> Iterator[tuple[str, str | None, str | None]]:
        number = count()
        for sample in text_files(data):
            origins.append((next(number), sample.source))
            content, fault = _content(sample, data.encoding)
            if fault:
                malformed.append((origins[-1][0], fault))
            else:
                numbers.append(origins[-1][0])
                yield content, sample.label, sample.given_split

    def batches() -> Iterator[pa.RecordBatch]:
        held: list[tuple[str, str | None, str | None]] = []
        for row in rows():
            held.append(row)
            if len(held) == _BLOCK_FILES:
                yield _batch(held, schema)
                held = []
        if held:
            yield _batch(held, schema)

    table = store_table(batches(), schema)
    columns = {
        name: stored_column(name, table[name]) for name in names if only is None or name in only
    }
    return RawTable(columns, np.array(numbers, np.int64), malformed, origins)


def _batch(rows: list[tuple[str, str | None, str | None]], schema: pa.Schema) -> pa.RecordBatch:
    cells = list(zip(*rows, strict=True))[: len(schema)]
    return pa.record_batch([pa.array(column, pa.string()) for column in cells], schema=schema)


def _content(sample: RawSample, encoding: str) -> tuple[str, str]:
    """Return the text of a sample's file, and the reason why it is unusable, or ""."""
    if sample.fault or sample.path is None:
        return "", sample.fault.detail if sample.fault else "it has no file"
    return read_text_file(sample.path, encoding)


def read_text_file(path: str, encoding: str) -> tuple[str, str]:
    """Return the text of a file, and a sentence on why it cannot be read, or ""."""
    try:
        num_bytes = os.stat(path).st_size
    except OSError:
        num_bytes = 0  # `read_file` says why
    if num_bytes > MAX_FILE_BYTES:
        return "", f"{path} has {num_bytes:,} bytes, expected a text of at most {MAX_FILE_BYTES:,}"
    payload, fault = read_file(path)
    if fault:
        return "", fault.detail
    try:
        text = as_utf8(Path(path), payload, encoding).decode()
    except DataError as error:
        return "", str(error)
    if "\0" in text:
        found = looks_like(payload)
        return "", f"{path} has NUL bytes ({found}), expected a text in data.encoding {encoding!r}"
    return text, ""
