"""Generates small image files in every layout of a format, and in many invalid ones.

The generator is deterministic: the same name has the same bytes in each run.
"""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 9, 7
_SHORT, _LONG = 3, 4  # types of TIFF values
_RAW, _DEFLATE, _PACK_BITS = 1, 8, 32773  # compressions of TIFF
_ALL_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "I;16", "F")
_TIFF_MODES = dict.fromkeys(
    ("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "zstd", "lzma"), _ALL_MODES
) | {
    "jpeg": ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"),
    "group4": ("1",),
}
_OTHER_MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
}
_NUM_MUTATIONS = 60  # of each valid file
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_ORDERS = (
    "plain",
    "split IDAT",
    "empty IDAT first",
    "no IDAT",
    "no IEND",
    "no IHDR",
    "IHDR twice",
    "PLTE behind IDAT",
    "no PLTE",
    "short PLTE",
    "PLTE of 4 bytes",
    "tRNS",
    "tRNS before PLTE",
    "tRNS behind IDAT",
    "empty tRNS",
    "long tRNS",
    "gAMA",
    "eXIf",
    "damaged eXIf",
    "damaged iCCP",
    "damaged zTXt",
    "chunk between IDATs",
    "unknown critical chunk",
    "wrong checksum of IDAT",
    "wrong checksum of gAMA",
    "wrong checksum of PLTE",
    "too few pixels",
    "too many pixels",
    "unknown filter",
    "damaged stream",
    "bytes behind IEND",
    "broken off",
    "APNG",
)


class ImageFile(NamedTuple):
    """A file, and the name of the layout in which it was built."""

    name: str
    payload: bytes


def tiff_files() -> Iterator[ImageFile]:
    """Yield TIFFs of each photometric, number of samples, depth and format, and with other tags."""
    samples: list[tuple[int, int | None]] = [(1, None), (2, None), (3, None), (4, None), (5, None)]
    samples += [(count, extra) for count in (2, 4, 5) for extra in (0, 1, 2)]
    layouts = product((0, 1, 2, 3, 4, 5, 6, 8, 9), samples, (1, 2, 4, 8, 12, 16, 32), (None, 2, 3))
    for position, (photometric, (count, extra), bits, sample_format) in enumerate(layouts):
        if sample_format is None and bits in (1, 8, 16):
            name = f"tiff photometric={photometric} samples={count} extra={extra} bits={bits}"
            yield ImageFile(name, tiff(photometric, count, extra, bits))
        others: dict[str, Any] = {
            "compression": (_RAW, _DEFLATE, _PACK_BITS)[position % 3],
            "is_big_endian": position % 5 == 0,
            "is_planar": position % 7 == 0,
            "fill_order": 2 if position % 11 == 0 else None,
            "predictor": 2 if position % 13 == 0 else None,
            "orientation": 6 if position % 17 == 0 else None,
        }
        name = (
            f"tiff photometric={photometric} samples={count} extra={extra} bits={bits} "
            f"format={sample_format} {others}"
        )
        yield ImageFile(name, tiff(photometric, count, extra, bits, sample_format, **others))


def tiff(
    photometric: int,
    samples: int,
    extra: int | None = None,
    bits: int = 8,
    sample_format: int | None = None,
    pixels: bytes | None = None,
    *,
    compression: int = _RAW,
    is_big_endian: bool = False,
    is_planar: bool = False,
    fill_order: int | None = None,
    predictor: int | None = None,
    orientation: int | None = None,
) -> bytes:
    """Return a TIFF of WIDTH x HEIGHT pixels in one strip, or in one strip for each plane."""
    order = ">" if is_big_endian else "<"
    planes = samples if is_planar else 1
    row_bytes = (WIDTH * bits * samples // planes + 7) // 8
    if pixels is None:
        pixels = _noise(row_bytes * HEIGHT * planes, photometric * 1000 + samples * 100 + bits)
    size = len(pixels) // planes
    strips = [
        _compressed(pixels[size * plane : size * (plane + 1)], compression)
        for plane in range(planes)
    ]
    starts = [8 + sum(map(len, strips[:plane])) for plane in range(planes)]
    tags: dict[int, tuple[int, list[int]]] = {
        256: (_LONG, [WIDTH]),
        257: (_LONG, [HEIGHT]),
        258: (_SHORT, [bits] * samples),
        259: (_SHORT, [compression]),
        262: (_SHORT, [photometric]),
        273: (_LONG, starts),
        277: (_SHORT, [samples]),
        278: (_LONG, [HEIGHT]),
        279: (_LONG, [len(strip) for strip in strips]),
        284: (_SHORT, [2 if is_planar else 1]),
    }
    optional = {266: fill_order, 274: orientation, 317: predictor}
    tags |= {tag: (_SHORT, [value]) for tag, value in optional.items() if value is not None}
    if photometric == 3:  # a colour for each value
        tags[320] = (
            _SHORT,
            [(position * 257) & 0xFFFF for position in range(3 * 2 ** min(bits, 8))],
        )
    if extra is not None:
        tags[338] = (
            _SHORT,
            [extra] * max(1, samples - {2: 3, 5: 4, 6: 3, 8: 3, 9: 3}.get(photometric, 1)),
        )
    if sample_format is not None:
        tags[339] = (_SHORT, [sample_format] * samples)
    content = b"".join(strips)
    content += b"\0" * (len(content) % 2)
    magic = b"MM" if is_big_endian else b"II"
    return (
        magic
        + struct.pack(f"{order}HI", 42, 8 + len(content))
        + content
        + _directory(tags, order, 8 + len(content))
    )


def _directory(tags: dict[int, tuple[int, list[int]]], order: str, start: int) -> bytes:
    entries, behind = b"", b""
    values_start = start + 2 + 12 * len(tags) + 4
    for tag, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}{'H' if kind == _SHORT else 'I'}", *values)
        if len(packed) <= 4:
            value = packed.ljust(4, b"\0")
        else:
            value = struct.pack(f"{order}I", values_start + len(behind))
            behind += packed
        entries += struct.pack(f"{order}HHI", tag, kind, len(values)) + value
    return struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + behind


def _compressed(strip: bytes, compression: int) -> bytes:
    if compression == _DEFLATE:
        return zlib.compress(strip)
    if compression == _PACK_BITS:
        parts = [strip[start : start + 128] for start in range(0, len(strip), 128)]
        return b"".join(bytes([len(part) - 1]) + part for part in parts)
    return strip


def png_files() -> Iterator[ImageFile]:
    """Yield PNGs of each colour type, depth, interlacing and order of chunks.

    All but 15 pairs are valid.
    """
    for colour, depth, interlace, order in product(
        (0, 2, 3, 4, 6, 1), (1, 2, 4, 8, 16), (0, 1), _PNG_ORDERS
    ):
        yield ImageFile(
            f"png colour={colour} depth={depth} interlace={interlace}: {order}",
            png(colour, depth, interlace, order),
        )


def png(colour: int, depth: int, interlace: int = 0, order: str = "plain") -> bytes:
    """Return a PNG of WIDTH x HEIGHT pixels, with its chunks in an `order` of _PNG_ORDERS."""
    ihdr = _chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, interlace))
    palette_size = 2 if order == "short PLTE" else 2 ** min(depth, 8)
    plte = _chunk(
        b"PLTE", b"\1\2\3\4" if order == "PLTE of 4 bytes" else _noise(3 * palette_size, 5)
    )
    transparency = {"empty tRNS": b"", "long tRNS": bytes(300)}.get(
        order, b"\0\1" * (3 if colour == 2 else 1)
    )
    trns = _chunk(b"tRNS", transparency)
    stream = zlib.compress(_png_rows(colour, depth, interlace, order))
    if order == "damaged stream":
        stream = stream[: len(stream) // 2] + b"\xff" * (len(stream) - len(stream) // 2)
    idat, iend, gama = (
        _chunk(b"IDAT", stream),
        _chunk(b"IEND", b""),
        _chunk(b"gAMA", struct.pack(">I", 45455)),
    )
    plain = _PngChunks([plte] if colour == 3 else [], [idat], [iend])
    halves = _chunk(b"IDAT", stream[:5]), _chunk(b"IDAT", stream[5:])
    before, middle, behind = {
        "split IDAT": plain._replace(middle=[*halves]),
        "empty IDAT first": plain._replace(middle=[_chunk(b"IDAT", b""), idat]),
        "no IDAT": plain._replace(middle=[]),
        "no IEND": plain._replace(behind=[]),
        "IHDR twice": plain._replace(before=[ihdr, *plain.before]),
        "PLTE behind IDAT": plain._replace(before=[], behind=[plte, iend]),
        "no PLTE": plain._replace(before=[]),
        "tRNS before PLTE": plain._replace(before=[trns, plte]),
        "tRNS behind IDAT": plain._replace(behind=[trns, iend]),
        "chunk between IDATs": plain._replace(middle=[halves[0], gama, halves[1]]),
        "wrong checksum of IDAT": plain._replace(middle=[_wrong_checksum(idat)]),
        "wrong checksum of PLTE": plain._replace(before=[_wrong_checksum(plte)]),
        **{
            name: plain._replace(before=[*plain.before, *more])
            for name, more in _png_chunks_after_palette(trns).items()
        },
        **{
            name: plain._replace(before=[chunk, *plain.before])
            for name, chunk in {
                "gAMA": gama,
                "damaged iCCP": _chunk(b"iCCP", b"name\0\0no stream"),
                "damaged zTXt": _chunk(b"zTXt", b"name\0\0no stream"),
                "wrong checksum of gAMA": _wrong_checksum(gama),
            }.items()
        },
    }.get(order, plain)
    chunks = [*([] if order == "no IHDR" else [ihdr]), *before, *middle, *behind]
    whole = (
        b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + (b"more" if order == "bytes behind IEND" else b"")
    )
    return whole[:-20] if order == "broken off" else whole


class _PngChunks(NamedTuple):
    """The chunks of a PNG before its pixels, with the pixels, and behind them."""

    before: list[bytes]
    middle: list[bytes]
    behind: list[bytes]


def _png_chunks_after_palette(trns: bytes) -> dict[str, list[bytes]]:
    """Return the chunks that some orders add between the palette and the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frame = struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 10, 0, 0)
    return {
        **{name: [trns] for name in ("tRNS", "empty tRNS", "long tRNS")},
        "eXIf": [_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))],
        "damaged eXIf": [_chunk(b"eXIf", b"MM\0\x2a\0\0\0\x08\xff\xff\1\x12")],
        "unknown critical chunk": [_chunk(b"ABCD", b"12")],
        "APNG": [_chunk(b"acTL", struct.pack(">II", 1, 0)), _chunk(b"fcTL", frame)],
    }


def _wrong_checksum(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


def _png_rows(colour: int, depth: int, interlace: int, order: str) -> bytes:
    bits = depth * _PNG_SAMPLES.get(colour, 1)
    passes = (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    )
    rows = b""
    for left, top, across, down in passes if interlace else ((0, 0, 1, 1),):
        width, height = -(-(WIDTH - left) // across), -(-(HEIGHT - top) // down)
        row_bytes = (width * bits + 7) // 8
        for row in range(height):
            kind = 9 if order == "unknown filter" and row == 1 else row % 5
            rows += bytes([kind]) + _noise(row_bytes, 31 * row + colour)
    if order == "too few pixels":
        return rows[: len(rows) // 2]
    return rows + b"12345" if order == "too many pixels" else rows


def _chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def bmp_files() -> Iterator[ImageFile]:
    """Yield BMPs of each header size, depth, compression and direction of rows."""
    for header, bits, compression, is_top_down in product(
        (12, 40, 52, 56, 64, 108, 124), (1, 2, 4, 8, 16, 24, 32), (0, 1, 2, 3, 4, 6), (False, True)
    ):
        name = f"bmp header={header} bits={bits} compression={compression} top down={is_top_down}"
        yield ImageFile(name, bmp(header, bits, compression, is_top_down))


def bmp(header: int, bits: int, compression: int, is_top_down: bool) -> bytes:
    """Return a BMP of WIDTH x HEIGHT pixels, without a palette above 8 bits."""
    height = -HEIGHT if is_top_down else HEIGHT
    if header == 12:
        content = struct.pack("<IHHHH", 12, WIDTH, HEIGHT, 1, bits)
        palette = _noise(3 * 2**bits, 3) if bits <= 8 else b""
    else:
        fields = (header, WIDTH, height, 1, bits, compression, 0, 2835, 2835, 0, 0)
        masks = (0xF800, 0x07E0, 0x001F, 0) if bits == 16 else (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
        content = struct.pack("<IiiHHIIiiII", *fields)
        num_masks = 4 if header >= 56 or compression == 6 else 3
        if header > 40 or compression in (3, 6):
            content += struct.pack(f"<{num_masks}I", *masks[:num_masks])
        content = content.ljust(header, b"\0")
        palette = _noise(4 * 2**bits, 3) if bits <= 8 else b""
    row_bytes = (WIDTH * bits + 31) // 32 * 4
    pixels = _noise(row_bytes * HEIGHT, bits)
    if compression == 1:
        pixels = b"".join(bytes([WIDTH, row, 0, 0]) for row in range(HEIGHT)) + b"\0\1"
    elif compression == 2:
        pixels = b"".join(bytes([WIDTH, row * 17, 0, 0]) for row in range(HEIGHT)) + b"\0\1"
    start = 14 + len(content) + len(palette)
    return (
        b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + content + palette + pixels
    )


def encoded_files() -> Iterator[ImageFile]:
    """Yield files that Pillow writes: JPEG, WebP, GIF, and each mode of TIFF, PNG and BMP."""
    noise = np.random.default_rng(3).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
    rgba = Image.fromarray(noise)
    rgb = rgba.convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    yield from _jpegs(rgb, exif)
    images: dict[str, Image.Image] = {
        "L": rgba.convert("L"),
        "LA": rgba.convert("LA"),
        "P": rgb.quantize(16),
        "RGB": rgb,
        "RGBA": rgba,
    }
    yield from _webps(images, exif)
    for mode, interlace, transparency in product(("L", "P"), (0, 1), (None, 0, 3)):
        transparent = {} if transparency is None else {"transparency": transparency}
        options: dict[str, Any] = {"interlace": interlace, **transparent}
        yield ImageFile(f"gif {mode} {options}", _encoded(images[mode], "GIF", **options))
    for mode in _ALL_MODES:
        yield from _files_of_mode(mode, _in_mode(rgb, mode))
    for size in ((9000, 1), (1, 9000), (300, 1), (1, 1), (2, 2)):
        for mode in ("L", "RGB", "RGBA"):
            for image_format in ("PNG", "TIFF", "WEBP"):
                payload = _encoded(rgba.resize(size).convert(mode), image_format)
                yield ImageFile(f"{image_format.lower()} {mode} of {size}", payload)


def _jpegs(rgb: Image.Image, exif: Image.Exif) -> Iterator[ImageFile]:
    for mode, quality, progressive, subsampling, restart in product(
        ("L", "RGB", "CMYK"), (20, 95), (False, True), (0, 1, 2), (0, 1)
    ):
        options: dict[str, Any] = {
            "quality": quality,
            "progressive": progressive,
            "subsampling": subsampling,
            "restart_marker_rows": restart,
        }
        jpeg = _encoded(rgb.convert(mode), "JPEG", **options)
        yield ImageFile(f"jpeg {mode} {options}", jpeg)
        for transform in (0, 1, 2, 7) if restart == 0 else ():
            yield ImageFile(
                f"jpeg {mode} {options} adobe={transform}", _with_adobe(jpeg, transform)
            )
    yield ImageFile(
        "jpeg of a YCbCr image on its side", _encoded(rgb.convert("YCbCr"), "JPEG", exif=exif)
    )
    yield ImageFile(
        "jpeg with a second picture", _encoded(rgb, "MPO", save_all=True, append_images=[rgb])
    )


def _webps(images: dict[str, Image.Image], exif: Image.Exif) -> Iterator[ImageFile]:
    for (mode, image), lossless, with_exif in product(images.items(), (False, True), (False, True)):
        options: dict[str, Any] = {"lossless": lossless} | ({"exif": exif} if with_exif else {})
        yield ImageFile(
            f"webp {mode} lossless={lossless} exif={with_exif}", _encoded(image, "WEBP", **options)
        )
    first = images["RGBA"]
    yield ImageFile(
        "webp animated", _encoded(first, "WEBP", save_all=True, append_images=[first.rotate(180)])
    )


def _files_of_mode(mode: str, image: Image.Image) -> Iterator[ImageFile]:
    for compression in _TIFF_MODES:
        if mode in _TIFF_MODES[compression]:
            yield ImageFile(
                f"tiff {mode} {compression}", _encoded(image, "TIFF", compression=compression)
            )
    for image_format, modes in _OTHER_MODES.items():
        if mode in modes:
            yield ImageFile(f"{image_format.lower()} {mode}", _encoded(image, image_format))


def _in_mode(rgb: Image.Image, mode: str) -> Image.Image:
    if mode == "LAB":
        return Image.frombytes("LAB", rgb.size, rgb.tobytes())
    if mode.startswith("I"):
        image = Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257)
        return image.convert("I") if mode == "I" else image
    return rgb.convert(mode)


def _with_adobe(jpeg: bytes, transform: int) -> bytes:
    """Return a JPEG whose Adobe marker states `transform`."""
    found = jpeg.find(b"\xff\xee\x00\x0eAdobe")
    if found >= 0:
        jpeg = jpeg[:found] + jpeg[found + 16 :]
    return (
        jpeg[:2] + b"\xff\xee\x00\x0eAdobe" + struct.pack(">HHHB", 100, 0, 0, transform) + jpeg[2:]
    )


def mutated_files() -> Iterator[ImageFile]:
    """Yield valid files with flipped bits, changed, missing or repeated bytes, or a tail."""
    for name, payload in _valid_files():
        yield ImageFile(f"{name} whole", payload)
        generator = random.Random(name)
        for number in range(_NUM_MUTATIONS):
            kind = generator.choice(_MUTATIONS)
            yield ImageFile(f"{name} mutated {number} {kind.__name__}", kind(payload, generator))


def _valid_files() -> Iterator[ImageFile]:
    for colour, depth in (
        (0, 1),
        (0, 8),
        (0, 16),
        (2, 8),
        (2, 16),
        (3, 2),
        (3, 8),
        (4, 8),
        (6, 8),
        (6, 16),
    ):
        yield ImageFile(
            f"png {colour} {depth}",
            png(colour, depth, order="tRNS" if colour in (2, 3) else "plain"),
        )
    yield ImageFile("png interlaced", png(2, 8, 1))
    for photometric, samples, extra, bits in (
        (1, 1, None, 8),
        (1, 1, None, 16),
        (1, 2, 1, 8),
        (2, 3, None, 8),
        (2, 4, 2, 8),
        (3, 1, None, 8),
        (5, 4, None, 8),
        (8, 3, None, 8),
    ):
        yield ImageFile(
            f"tiff {photometric} {samples} {bits}", tiff(photometric, samples, extra, bits)
        )
    yield ImageFile("tiff deflate", tiff(2, 3, compression=_DEFLATE, is_planar=True))
    for header, bits, compression in (
        (40, 1, 0),
        (40, 8, 0),
        (40, 8, 1),
        (40, 24, 0),
        (124, 32, 3),
        (12, 24, 0),
    ):
        yield ImageFile(f"bmp {header} {bits} {compression}", bmp(header, bits, compression, False))
    wanted = (
        "jpeg L",
        "jpeg RGB",
        "jpeg CMYK",
        "webp RGBA",
        "webp RGB",
        "webp animated",
        "jpeg with",
        "jpeg of",
    )
    first: dict[str, ImageFile] = {}
    for file in encoded_files():
        start = next((start for start in wanted if file.name.startswith(start)), None)
        if start and start not in first:
            first[start] = file
    yield from first.values()


def _flip(payload: bytes, generator: random.Random) -> bytes:
    changed = bytearray(payload)
    for _ in range(generator.choice((1, 1, 2, 8))):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _flip_in_head(payload: bytes, generator: random.Random) -> bytes:
    changed = bytearray(payload)
    changed[generator.randrange(min(len(changed), 80))] = generator.choice(
        (0, 1, 127, 255, generator.randrange(256))
    )
    return bytes(changed)


def _flip_in_tail(payload: bytes, generator: random.Random) -> bytes:
    """Flip a byte near the end of a file, where a TIFF has its tags."""
    changed = bytearray(payload)
    changed[-1 - generator.randrange(min(len(changed), 130))] = generator.choice(
        (0, 1, 2, 127, 255, generator.randrange(256))
    )
    return bytes(changed)


def _truncate(payload: bytes, generator: random.Random) -> bytes:
    return payload[: generator.randrange(len(payload))]


def _cut_out(payload: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(payload))
    return payload[:start] + payload[start + generator.randrange(1, 20) :]


def _double(payload: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(payload))
    end = start + generator.randrange(1, 40)
    return payload[:end] + payload[start:]


def _zero(payload: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(payload))
    size = min(generator.randrange(1, 40), len(payload) - start)
    return payload[:start] + bytes(size) + payload[start + size :]


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _flip_in_head,
    _flip_in_tail,
    _truncate,
    _cut_out,
    _double,
    _zero,
)


def _encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _noise(num_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


FAMILIES: dict[str, Callable[[], Iterator[ImageFile]]] = {
    "tiff": tiff_files,
    "png": png_files,
    "bmp": bmp_files,
    "encoded": encoded_files,
    "mutated": mutated_files,
}
