"""Generates PNGs and image contracts of every kind, to compare other implementations with."""

import itertools
import random
import struct
import zlib

from slipway.inputs.images import ImageContract

MODES = ("stretch", "crop", "pad")
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
KINDS = (
    *((0, depth) for depth in (1, 2, 4, 8, 16)),
    *((3, depth) for depth in (1, 2, 4, 8)),
    *((kind, depth) for kind in (2, 4, 6) for depth in (8, 16)),
)  # colour type and bit depth


def contract_of(mode: str, interpolation: str, channels: int, size_px: int = 12) -> ImageContract:
    return ImageContract.model_validate(
        {
            "kind": "images",
            "transform": None,
            "size_px": size_px,
            "channels": channels,
            "resize_mode": mode,
            "interpolation": interpolation,
            "max_pixels": 10_000,
        }
    )


def chunk(kind: bytes, content: bytes) -> bytes:
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def raw_png(
    colour_type: int,
    depth: int,
    size: tuple[int, int],
    chance: random.Random,
    is_interlaced: bool = False,
    extra: bytes = b"",
) -> bytes:
    """Return a PNG of random samples and filters, of any kind, also those Pillow cannot write."""
    width, height = size
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour_type]
    passes = [(0, 0, 1, 1)]
    if is_interlaced:
        passes = [
            *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
            *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
        ]
    lines = b""
    for left, top, dx, dy in passes:
        columns, rows = len(range(left, width, dx)), len(range(top, height, dy))
        for _ in range(rows if columns else 0):
            lines += bytes([chance.randrange(5)]) + chance.randbytes((columns * bits + 7) // 8)
    palette = chunk(b"PLTE", chance.randbytes(3 << depth)) if colour_type == 3 else b""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, is_interlaced)
    return b"".join(
        [
            *(b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), palette, extra),
            *(chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")),
        ]
    )


def every_kind(chance: random.Random) -> list[tuple[ImageContract, bytes]]:
    """Return cases of every colour type and depth, interlaced or not, of random sizes."""
    cases = []
    for (colour_type, depth), is_interlaced, channels in itertools.product(
        KINDS, (False, True), (1, 3)
    ):
        size = (chance.randrange(1, 40), chance.randrange(1, 40))
        mode, interpolation = chance.choice(MODES), chance.choice(FILTERS)
        png = raw_png(colour_type, depth, size, chance, is_interlaced)
        cases.append((contract_of(mode, interpolation, channels), png))
    return cases
