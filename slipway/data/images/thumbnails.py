"""Stores the thumbnails of all images in a scratch file, 256 bytes each, read by index."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.scratch import scratch_file, take
from slipway.data.images.inspection import FACTS
from slipway.data.images.quality import THUMBNAIL_PX

_BYTES = THUMBNAIL_PX**2
_COLUMN = FACTS.get_field_index("thumbnail")


@contextmanager
def thumbnail_file() -> Iterator["ThumbnailFile"]:
    """Create a file for thumbnails that is closed at the end of the block."""
    with scratch_file() as file:
        yield ThumbnailFile(file)


class ThumbnailFile:
    """A file that takes the thumbnails out of batches of FACTS, and returns them by row number."""

    schema = FACTS.remove(_COLUMN)

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count = file, 0

    def take_from(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Store the thumbnails of a batch; return the batch without its thumbnails."""
        thumbnails = pc.fill_null(batch.column(_COLUMN), bytes(_BYTES))
        begin = thumbnails.offset * _BYTES
        content = memoryview(thumbnails.buffers()[1])
        self._file.write(content[begin : begin + len(thumbnails) * _BYTES])
        self._count += batch.num_rows
        return batch.remove_column(_COLUMN)

    def at(self, rows: NDArray[np.int64]) -> "Thumbnails":
        """Return the thumbnails of `rows`, which are numbered over all batches."""
        if not self._count:
            return Thumbnails(np.zeros((0, _BYTES), np.uint8), rows)
        self._file.flush()
        pixels = np.memmap(self._file, np.uint8, "r", shape=(self._count, _BYTES))
        return Thumbnails(pixels, rows)


class Thumbnails:
    """An array (N, 256) uint8 of thumbnails that reads from the file on access."""

    def __init__(self, pixels: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        self._pixels, self._rows = pixels, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: Any) -> NDArray[np.uint8]:
        """Return the thumbnails (B, 256) of a slice or an array of indices."""
        return np.asarray(self._pixels[self._rows[chosen]])

    def of(self, chosen: NDArray[np.int64]) -> "Thumbnails":
        """Return a view of the thumbnails at the indices `chosen`."""
        return Thumbnails(self._pixels, take(self._rows, chosen))
