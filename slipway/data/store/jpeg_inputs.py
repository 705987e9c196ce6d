"""Stores images as JPEGs in one file, and decodes them on access.

`inputs.jpeg` holds the images one after the other, `offsets.npy` the position of each. This form is
for data sets whose pixels do not fit on the disk: photographs take about an eighth of the space.
The price is a lossy compression, and decoding every batch.
"""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from slipway.system.cores import num_cores
from slipway.system.errors import IntegrityError, SchemaError

JPEG, OFFSETS = "inputs.jpeg", "offsets.npy"
_ROWS_PER_THREAD = 8  # fewer rows are not worth another thread


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Return pixels (height, width, 1 or 3) encoded as JPEG.

    Colour is not subsampled: 4:2:0 saves a quarter of the bytes, but its mean error is 40 % larger
    (docs/explanation/precompute.md).
    """
    color, subsampling = ("GRAY", "Gray") if pixels.shape[2] == 1 else ("RGB", "444")
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, color, subsampling))


def decode_jpeg(payload: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Decode the output of `encode_jpeg`. Raises ValueError if the image does not have `shape`."""
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(payload, "GRAY" if shape[2] == 1 else "RGB")
    if pixels.shape != shape:
        raise ValueError(f"{pixels.shape} found, {shape} expected")
    return pixels


class JpegInputs:
    """An array (N, height, width, channels) uint8 of images that are decoded on access.

    A loader process decodes on one thread, any other process on one thread per core. A pickled
    object holds only the path of its files.
    """

    def __init__(self, folder: Path, row_shape: tuple[int, ...]) -> None:
        self._folder, self._row_shape = folder, row_shape
        try:
            self._blob = np.memmap(folder / JPEG, np.uint8, "r")
            self._offsets: NDArray[np.int64] = np.load(
                folder / OFFSETS, mmap_mode="r", allow_pickle=False
            )
        except (OSError, ValueError) as error:
            raise SchemaError(
                f"{folder} holds no readable JPEG images: {error}. "
                "Run `dvc repro --force precompute`."
            ) from error
        is_list_of_int64 = self._offsets.dtype == np.int64 and self._offsets.ndim == 1
        if not is_list_of_int64 or self._offsets[-1] != len(self._blob):
            raise SchemaError(
                f"{folder / OFFSETS} does not fit {JPEG} of {len(self._blob)} bytes. "
                "Run `dvc repro --force precompute`."
            )
        self._threads: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._row_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._blob)

    def file_bytes(self, begin: int, end: int) -> tuple["np.memmap[Any, Any]", int, int]:
        """Return the mapped file, and the range of bytes of the rows in [begin, end)."""
        return self._blob, int(self._offsets[begin]), int(self._offsets[end])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, rows: Any) -> NDArray[np.uint8]:
        """Return one image (height, width, channels), or several with a leading dimension (B,)."""
        numbers = np.arange(len(self))[rows]
        if numbers.ndim == 0:
            return self._row(int(numbers))
        pixels = np.empty((len(numbers), *self._row_shape), np.uint8)
        parts = np.array_split(np.arange(len(numbers)), self._num_threads(len(numbers)))
        jobs = [(pixels, numbers, part) for part in parts]
        if len(jobs) == 1:
            self._fill(jobs[0])
        else:
            list(self._pool().map(self._fill, jobs))
        return pixels

    def __reduce__(self) -> tuple[Any, ...]:
        return JpegInputs, (self._folder, self._row_shape)

    def _fill(self, job: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]) -> None:
        pixels, numbers, part = job
        for place in part:
            pixels[place] = self._row(int(numbers[place]))

    def _row(self, number: int) -> NDArray[np.uint8]:
        payload = self._blob[self._offsets[number] : self._offsets[number + 1]]
        try:
            return decode_jpeg(payload, self._row_shape)
        except ValueError as error:
            raise IntegrityError(
                f"image {number} in {self._folder / JPEG} is damaged: {error}. "
                "Run `dvc repro --force precompute`."
            ) from error

    @staticmethod
    def _num_threads(num_rows: int) -> int:
        is_loader = multiprocessing.parent_process() is not None
        return 1 if is_loader else max(1, min(num_cores(), num_rows // _ROWS_PER_THREAD))

    def _pool(self) -> ThreadPoolExecutor:
        """Return the thread pool of this process; a fork copies the object but not its threads."""
        if self._threads is None or self._threads[0] != os.getpid():
            pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="slipway-jpeg")
            self._threads = (os.getpid(), pool)
        return self._threads[1]
