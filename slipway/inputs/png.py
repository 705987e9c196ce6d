"""Fast path for plain PNGs: libspng decodes into an array, 2 to 10 times as fast as Pillow.

Plain means 8-bit grey or RGB, not interlaced, without transparency, palette, orientation or
anything else that Pillow would apply. For all other files, the result is None: use Pillow. Both
decoders give equal pixels for plain files. Format: W3C, "Portable Network Graphics (PNG)
Specification (Third Edition)", 2025.
"""

import functools
import zlib
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
from imagecodecs import SpngError, spng_decode
from numpy.typing import NDArray

from slipway.system.errors import ImageError

_FILE_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIGNATURE = _FILE_SIGNATURE + b"\0\0\0\rIHDR"  # followed by length and type of the first chunk
_HEAD = Struct(">16sII5sI")  # signature, width, height, key of _MODES, checksum
_SIZE = Struct(">16sII")  # the first three of these
_CHECKED = slice(12, _HEAD.size - 4)  # bytes covered by the checksum
_CHUNK = Struct(">I4s")  # length and type of a chunk; content and checksum follow
# Bit depth, colour type, compression, filter, interlacing -> Pillow's mode.
_MODES = {b"\x08\0\0\0\0": "L", b"\x08\x02\0\0\0": "RGB"}
_HARMLESS = {b"gAMA": 4, b"pHYs": 9, b"sRGB": 1}  # lengths of chunks that change no pixel
MAX_TEXT_BYTES = 4 << 20  # decompressed, of all chunks of _TEXT in a file
_TEXT = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_MAX_RATIO = 1032  # largest ratio of a zlib stream
MAX_CHUNKS = 10_000  # most chunks besides those of pixels: each one takes a microsecond
_PIXELS, _SMALL_BYTES = b"IDAT", 64
_END = b"\0\0\0\0IEND\xaeB`\x82"  # the last chunk
_FRAME_BYTES = _HEAD.size + _CHUNK.size + 4 + len(_END)  # all but the pixels, if in one chunk


class PngHeader(NamedTuple):
    """Colour mode and size of a plain PNG, read before any pixel is decoded."""

    mode: str  # Pillow's: "L" or "RGB"
    width: int
    height: int


def read_png_header(payload: bytes) -> PngHeader | None:
    """Read the header of a PNG; None if Pillow must decode the file.

    That is so for files that are not PNGs, and for interlaced, damaged or unusually coloured PNGs.
    """
    return _read_head(bytes(payload[: _HEAD.size]))


@functools.lru_cache(256)  # images of one size have the same header
def _read_head(head: bytes) -> PngHeader | None:
    if len(head) < _HEAD.size:
        return None
    signature, width, height, kind, checksum = _HEAD.unpack(head)
    if signature != _SIGNATURE or zlib.crc32(head[_CHECKED]) != checksum:
        return None
    mode = _MODES.get(kind)
    return PngHeader(mode, width, height) if mode and width and height else None


def png_size(payload: bytes) -> tuple[int, int] | None:
    """Read (width, height) from the header of a PNG, complete or not; None for anything else."""
    if len(payload) < _SIZE.size:
        return None
    signature, width, height = _SIZE.unpack_from(payload)
    return (width, height) if signature == _SIGNATURE else None


def decode_plain_png(payload: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    """Decode to (H, W) grey or (H, W, 3) RGB pixels; None if Pillow must decode or name the fault.

    Raises ImageError as `_chunks` does.
    """
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


def has_too_much_text(payload: bytes) -> bool:
    """Return True for a PNG with more than MAX_TEXT_BYTES of decompressed text and profiles.

    Pillow limits each compressed chunk to 1 MiB, but does not count all of them. Raises ImageError
    as `_chunks` does.
    """
    num_bytes = 0
    start = len(_FILE_SIGNATURE)
    for kind, begin, end in _chunks(payload, start) if payload.startswith(_FILE_SIGNATURE) else ():
        if kind in _TEXT:
            num_bytes += _text_bytes(kind, payload[begin:end], MAX_TEXT_BYTES + 1 - num_bytes)
        if num_bytes > MAX_TEXT_BYTES:
            return True
    return False


def _text_bytes(kind: bytes, content: bytes, most: int) -> int:
    """Return the decompressed size in bytes of a text or profile chunk, counted up to `most`."""
    _, _, rest = content.partition(b"\0")  # the rest after the keyword
    stream = rest[1:]
    if kind == b"iTXt":
        stream = rest[2:].partition(b"\0")[2].partition(b"\0")[2]  # two texts precede it
    if kind == b"tEXt" or (kind == b"iTXt" and rest[:1] == b"\0"):
        return len(content)
    try:
        return len(content) + len(zlib.decompressobj().decompress(stream, most))
    except zlib.error:  # the damage is at an unknown place
        return len(content) + min(_MAX_RATIO * len(stream), most)


def _chunks(payload: bytes, at: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, begin and end of the content of each complete chunk, from the one at `at`.

    Raises ImageError after MAX_CHUNKS that hold few or no pixels.
    """
    num_small = 0
    while at + _CHUNK.size <= len(payload):
        length, kind = _CHUNK.unpack_from(payload, at)
        begin, end = at + _CHUNK.size, at + _CHUNK.size + length
        at = end + 4  # the checksum
        if at > len(payload):
            return
        num_small += kind != _PIXELS or length < _SMALL_BYTES
        if num_small > MAX_CHUNKS:
            detail = f"it has more than {MAX_CHUNKS} chunks with few or no pixels; save it again"
            raise ImageError("undecodable", detail)
        yield kind, begin, end


def _has_plain_chunks(payload: bytes) -> bool:
    """Return True if the file is complete and no chunk could change how Pillow decodes it."""
    num_pixel_bytes = len(payload) - _FRAME_BYTES
    if (
        num_pixel_bytes > 0
        and _CHUNK.unpack_from(payload, _HEAD.size) == (num_pixel_bytes, _PIXELS)
        and payload[-len(_END) :] == _END
    ):
        return True  # most small files: the walk through the chunks would take ten times as long
    for kind, begin, end in _chunks(payload, _HEAD.size):
        if kind == b"IEND":
            return True
        if kind != _PIXELS and (
            end - begin != _HARMLESS.get(kind)
            or zlib.crc32(payload[begin - 4 : end]).to_bytes(4) != payload[end : end + 4]
        ):
            return False
    return False
