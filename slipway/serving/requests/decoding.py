"""Decodes images to network inputs; large images on threads, off the event loop.

`slipway.inputs.images` decodes them, as in training. If a request is cancelled because its deadline
passed, its waiting images are cancelled too.
"""

import asyncio
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from slipway.inputs.images import FORMATS, ImageContract, array_from_bytes
from slipway.inputs.png import png_size
from slipway.serving.http.responses import Refusal
from slipway.serving.requests.bodies import item_field
from slipway.system.cores import num_cores
from slipway.system.errors import ImageError

# Up to these limits, decoding takes less than a thread's round trip of 0.1 ms. Both are needed:
# some formats pack 50 megapixels into a few hundred bytes.
INLINE_BYTES = 32 << 10
INLINE_PIXELS = 96 * 96


@dataclass(frozen=True)
class Decoded:
    """The decoded network inputs of one request."""

    inputs: NDArray[Any]  # (rows, ...)
    is_list: bool  # the caller sent, and gets, a list


class Decoder(Protocol):
    """Decodes payloads to network inputs. Each kind of input has its own decoder."""

    async def decode(self, *items: bytes) -> Decoded:
        """Decode the items of a payload.

        Raises Refusal, which names the rule that the first bad item broke.
        """

    def reader(self, items: Sequence[bytes]) -> Callable[[], NDArray[Any]] | None:
        """Return a function, for any thread, that decodes a small payload; None for a large one."""

    def close(self) -> None:
        """End the threads."""


class ImageDecoder:
    """Decodes images for one contract: a single small image inline, others on threads."""

    def __init__(self, contract: ImageContract, max_rows: int = 0) -> None:
        """Create the decoder. `max_rows` is unused: images are counted when the request is read."""
        self._contract = contract
        Image.init()  # loads Pillow's plugins now instead of with the first image
        self._threads = ThreadPoolExecutor(num_cores(), thread_name_prefix="slipway-decode")

    async def decode(self, *images: bytes) -> Decoded:
        """Decode images to pixels (images, size_px, size_px, channels) uint8 in [0, 255]."""
        reader = self.reader(images)
        if reader:
            return Decoded(reader(), is_list=False)
        loop = asyncio.get_running_loop()
        names = [item_field(position, len(images)) for position in range(len(images))]
        waiting = [
            loop.run_in_executor(self._threads, self._pixels, *named)
            for named in zip(images, names, strict=True)
        ]
        try:
            return Decoded(np.stack([await pixels for pixels in waiting]), is_list=len(images) > 1)
        finally:
            for pixels in waiting:
                _cancel(pixels)

    def reader(self, images: Sequence[bytes]) -> Callable[[], NDArray[np.uint8]] | None:
        """Return a function that decodes a small image to (1, size_px, size_px, channels) uint8.

        None for several images, a large one, or one with a user's transform: decode on threads.
        """
        has_user_function = self._contract.transform is not None  # a user's function may be slow
        if len(images) > 1 or has_user_function or not _is_small(images[0]):
            return None
        return lambda: self._pixels(images[0], "image")[np.newaxis]

    def close(self) -> None:
        """End the threads without waiting for work that is no longer needed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pixels(self, image: bytes, name: str) -> NDArray[np.uint8]:
        try:
            return array_from_bytes(image, self._contract)
        except ImageError as error:
            message = error.detail if name == "image" else f"{name}: {error.detail}"
            raise Refusal(error.rule, message, field=name) from None


def _cancel(pixels: asyncio.Future[NDArray[np.uint8]]) -> None:
    """Cancel a decoding. If it failed already, keep asyncio from logging its exception."""
    if not pixels.cancel() and not pixels.cancelled():
        pixels.exception()


def _is_small(image: bytes) -> bool:
    if len(image) > INLINE_BYTES:
        return False
    size = png_size(image)  # Pillow takes longer to open a small PNG than to decode it
    if size:
        return size[0] * size[1] <= INLINE_PIXELS
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            is_part = opened.format in ("AVIF", "HEIF")  # the image may be part of a larger picture
            return bool(not is_part and opened.width * opened.height <= INLINE_PIXELS)
    except Exception:
        return True  # decoding will refuse the header
