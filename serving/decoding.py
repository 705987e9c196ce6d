"""From encoded bytes to the pixels a network takes, off the event loop where it would be held up.

The decoding itself is `slipway.preprocess`, the same as in training.
"""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.responses import Refusal
from slipway.cores import num_cores
from slipway.errors import ImageError
from slipway.preprocess import FORMATS, ImageContract, array_from_bytes

# Up to here decoding takes less than the 0.1 ms that a thread's round trip costs. Both are needed:
# some formats pack 50 megapixels into a few hundred bytes.
INLINE_BYTES = 32 << 10
INLINE_PIXELS = 96 * 96


@dataclass(frozen=True)
class Decoded:
    """What one request asks about."""

    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    is_list: bool  # whether the caller sent, and gets, a list


class ImageDecoder:
    """Decodes images for one contract: small ones at once, others on threads."""

    def __init__(self, contract: ImageContract) -> None:
        self._contract = contract
        Image.init()  # loads Pillow's plugins, which the first image would otherwise wait for
        self._threads = ThreadPoolExecutor(num_cores(), thread_name_prefix="slipway-decode")

    async def decode(self, payload: bytes) -> Decoded:
        """(1, size_px, size_px, channels) uint8 in [0, 255]; Refusal with the rule that the image breaks."""
        try:
            return Decoded((await self._pixels(payload))[np.newaxis], is_list=False)
        except ImageError as error:
            raise Refusal(error.rule, error.detail, field="image") from None

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    async def _pixels(self, payload: bytes) -> NDArray[np.uint8]:
        if self._contract.transform is None and _is_small(payload):  # how long a user's function takes is not known
            return array_from_bytes(payload, self._contract)
        return await asyncio.get_running_loop().run_in_executor(self._threads, array_from_bytes, payload, self._contract)


def _is_small(payload: bytes) -> bool:
    if len(payload) > INLINE_BYTES:
        return False
    try:
        with Image.open(io.BytesIO(payload), formats=FORMATS) as image:
            return bool(image.width * image.height <= INLINE_PIXELS)
    except Exception:
        return True  # the header alone refuses it
