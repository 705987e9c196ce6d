"""Finds the rows that `slipway dataset collect` or `merge` took from given requests.

A row of a table names its request. Other rows, and those collected before rows did so, are
recognised by their content, by the same comparison as in `merge`. Only rows that are marked as
collected are: an equal row of the original data does not come from a request.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.erasure.rows import FoundRows
from slipway.data.merge.cells import cells_of, input_digests
from slipway.data.merge.tables import input_kinds
from slipway.data.sources.raw_tables import COLLECTED, RawTable, read_raw_table, stored_column
from slipway.data.sources.shards import is_parquet
from slipway.data.sources.text_format import TextFormat
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.traffic.collect import ALL_COLLECTED
from slipway.traffic.request_log import REQUEST, RequestRows, has_row, request_of

_BATCH_ROWS = 64


@dataclass(frozen=True)
class RequestContents:
    """The contents of requests: columns of (N,) cells for tables and texts, or bytes of images.

    `rows` names the rows of these requests, also those whose content other requests have as well.
    """

    columns: dict[str, pa.Array]
    images: Sequence[bytes] = ()
    rows: RequestRows = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        has_cells = any(len(cells) for cells in self.columns.values())
        return not self.images and not has_cells and not self.rows


def find_collected(path: Path, data: DataParams, contents: RequestContents) -> FoundRows | None:
    """Return the collected rows that come from these requests.

    Returns None if the table has no collected rows.
    """
    if contents.is_empty or not is_parquet(path):
        return None
    schema = pq.read_schema(path)
    is_whole = (schema.metadata or {}).get(ALL_COLLECTED) == b"true"
    if not is_whole and COLLECTED not in schema.names:
        return None
    digest = files.sha256_file(path)
    has_pixels = kind_of(data.task).input.has_pixels
    is_equal = (_equal_images if has_pixels else _equal_rows)(path, data, contents)
    if REQUEST in schema.names:
        names = pq.read_table(path, columns=[REQUEST], partitioning=None)[REQUEST].to_pylist()
        is_named = np.array([name is not None for name in names], np.bool_)
        is_wanted = [name is not None and _is_of(name, contents.rows) for name in names]
        is_equal = np.where(is_named, np.array(is_wanted, np.bool_), is_equal)
    if not is_whole:
        marks = read_raw_table(path, [COLLECTED], TextFormat.of(data)).columns[COLLECTED]
        is_equal &= np.array([str(one).lower() == "true" for one in cells_of(marks).to_pylist()])
    return FoundRows(path, digest, is_equal)


def _is_of(name: str, rows: RequestRows) -> bool:
    try:
        return has_row(rows, *request_of(name))
    except ValueError:  # not written by `slipway dataset collect`
        return False


def _equal_images(path: Path, data: DataParams, contents: RequestContents) -> np.ndarray:
    wanted = {hashlib.sha256(image).digest() for image in contents.images}
    found: list[bool] = []
    with pq.ParquetFile(path) as file:
        if data.image_column not in file.schema_arrow.names:
            return np.zeros(file.metadata.num_rows, np.bool_)
        for batch in file.iter_batches(_BATCH_ROWS, columns=[data.image_column]):
            for cell in batch.column(0).to_pylist():
                image = cell.get("bytes") if isinstance(cell, dict) else cell
                found.append(isinstance(image, bytes) and hashlib.sha256(image).digest() in wanted)
    return np.array(found, np.bool_)


def _equal_rows(path: Path, data: DataParams, contents: RequestContents) -> np.ndarray:
    names = list(contents.columns)
    present = pq.read_schema(path).names
    if not names or not set(names) <= set(present):
        return np.zeros(pq.read_metadata(path).num_rows, np.bool_)
    base = read_raw_table(path, names, TextFormat.of(data))
    own = RawTable(
        {
            name: stored_column(name, pa.chunked_array([cells]))
            for name, cells in contents.columns.items()
        },
        np.arange(len(contents.columns[names[0]])),
        [],
    )
    kinds = input_kinds(data, base, own, names)
    wanted = set(input_digests(own, kinds))
    return np.array([digest in wanted for digest in input_digests(base, kinds)], np.bool_)
