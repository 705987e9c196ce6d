"""Converts images from Python callers to encoded bytes, as the service would receive them."""

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.system.cores import num_cores
from slipway.system.errors import DataError, ImageError

_EXPECTED = "a path, encoded bytes, a PIL image or an array of uint8"
# Modes that PNG stores without loss; images of other modes are encoded as TIFF.
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
Given = TypeVar("Given")
Made = TypeVar("Made")


def image_list(given: object) -> list[Any] | None:
    """Return a list of images if `given` holds several; None if it is a single image.

    Several images are a list, a tuple or a four-dimensional array.
    """
    if isinstance(given, (list, tuple)):
        return list(given)
    return list(given) if isinstance(given, np.ndarray) and given.ndim == 4 else None


def image_bytes(item: object) -> bytes:
    """Return an image as encoded bytes: a file unchanged, pixels losslessly encoded.

    Raises DataError if it is not an image, or if the file cannot be read.
    """
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    if isinstance(item, (str, os.PathLike)):
        try:
            return Path(item).read_bytes()
        except OSError as error:
            raise DataError(
                f"the image {os.fspath(item)!r} cannot be read: {error.strerror}. "
                f"Expected {_EXPECTED}."
            ) from error
    if isinstance(item, np.ndarray):
        item = _image_of(item)
    if not isinstance(item, Image.Image):
        raise DataError(f"found {type(item).__name__}, expected {_EXPECTED}.")
    stream = io.BytesIO()
    upright = ImageOps.exif_transpose(item)
    if upright.mode in _PNG_MODES:
        upright.save(stream, "PNG", compress_level=0)
    else:
        upright.save(stream, "TIFF")
    return stream.getvalue()


def _image_of(pixels: NDArray[Any]) -> Image.Image:
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    is_image = pixels.ndim in (2, 3) and channels in (1, 3, 4) and pixels.size
    if not is_image or pixels.dtype != np.uint8:
        raise DataError(
            f"found an array of {pixels.dtype} {pixels.shape}, expected uint8 from 0 to 255 in the "
            "shape (height, width), or (height, width, channels) with 1, 3 or 4 channels."
        )
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


class ImageReader:
    """Decodes images of one contract to network inputs, on every core."""

    def __init__(self, contract: ImageContract) -> None:
        self._contract = contract
        self._threads = ThreadPoolExecutor(num_cores(), thread_name_prefix="slipway-decode")

    def read(self, given: object, batch_size: int) -> tuple[Iterator[NDArray[Any]], bool]:
        """Return batches of at most `batch_size` inputs, and True if `given` is a list.

        An ImageError or DataError names the position of a bad image in the list.
        """
        items = image_list(given)
        if items is None:
            return iter([self.decode(given)[np.newaxis]]), False
        return self._batches(items, batch_size), True

    def decode(self, item: object) -> NDArray[np.uint8]:
        """Decode one image to pixels (size_px, size_px, channels) uint8."""
        return array_from_bytes(image_bytes(item), self._contract)

    def in_order(
        self, make: Callable[[Given], Made], items: Iterable[Given], ahead: int
    ) -> Iterator[Future[Made]]:
        """Run `make` on each item, on threads, and yield the futures in the order of the items.

        At most about `ahead` results are computed before they are used, which limits memory.
        """
        waiting: deque[Future[Made]] = deque()
        try:
            for item in items:
                waiting.append(self._threads.submit(make, item))
                if len(waiting) > ahead:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _batches(self, items: Sequence[Any], batch_size: int) -> Iterator[NDArray[Any]]:
        batch: list[NDArray[np.uint8]] = []
        for position, future in enumerate(self.in_order(self.decode, items, 2 * batch_size)):
            try:
                batch.append(future.result())
            except ImageError as error:
                raise ImageError(error.rule, f"item {position}: {error.detail}") from error
            except DataError as error:
                raise DataError(f"item {position}: {error}") from error
            if len(batch) == batch_size or position == len(items) - 1:
                yield np.stack(batch)
                batch = []
