"""PNGs of the plainest kind, by Pillow's own decoder of pixels without its reader of files, which takes longer than a small image's pixels.

Grey or RGB of 8 bits, not interlaced, with nothing in the file that Pillow would heed: no transparency, palette or orientation. For
everything else, and for every doubt, the answer is None, and Pillow is to be asked. Where both read a file their pixels are equal.
The format is W3C's "Portable Network Graphics (PNG) Specification (Third Edition)", 2025.
"""

import zlib
from typing import NamedTuple

from PIL import Image

_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # the signature, and a first chunk of 13 bytes
_END_OF_HEAD = len(_HEAD) + 13
_FIRST_CHUNK = _END_OF_HEAD + 4  # behind the checksum
_TYPE = 12  # where the first chunk's type is: its checksum begins there
_MODES = {b"\x08\0\0\0\0": "L", b"\x08\x02\0\0\0": "RGB"}  # bits, kind of colour, compression, filter, interlacing
_WITHOUT_EFFECT = {b"gAMA": 4, b"pHYs": 9, b"sRGB": 1}  # bytes of chunks that neither change a pixel nor can be wrong


class PngHeader(NamedTuple):
    """What a plain PNG says before any pixel is decoded."""

    mode: str  # Pillow's: "L" or "RGB"
    width: int
    height: int


def read_png_header(payload: bytes) -> PngHeader | None:
    """None where Pillow is to be asked: no PNG, another kind of colours, interlaced, or damaged."""
    if not payload.startswith(_HEAD) or zlib.crc32(payload[_TYPE:_END_OF_HEAD]).to_bytes(4) != payload[_END_OF_HEAD:_FIRST_CHUNK]:
        return None
    begin = len(_HEAD)
    mode = _MODES.get(payload[begin + 8 : _END_OF_HEAD])
    width, height = int.from_bytes(payload[begin : begin + 4]), int.from_bytes(payload[begin + 4 : begin + 8])
    return PngHeader(mode, width, height) if mode and width and height else None


def png_size(payload: bytes) -> tuple[int, int] | None:
    """(width, height) as a PNG's header says, whole or not; None for anything else."""
    begin = len(_HEAD)
    if not payload.startswith(_HEAD):
        return None
    return int.from_bytes(payload[begin : begin + 4]), int.from_bytes(payload[begin + 4 : begin + 8])


def decode_plain_png(payload: bytes, max_pixels: int) -> Image.Image | None:
    """The image, of mode "L" or "RGB"; None: ask Pillow, which also names what is wrong."""
    header = read_png_header(payload)
    if header is None or header.width * header.height > max_pixels:
        return None
    compressed = _pixel_data(payload)
    if compressed is None:
        return None
    try:
        return Image.frombytes(header.mode, (header.width, header.height), compressed, "zip", header.mode, False)
    except ValueError:
        return None


def _pixel_data(payload: bytes) -> bytes | None:
    """The compressed pixels; None where there is any chunk that Pillow might heed, or the file breaks off."""
    pieces: list[bytes] = []
    position = _FIRST_CHUNK
    while True:
        length = int.from_bytes(payload[position : position + 4])
        kind = payload[position + 4 : position + 8]
        content = payload[position + 8 : position + 8 + length]
        position += 12 + length
        if position > len(payload):
            return None
        if kind == b"IDAT":
            pieces.append(content)
        elif kind == b"IEND":
            return pieces[0] if len(pieces) == 1 else b"".join(pieces) or None
        elif length != _WITHOUT_EFFECT.get(kind) or not _is_whole(kind, content, payload[position - 4 : position]):
            return None


def _is_whole(kind: bytes, content: bytes, checksum: bytes) -> bool:
    return zlib.crc32(kind + content).to_bytes(4) == checksum
