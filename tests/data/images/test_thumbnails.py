"""Tests of the thumbnail file: thumbnails come back as stored, even if rows were refused."""

import numpy as np
import pyarrow as pa

from slipway.data.images.inspection import FACTS
from slipway.data.images.thumbnails import thumbnail_file


def facts(*thumbnails: bytes | None) -> pa.RecordBatch:
    """Return rows of FACTS that hold only these thumbnails."""
    nulls = [None] * len(thumbnails)
    columns = [
        pa.array(thumbnails if field.name == "thumbnail" else nulls, field.type) for field in FACTS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=FACTS)


def test_the_thumbnail_file_returns_each_thumbnail_by_its_row_number() -> None:
    batch = facts(b"a" * 256, None, b"b" * 256, b"c" * 256)
    with thumbnail_file() as file:
        taken = [file.take_from(batch), file.take_from(batch.slice(2))]
        assert [part.schema for part in taken] == [file.schema] * 2
        thumbnails = file.at(np.array([5, 0, 2]))
        assert thumbnails[:][:, 0].tobytes() == b"cab"
        assert thumbnails[np.array([1, 1])].tobytes() == b"a" * 512


def test_a_thumbnail_file_of_zero_images_can_be_read() -> None:
    with thumbnail_file() as file:
        assert len(file.at(np.zeros(0, np.int64))) == 0
