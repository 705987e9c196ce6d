"""PNGs of the plainest kind, by libspng straight into an array: about twice as fast as Pillow, and for small images ten times.

Grey or RGB of 8 bits, not interlaced, with nothing in the file that Pillow would heed: no transparency, palette or orientation. For
everything else, and for every doubt, the answer is None, and Pillow is to be asked. Where both read a file their pixels are equal.
The format is W3C's "Portable Network Graphics (PNG) Specification (Third Edition)", 2025.
"""

import functools
import zlib
from struct import Struct
from typing import NamedTuple

import numpy as np
from imagecodecs import SpngError, spng_decode
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # with the length and the type of the first chunk
_HEAD = Struct(">16sII5sI")  # the signature, width, height, what _MODES has, and the checksum
_SIZE = Struct(">16sII")  # the first of these
_CHECKED = slice(12, _HEAD.size - 4)  # what that checksum is of
_CHUNK = Struct(">I4s")  # the length and the type of a chunk; its content and its checksum follow
_END = b"\0\0\0\0IEND" + zlib.crc32(b"IEND").to_bytes(4)  # the last chunk
_FIRST_LENGTH, _FIRST_KIND = (
    slice(_HEAD.size, _HEAD.size + 4),
    slice(_HEAD.size + 4, _HEAD.size + 8),
)  # of the chunk behind the head
_ALL_BUT_PIXELS = (
    _HEAD.size + 12 + len(_END)
)  # bytes of a file whose only other chunk has the pixels
_MODES = {
    b"\x08\0\0\0\0": "L",
    b"\x08\x02\0\0\0": "RGB",
}  # bits, kind of colour, compression, filter, interlacing
_WITHOUT_EFFECT = {
    b"gAMA": 4,
    b"pHYs": 9,
    b"sRGB": 1,
}  # bytes of chunks that neither change a pixel nor can be wrong


class PngHeader(NamedTuple):
    """What a plain PNG says before any pixel is decoded."""

    mode: str  # Pillow's: "L" or "RGB"
    width: int
    height: int


def read_png_header(payload: bytes) -> PngHeader | None:
    """None where Pillow is to be asked: no PNG, another kind of colours, interlaced, or damaged."""
    return _read_head(bytes(payload[: _HEAD.size]))


@functools.lru_cache(256)  # files of one size begin alike
def _read_head(head: bytes) -> PngHeader | None:
    if len(head) < _HEAD.size:
        return None
    signature, width, height, kind, checksum = _HEAD.unpack(head)
    if signature != _SIGNATURE or zlib.crc32(head[_CHECKED]) != checksum:
        return None
    mode = _MODES.get(kind)
    return PngHeader(mode, width, height) if mode and width and height else None


def png_size(payload: bytes) -> tuple[int, int] | None:
    """(width, height) as a PNG's header says, whole or not; None for anything else."""
    return _read_size(bytes(payload[: _SIZE.size]))


@functools.lru_cache(256)
def _read_size(head: bytes) -> tuple[int, int] | None:
    if len(head) < _SIZE.size:
        return None
    signature, width, height = _SIZE.unpack(head)
    return (width, height) if signature == _SIGNATURE else None


def decode_plain_png(payload: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    """(H, W) grey or (H, W, 3) RGB pixels; None: ask Pillow, which also names what is wrong."""
    header = read_png_header(payload)
    if header is None or header.width * header.height > max_pixels:
        return None
    if not _has_plain_chunks(payload):
        return None
    try:
        pixels: NDArray[np.uint8] = spng_decode(payload)
    except SpngError:
        return None
    return pixels


def _has_plain_chunks(payload: bytes) -> bool:
    """Whether there is no chunk that Pillow might heed, and the file does not break off."""
    begin, size = _HEAD.size, len(payload)
    # No other chunks, as small files mostly are.
    if (
        payload[_FIRST_KIND] == b"IDAT"
        and int.from_bytes(payload[_FIRST_LENGTH]) == size - _ALL_BUT_PIXELS
        and payload.endswith(_END)
    ):
        return True
    while begin + 8 <= size:
        length, kind = _CHUNK.unpack_from(payload, begin)
        end = begin + length + 12
        if end > size:
            return False
        if kind == b"IEND":
            return True
        if kind != b"IDAT" and (
            length != _WITHOUT_EFFECT.get(kind) or not _is_whole(payload[begin + 4 : end])
        ):
            return False
        begin = end
    return False


def _is_whole(chunk: bytes) -> bool:
    return zlib.crc32(chunk[:-4]).to_bytes(4) == chunk[-4:]
