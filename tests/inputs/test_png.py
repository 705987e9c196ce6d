import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from slipway.inputs.images import decode_image, decode_with_pillow
from slipway.inputs.png import MAX_CHUNKS, MAX_TEXT_BYTES, decode_plain_png, read_png_header
from slipway.system.errors import ImageError

MAX_PIXELS = 10**6


def encoded(
    pixels: NDArray[np.uint8] | NDArray[np.uint16], mode: str | None = None, **options: object
) -> bytes:
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    (image.convert(mode) if mode else image).save(stream, "PNG", **options)
    return stream.getvalue()


def random_pixels(seed: int, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Return pixels that are smooth on one half, so that the encoder uses every filter."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8)
    pixels[: size[0] // 2] = np.arange(size[1], dtype=np.uint8)[np.newaxis, :, np.newaxis]
    return pixels[:, :, 0] if channels == 1 else pixels


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def with_chunk(payload: bytes, kind: bytes, content: bytes) -> bytes:
    """Return the file with one more chunk before its pixels."""
    begin = payload.index(b"IDAT") - 4
    return payload[:begin] + chunk(kind, content) + payload[begin:]


def pillows(payload: bytes) -> NDArray[np.uint8] | str:
    """Return the pixels that Pillow decodes, or the rule that refuses the file."""
    try:
        return np.asarray(decode_with_pillow(payload, MAX_PIXELS).image)
    except ImageError as error:
        return error.rule


@settings(deadline=None)
@given(
    st.integers(0, 99),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 3]),
    st.integers(0, 9),
)
def test_plain_png_decodes_to_pixels_equal_to_those_of_pillow(
    seed: int, height: int, width: int, channels: int, level: int
) -> None:
    pixels = random_pixels(seed, (height, width), channels)
    payload = encoded(pixels, compress_level=level)
    decoded = decode_plain_png(payload, MAX_PIXELS)
    assert decoded is not None
    assert np.array_equal(decoded, pixels)
    assert np.array_equal(decoded, pillows(payload))


@pytest.mark.parametrize("num_bytes", [0, 1, 11, 12, 23, 24, 25])
def test_png_without_pixels_is_left_to_pillow(num_bytes: int) -> None:
    head = encoded(np.zeros((2, 2), np.uint8))[:33]
    end = b"\0\0\0\1IDAT\0\0\0\0\0" + b"\0\0\0\0IEND\xaeB`\x82"
    assert decode_plain_png(head + end[len(end) - num_bytes :], MAX_PIXELS) is None


def test_png_pixels_in_several_chunks_are_decoded() -> None:
    pixels = np.random.default_rng(1).integers(
        0, 256, (300, 300, 3), dtype=np.uint8
    )  # the encoder writes 64 KiB at once
    payload = encoded(pixels)
    assert payload.count(b"IDAT") > 1
    decoded = decode_plain_png(payload, MAX_PIXELS)
    assert decoded is not None
    assert np.array_equal(decoded, pixels)


@pytest.mark.parametrize(
    ("kind", "content"), [(b"gAMA", bytes(4)), (b"pHYs", bytes(9)), (b"sRGB", bytes(1))]
)
def test_png_chunk_without_effect_on_the_pixels_is_ignored(kind: bytes, content: bytes) -> None:
    plain = encoded(random_pixels(1, (9, 9), 3))
    decoded = decode_plain_png(with_chunk(plain, kind, content), MAX_PIXELS)
    assert decoded is not None
    assert np.array_equal(decoded, pillows(plain))
    damaged = with_chunk(plain, kind, content).replace(
        chunk(kind, content), chunk(kind, content)[:-1] + b"\xff"
    )
    assert decode_plain_png(damaged, MAX_PIXELS) is None
    assert decode_plain_png(with_chunk(plain, kind, content + b"\0"), MAX_PIXELS) is None


def turned() -> PngImagePlugin.PngInfo:
    """Return XMP metadata of a rotated image, as a camera's software writes it."""
    information = PngImagePlugin.PngInfo()
    information.add_itxt(
        "XML:com.adobe.xmp", '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    )
    return information


OTHERS: dict[str, Callable[[], bytes]] = {
    "transparent": lambda: encoded(random_pixels(1, (9, 9), 3), "RGBA"),
    "with one transparent colour": lambda: encoded(
        random_pixels(1, (9, 9), 3), transparency=(1, 2, 3)
    ),
    "of a palette": lambda: encoded(random_pixels(1, (9, 9), 3), "P"),
    "of one bit": lambda: encoded(random_pixels(1, (9, 9), 1), "1"),
    "of 16 bits": lambda: encoded(np.arange(81, dtype=np.uint16).reshape(9, 9)),
    "grey and transparent": lambda: encoded(random_pixels(1, (9, 9), 1), "LA"),
    "turned by EXIF": lambda: encoded(
        random_pixels(1, (9, 7), 3),
        exif=b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
    ),
    "turned by XMP": lambda: encoded(random_pixels(1, (9, 7), 3), pnginfo=turned()),
    "with text": lambda: with_chunk(encoded(random_pixels(1, (9, 9), 3)), b"tEXt", b"Title\0x"),
    "with a chunk that nobody knows": lambda: with_chunk(
        encoded(random_pixels(1, (9, 9), 3)), b"xxXx", b""
    ),
    "a JPEG": lambda: b"\xff\xd8\xff\xe0" + bytes(100),
    "nothing": lambda: b"",
    "of no width": lambda: encoded(random_pixels(1, (9, 9), 3)).replace(
        b"IHDR\0\0\0\x09", b"IHDR\0\0\0\0"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_png_that_is_not_plain_is_left_to_pillow(name: str) -> None:
    assert decode_plain_png(OTHERS[name](), MAX_PIXELS) is None


def test_the_size_is_checked_before_any_pixel_is_decoded() -> None:
    payload = encoded(random_pixels(1, (10, 10), 3))
    assert decode_plain_png(payload, 100) is not None
    assert decode_plain_png(payload, 99) is None
    assert read_png_header(payload) == ("RGB", 10, 10)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_truncated_png_is_left_to_pillow(channels: int) -> None:
    payload = encoded(random_pixels(2, (6, 6), channels))
    assert all(decode_plain_png(payload[:size], MAX_PIXELS) is None for size in range(len(payload)))


@pytest.mark.parametrize("channels", [1, 3])
def test_png_with_a_flipped_byte_decodes_alike_or_is_left_to_pillow(channels: int) -> None:
    payload = encoded(random_pixels(3, (12, 12), channels))
    num_read = 0
    for position in range(len(payload)):
        for flipped in (1, 0x40, 0xFF):
            damaged = (
                payload[:position] + bytes([payload[position] ^ flipped]) + payload[position + 1 :]
            )
            decoded = decode_plain_png(damaged, MAX_PIXELS)
            if decoded is not None:
                num_read += 1
                assert np.array_equal(decoded, pillows(damaged))
    assert num_read  # the twin: some are read


MIB = bytes(1 << 20)
MANY = MAX_TEXT_BYTES // len(MIB)
TEXTS = {
    b"tEXt": b"k\0" + MIB,
    b"zTXt": b"k\0\0" + zlib.compress(MIB, 9),
    b"iTXt": b"k\0\1\0\0\0" + zlib.compress(MIB, 9),
    b"iCCP": b"k\0\0" + zlib.compress(MIB, 9),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("is_first", [True, False])
def test_texts_of_a_png_that_are_large_only_together_are_refused(
    kind: bytes, is_first: bool
) -> None:
    """A single one of them is not; Pillow accepts 64 MiB, and does not count profiles."""
    plain = encoded(random_pixels(1, (9, 9), 3))

    def with_texts(number: int) -> bytes:
        text = chunk(kind, TEXTS[kind]) * number
        at = plain.index(b"IDAT") - 4 if is_first else plain.index(b"IEND") - 4
        return plain[:at] + text + plain[at:]

    assert not isinstance(pillows(with_texts(MANY - 1)), str)
    with pytest.raises(ImageError, match="its text and colour profiles exceed") as error:
        decode_with_pillow(with_texts(MANY + 1), MAX_PIXELS)
    assert error.value.rule == "undecodable"


def test_texts_of_a_png_that_do_not_decompress_count_as_well() -> None:
    """Pillow decompresses up to the damage, and ignores the text."""
    damaged = b"k\0\1\0\0\0" + zlib.compress(MIB, 9)[:-2] + b"xx"
    plain = encoded(random_pixels(1, (9, 9), 3))
    at = plain.index(b"IDAT") - 4
    payload = plain[:at] + chunk(b"iTXt", damaged) * (MANY + 1) + plain[at:]
    assert pillows(payload) == "undecodable"


@pytest.mark.parametrize(("kind", "content"), [(b"tEXt", b""), (b"gAMA", bytes(4)), (b"IDAT", b"")])
def test_a_png_of_very_many_chunks_is_refused(kind: bytes, content: bytes) -> None:
    """A million empty ones took a second."""
    plain = encoded(random_pixels(1, (9, 9), 3))
    at = plain.index(b"IEND") - 4

    def with_chunks(number: int) -> bytes:
        return plain[:at] + chunk(kind, content) * number + plain[at:]

    assert np.asarray(decode_image(with_chunks(MAX_CHUNKS - 3), MAX_PIXELS)).shape == (9, 9, 3)
    with pytest.raises(ImageError, match="it has more than 10000 chunks with few or no") as error:
        decode_image(with_chunks(MAX_CHUNKS + 1), MAX_PIXELS)
    assert error.value.rule == "undecodable"


def test_a_second_header_of_a_png_is_left_to_pillow() -> None:
    plain = encoded(random_pixels(1, (9, 9), 3))
    assert decode_plain_png(with_chunk(plain, b"IHDR", plain[16:29]), MAX_PIXELS) is None
