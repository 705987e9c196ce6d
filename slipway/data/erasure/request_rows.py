"""Finds the rows that `slipway dataset collect` or `merge` took from given requests.

Such a row has no request id. It is recognised by its content, by the same comparison as in `merge`,
and only among rows that are marked as collected: an equal row of the original data does not come
from a request.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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

_BATCH_ROWS = 64


@dataclass(frozen=True)
class RequestContents:
    """The contents of requests: columns of (N,) cells for tables and texts, or bytes of images."""

    columns: dict[str, pa.Array]
    images: Sequence[bytes] = ()

    @property
    def is_empty(self) -> bool:
        return not self.images and not any(len(cells) for cells in self.columns.values())


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
    if not is_whole:
        marks = read_raw_table(path, [COLLECTED], TextFormat.of(data)).columns[COLLECTED]
        is_equal &= np.array([str(one).lower() == "true" for one in cells_of(marks).to_pylist()])
    return FoundRows(path, digest, is_equal)


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
    if not set(names) <= set(present):
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
