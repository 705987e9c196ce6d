"""The thumbnails of all pictures, in a file without a name: a quarter of a kilobyte each that need not stay in memory.

See `scratch_tables` for what becomes of the file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.scratch_arrays import taken
from slipway.data.engine.scratch_tables import scratch_file
from slipway.data.images.inspection import FACTS
from slipway.data.images.quality import THUMBNAIL_PX

_BYTES = THUMBNAIL_PX**2
_COLUMN = FACTS.get_field_index("thumbnail")


@contextmanager
def thumbnail_file() -> Iterator["ThumbnailFile"]:
    """A new one, closed with the block."""
    with scratch_file() as file:
        yield ThumbnailFile(file)


class ThumbnailFile:
    """Takes the thumbnails out of batches of FACTS, and gives them back by the number of the row."""

    schema = FACTS.remove(_COLUMN)

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count = file, 0

    def take_from(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch without its column `thumbnail`."""
        thumbnails = pc.fill_null(batch.column(_COLUMN), bytes(_BYTES))
        begin = thumbnails.offset * _BYTES
        self._file.write(
            memoryview(thumbnails.buffers()[1])[begin : begin + len(thumbnails) * _BYTES]
        )
        self._count += batch.num_rows
        return batch.remove_column(_COLUMN)

    def at(self, places: NDArray[np.int64]) -> "Thumbnails":
        """Those of some rows, counted over all batches, in their order."""
        self._file.flush()
        pixels = (
            np.memmap(self._file, np.uint8, "r", shape=(self._count, _BYTES))
            if self._count
            else np.zeros((0, _BYTES), np.uint8)
        )
        return Thumbnails(pixels, places)


class Thumbnails:
    """(N, 256) uint8 that are read when they are asked for."""

    def __init__(self, pixels: NDArray[np.uint8], places: NDArray[np.int64]) -> None:
        self._pixels, self._places = pixels, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, rows: Any) -> NDArray[np.uint8]:
        """(B, 256) of a slice or of row numbers."""
        return np.asarray(self._pixels[self._places[rows]])

    def of(self, rows: NDArray[np.int64]) -> "Thumbnails":
        """Those of some rows."""
        return Thumbnails(self._pixels, taken(self._places, rows))
