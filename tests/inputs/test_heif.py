"""Sizes of the pictures inside a HEIC or an AVIF, which may exceed the stated size."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from slipway.inputs import heif
from slipway.inputs.images import decode_image, decode_with_pillow
from slipway.system.errors import ImageError
from tests.data.pictures import HEIC

SCENE = Image.linear_gradient("L").resize((40, 24)).convert("RGB")


def encode(image: Image.Image = SCENE, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "AVIF", **options)
    return stream.getvalue()


def film(*frames: Image.Image) -> bytes:
    return encode(frames[0], save_all=True, append_images=frames[1:], duration=40)


def refusal(payload: bytes, max_pixels: int = 1000) -> ImageError:
    with pytest.raises(ImageError) as refused:
        decode_image(payload, max_pixels)
    return refused.value


def stating(payload: bytes, width: int, height: int) -> bytes:
    """Return the file with a different size in its box `ispe`."""
    place = payload.index(b"ispe") + 8
    return payload[:place] + struct.pack(">II", width, height) + payload[place + 8 :]


@pytest.mark.parametrize(
    ("payload", "sizes"),
    [
        (encode(), [(40, 24)]),
        (encode(SCENE.convert("L")), [(40, 24)]),
        (encode(SCENE.convert("RGBA").rotate(5)), [(40, 24), (40, 24)]),
        (film(SCENE, SCENE.rotate(180)), [(40, 24)]),
    ],
    ids=["colours", "grey", "with transparency", "a film"],
)
def test_av1_sizes_finds_every_displayed_picture_of_an_avif(
    payload: bytes, sizes: list[tuple[int, int]]
) -> None:
    assert list(heif.av1_sizes(payload)) == sizes
    assert decode_image(payload, 40 * 24).size == (40, 24)
    assert refusal(payload, 40 * 24 - 1).rule == "pixel_bomb"


def test_avif_video_is_decoded_to_its_first_frame() -> None:
    found = np.asarray(decode_image(film(SCENE, SCENE.rotate(180)), 1000)).astype(int)
    assert np.abs(found - np.asarray(SCENE)).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_image_is_rotated_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = decode_image(encode(), 1000)
    stored.getexif()[0x0112] = orientation
    found = decode_with_pillow(encode(exif=exif), 1000)
    assert (found.image_format, found.orientation) == ("AVIF", orientation)
    assert np.array_equal(np.asarray(found.image), np.asarray(ImageOps.exif_transpose(stored)))


@pytest.mark.parametrize("payload", [encode(), film(SCENE, SCENE)], ids=["a picture", "a film"])
def test_an_avif_larger_than_its_stated_size_is_refused_before_decoding(
    payload: bytes,
) -> None:
    lying = stating(payload, 8, 8)
    assert refusal(lying, 40 * 24 - 1).detail == "40x24 pixels, the limit is 959 pixels"
    assert decode_image(lying, 40 * 24).size == (8, 8)


def test_an_avif_with_too_large_a_stated_size_is_refused() -> None:
    assert refusal(stating(encode(), 10_000, 10_000)).rule == "pixel_bomb"


@pytest.mark.parametrize(
    ("start", "size"),
    [
        (0b0001_0000_0000_0000, (40, 24)),
        (0b0001_0010_0000_0000, (64, 32)),  # overrides the size
        (0b0001_0110_0000_0000, (40, 24)),  # has tools for screens, and integer vectors
        (0b0001_0111_0000_0000, (64, 32)),
        (0b0011_0000_0000_0000, (64, 32)),  # is not a key frame
        (0b1000_0000_0000_0000, (0, 0)),  # shows an earlier frame again
    ],
)
def test_a_frame_that_may_override_its_size_counts_as_the_largest_possible(
    start: int, size: tuple[int, int]
) -> None:
    payload = film(SCENE, SCENE)  # its frames have full headers
    parts = dict(heif._parts(next(heif._av1_streams(payload))))
    before = parts[heif._FRAME]
    payload = payload.replace(before, struct.pack(">H", start) + before[2:])
    assert before[:2] == b"\x10\0"
    assert list(heif.av1_sizes(payload)) == [size]


def with_stream(payload: bytes, stream: bytes) -> bytes:
    """Return the file with other AV1 data, which lies at its end."""
    (before,) = heif._av1_streams(payload)
    assert payload.endswith(before)
    length = struct.pack(">I", len(before))
    return payload.replace(length, struct.pack(">I", len(stream)), 1)[: -len(before)] + stream


def test_avif_that_codes_too_many_pictures_is_refused() -> None:
    (stream,) = heif._av1_streams(encode())
    assert list(heif.av1_sizes(with_stream(encode(), 5 * stream))) == 5 * [(40, 24)]
    assert decode_image(with_stream(encode(), 4 * stream), 1000).size == (40, 24)
    assert refusal(with_stream(encode(), 5 * stream)).detail == (
        "its pictures together have more than 4 times the limit of 1000 pixels"
    )


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"\x12\0" * (heif.MAX_PARTS + 1), "it has more than 10000 parts"),
        (b"\x12\0", "it has an AV1 stream without a sequence header"),
        (b"\x32\x01\0", "it has a frame before its sequence header"),
        (b"\x0a\x01\0", "an AV1 header is cut off"),
        (b"\x0a\xff", "index out of range"),
    ],
)
def test_an_avif_whose_stream_is_damaged_is_refused(stream: bytes, words: str) -> None:
    refused = refusal(with_stream(encode(), stream))
    assert (refused.rule, refused.detail) == ("truncated", f"AVIF is truncated or damaged: {words}")


@pytest.mark.parametrize("payload", [encode(), film(SCENE, SCENE)], ids=["a picture", "a film"])
def test_truncated_avif_is_refused_by_a_rule(payload: bytes) -> None:
    rules = {refusal(payload[:end]).rule for end in range(1, len(payload) // 2)}
    assert rules <= {"undecodable", "truncated"}


def test_heif_file_with_too_many_boxes_is_refused() -> None:
    box = struct.pack(">I4s", 8, b"free")
    assert decode_image(HEIC + box, 1000).size == (16, 24)
    assert refusal(HEIC + box * heif.MAX_PARTS).detail == (
        f"HEIF is truncated or damaged: it has more than {heif.MAX_PARTS} boxes"
    )
