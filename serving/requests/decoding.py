"""From encoded bytes to the pixels a network takes, off the event loop where it would be held up.

The decoding itself is `slipway.inputs.images`, the same as in training. A caller that is cancelled (its deadline passed) takes what it
has waiting for the threads with it.
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

from serving.http.responses import Refusal
from serving.requests.reading import item_field
from slipway.inputs.images import FORMATS, ImageContract, array_from_bytes
from slipway.inputs.png import png_size
from slipway.system.cores import num_cores
from slipway.system.errors import ImageError

# Up to here decoding takes less than the 0.1 ms that a thread's round trip costs. Both are needed:
# some formats pack 50 megapixels into a few hundred bytes.
INLINE_BYTES = 32 << 10
INLINE_PIXELS = 96 * 96


@dataclass(frozen=True)
class Decoded:
    """What one request asks about."""

    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    is_list: bool  # whether the caller sent, and gets, a list


class Decoder(Protocol):
    """From a payload to what a network takes; each kind of input has its own."""

    async def decode(self, *items: bytes) -> Decoded:
        """Decode a payload; Refusal with the rule that its first bad item breaks."""
        ...

    def reader(self, items: Sequence[bytes]) -> Callable[[], NDArray[Any]] | None:
        """The decoder of a quick payload, for any thread; None if decoding takes longer."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...


class ImageDecoder:
    """Decodes images for one contract: a small one at once, others on threads."""

    def __init__(self, contract: ImageContract, max_rows: int = 0) -> None:
        """`max_rows` limits tables only: the images of a request are counted when it is read."""
        self._contract = contract
        Image.init()  # loads Pillow's plugins, which the first image would otherwise wait for
        self._threads = ThreadPoolExecutor(num_cores(), thread_name_prefix="slipway-decode")

    async def decode(self, *images: bytes) -> Decoded:
        """(images, size_px, size_px, channels) uint8 in [0, 255]; Refusal with the rule that the first bad image breaks."""
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
                _give_up(pixels)

    def reader(self, images: Sequence[bytes]) -> Callable[[], NDArray[np.uint8]] | None:
        """What decodes a single image in a moment, to (1, size_px, size_px, channels), on whatever thread; None where that takes longer."""
        if (
            len(images) > 1 or self._contract.transform is not None or not _is_small(images[0])
        ):  # a user's function may take long
            return None
        return lambda: self._pixels(images[0], "image")[np.newaxis]

    def close(self) -> None:
        """End the threads. What is left to them nobody waits for, and it may take seconds: neither does the event loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pixels(self, image: bytes, name: str) -> NDArray[np.uint8]:
        try:
            return array_from_bytes(image, self._contract)
        except ImageError as error:
            raise Refusal(
                error.rule,
                error.detail if name == "image" else f"{name}: {error.detail}",
                field=name,
            ) from None


def _give_up(pixels: asyncio.Future[NDArray[np.uint8]]) -> None:
    """What has not begun never will; of what has failed as well, asyncio would say that nobody asked."""
    if not pixels.cancel() and not pixels.cancelled():
        pixels.exception()


def _is_small(image: bytes) -> bool:
    if len(image) > INLINE_BYTES:
        return False
    size = png_size(image)  # opening the file takes Pillow longer than decoding a small one
    if size:
        return size[0] * size[1] <= INLINE_PIXELS
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return bool(opened.width * opened.height <= INLINE_PIXELS)
    except Exception:
        return True  # the header alone refuses it
