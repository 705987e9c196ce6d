"""Decoding of every mode and orientation, and refusals of unreadable images."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from slipway.inputs.images import (
    ImageContract,
    PixelBuffer,
    array_from_bytes,
    decode_image,
    decode_jpeg,
    decode_jpeg_grey,
    decode_with_pillow,
    read_jpeg_header,
)
from slipway.system.errors import ImageError
from tests.data.pictures import HEIC, WRITTEN

NOISE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=image_format, **options)
    return buffer.getvalue()


def contract(size_px: int = 4, **changes: Any) -> ImageContract:
    values = {
        "kind": "images",
        "transform": None,
        "channels": 3,
        "resize_mode": "stretch",
        "interpolation": "nearest",
        "max_pixels": 1000,
    }
    return ImageContract.model_validate({"size_px": size_px, **values, **changes})


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_image_is_resized_with_the_filter_of_its_contract(name: str, fit: str) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (31, 47, 3), dtype=np.uint8))
    resize: Any = {"stretch": Image.Image.resize, "crop": ImageOps.fit, "pad": ImageOps.pad}[fit]
    expected = resize(image, (12, 12), Image.Resampling[name.upper()])
    found = read(image, size_px=12, interpolation=name, resize_mode=fit, max_pixels=10_000)
    assert np.array_equal(found, np.asarray(expected))


def read(
    image: Image.Image,
    image_format: str = "PNG",
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    return array_from_bytes(encode(image, image_format, **(options or {})), contract(**changes))


def rule_of(payload: bytes) -> str:
    with pytest.raises(ImageError) as raised:
        decode_image(payload, 1000)
    return raised.value.rule


def test_image_of_the_networks_size_keeps_its_pixels() -> None:
    square = NOISE[:, :6]
    assert np.array_equal(read(Image.fromarray(square), size_px=6), square)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_any_image_is_converted_to_the_shape_of_its_contract(
    channels: int, fit: str, interpolation: str
) -> None:
    array = read(
        Image.fromarray(NOISE), channels=channels, resize_mode=fit, interpolation=interpolation
    )
    assert (array.shape, array.dtype) == ((4, 4, channels), np.uint8)


def test_resize_mode_crop_keeps_the_middle_and_pad_keeps_the_whole_image() -> None:
    oblong = np.zeros((4, 12, 3), np.uint8)
    oblong[:, 4:8] = 200
    assert (read(Image.fromarray(oblong), resize_mode="crop") == 200).all()
    padded = read(Image.fromarray(oblong), resize_mode="pad", size_px=12)
    assert padded[:4].max() == padded[8:].max() == 0
    assert np.array_equal(padded[4:8], oblong)


@pytest.mark.parametrize("image_format", WRITTEN)
def test_every_supported_image_format_is_decoded(image_format: str) -> None:
    grey = Image.new("RGB", (8, 8), (90, 90, 90))
    assert np.abs(read(grey, image_format).astype(int) - 90).max() <= 2


def test_a_heic_image_is_decoded() -> None:
    pixels = np.asarray(decode_image(HEIC, 1000))
    assert pixels.shape == (24, 16, 3)
    assert np.abs(pixels[:12].astype(int) - (200, 30, 40)).max() <= 2
    assert np.abs(pixels[12:].astype(int) - (20, 60, 220)).max() <= 2


def test_a_heic_of_another_size_than_its_header_says_is_refused() -> None:
    place = HEIC.index(b"ispe") + 8
    before, after = HEIC[:place], HEIC[place + 8 :]
    assert before + struct.pack(">II", 64, 64) + after == HEIC  # of which 16x24 are shown
    assert rule_of(before + struct.pack(">II", 1, 1) + after) == "truncated"
    assert rule_of(before + struct.pack(">II", 20_000, 20_000) + after) == "pixel_bomb"


def test_pixels_of_a_heic_may_look_like_a_box_of_its_size() -> None:
    size = b"ispe" + bytes(4) + struct.pack(">II", 20_000, 20_000)
    padding = struct.pack(">I", 20) + size  # as in pixels that the decoder skips
    payload = HEIC + struct.pack(">I4s", 8 + 2 * len(padding), b"mdat") + 2 * padding
    assert decode_image(payload, 1000).tobytes() == decode_image(HEIC, 1000).tobytes()


def test_a_heic_with_a_flipped_byte_is_read_or_refused_by_a_rule() -> None:
    damaged = [
        HEIC[:place] + bytes([HEIC[place] ^ 0x5A]) + HEIC[place + 1 :] for place in range(len(HEIC))
    ]
    assert {outcome(payload) for payload in damaged} <= {
        "read",
        "undecodable",
        "truncated",
        "pixel_bomb",
    }


def test_animation_is_decoded_to_its_first_frame_over_white() -> None:
    frames = [Image.fromarray(NOISE).convert("P"), Image.new("P", NOISE.shape[1::-1])]
    payload = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = np.asarray(frames[0].convert("RGB"))
    assert np.array_equal(np.asarray(decode_image(payload, 1000).convert("RGB")), first)


def test_a_gif_whose_frame_is_larger_than_its_screen_is_a_pixel_bomb() -> None:
    payload = encode(Image.new("L", (8, 8)), "GIF")
    place = payload.index(b",\0\0\0\0\x08\0\x08\0") + 5
    huge = payload[:place] + struct.pack("<HH", 60_000, 3_000) + payload[place + 4 :]
    assert rule_of(huge) == "pixel_bomb"


@pytest.mark.parametrize(("alpha", "expected"), [(255, 0), (0, 255), (128, 127)])
def test_transparency_is_composed_over_white(alpha: int, expected: int) -> None:
    assert (read(Image.new("RGBA", (8, 8), (0, 0, 0, alpha))) == expected).all()
    assert (read(Image.new("LA", (8, 8), (0, alpha)), channels=1) == expected).all()


def test_palette_colours_become_their_rgb_values() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert read(image)[0, 0].tolist() == [10, 20, 30]
    assert read(image, options={"transparency": 1})[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_images_of_16_bits_are_scaled_to_8_bits(image_format: str) -> None:
    values = np.array([[0, 257, 32896, 65535]] * 4, np.uint16)
    assert read(Image.fromarray(values), image_format, channels=1)[0, :, 0].tolist() == [
        0,
        1,
        128,
        255,
    ]


def test_images_of_1_bit_become_black_and_white() -> None:
    assert np.unique(read(Image.new("1", (8, 8), 1), channels=1)).tolist() == [255]


def test_cmyk_images_become_rgb() -> None:
    red = read(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")[0, 0]
    assert red.tolist() == [255, 0, 0]


def test_image_is_rotated_upright_by_its_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side: turn it clockwise
    upright = decode_image(encode(Image.fromarray(NOISE), exif=exif), 1000)
    assert upright.size == (6, 9)
    assert np.array_equal(np.asarray(upright), np.rot90(NOISE, -1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "WEBP"])
def test_every_format_is_rotated_once_and_reports_its_orientation(
    image_format: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(NOISE)
    options = {"lossless": True} if image_format == "WEBP" else {}
    found = decode_with_pillow(encode(stored, image_format, exif=exif, **options), 1000)
    stored.getexif()[0x0112] = orientation
    assert (found.image_format, found.orientation) == (image_format, orientation)
    assert np.array_equal(np.asarray(found.image), np.asarray(ImageOps.exif_transpose(stored)))


def test_mpo_file_is_reported_as_jpeg() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    two = encode(
        Image.fromarray(NOISE),
        "MPO",
        save_all=True,
        append_images=[Image.fromarray(NOISE)],
        exif=exif,
    )
    assert Image.open(io.BytesIO(two)).format == "MPO"
    assert decode_with_pillow(two, 1000).image_format == "JPEG"


def test_32_bit_integer_image_within_16_bits_is_read() -> None:
    assert (read(Image.new("I", (8, 8), 65535), "TIFF", channels=1) == 255).all()


def test_image_of_several_frames_is_decoded_to_the_first() -> None:
    frames = [Image.new("L", (8, 8), value) for value in (10, 200)]
    assert (
        read(frames[0], "TIFF", {"save_all": True, "append_images": frames[1:]}, channels=1) == 10
    ).all()


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "empty"),
        (b"words", "undecodable"),
        (bytes(100), "undecodable"),
        (encode(Image.new("L", (8, 8)), "ICO"), "undecodable"),
        (encode(Image.new("F", (8, 8)), "TIFF"), "undecodable"),
        (encode(Image.new("I", (8, 8), -1), "TIFF"), "undecodable"),
        (encode(Image.new("I", (8, 8), 65536), "TIFF"), "undecodable"),
        (encode(Image.fromarray(NOISE))[:-40], "truncated"),
        (encode(Image.new("1", (1001, 1))), "pixel_bomb"),
        (encode(Image.new("1", (20_000, 20_000))), "pixel_bomb"),
    ],
    ids=[
        "nothing",
        "text",
        "zeros",
        "icon",
        "float",
        "negative",
        "more than 16 bits",
        "truncated",
        "one pixel too many",
        "far too many",
    ],
)
def test_unreadable_image_is_refused_by_a_rule(payload: bytes, rule: str) -> None:
    assert rule_of(payload) == rule


def tiff_of(values: NDArray[Any]) -> bytes:
    """Return an uncompressed TIFF of integers of any width, which Pillow cannot write."""
    kinds = {"u": 1, "i": 2, "f": 3}
    height, width = values.shape
    tags = {256: width, 257: height, 258: values.itemsize * 8, 259: 1, 262: 1, 273: 8}
    tags |= {277: 1, 278: height, 279: values.nbytes, 339: kinds[values.dtype.kind]}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + values.nbytes) + values.tobytes() + directory


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (np.uint32, "its pixels are unsigned integers of 32 bits from 4000000000 to 4000000063"),
        (np.uint64, "its pixels are unsigned integers of 64 bits"),
        (np.int64, "its pixels are signed integers of 64 bits"),
        (np.float64, "its pixels are floating-point numbers of 64 bits"),
    ],
)
def test_error_for_a_tiff_beyond_16_bits_names_its_numbers(kind: type[Any], words: str) -> None:
    values = (4_000_000_000 + np.arange(64, dtype=np.int64)).reshape(8, 8).astype(kind)
    with pytest.raises(ImageError) as refused:
        decode_image(tiff_of(values), 1000)
    assert refused.value.rule == "undecodable"
    assert refused.value.detail.startswith(words)
    assert "scale it to 16 bits and save it again" in refused.value.detail


def test_image_with_exactly_the_maximum_number_of_pixels_is_read() -> None:
    assert decode_image(encode(Image.new("1", (1000, 1))), 1000).size == (1000, 1)


def outcome(payload: bytes) -> str:
    """Return the rule that refuses the bytes, or "read". Raises any error but ImageError."""
    try:
        array = array_from_bytes(payload, contract())
    except ImageError as error:
        return error.rule
    return "read" if array.shape == (4, 4, 3) else "misread"


@given(
    st.binary(max_size=300),
    st.sampled_from(
        [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"BM", b"II*\0", b"RIFF\0\0\0\0WEBPVP8 "]
    ),
)
def test_arbitrary_bytes_raise_only_image_errors(payload: bytes, signature: bytes) -> None:
    assert outcome(signature + payload) in {
        "read",
        "empty",
        "undecodable",
        "truncated",
        "pixel_bomb",
    }


@pytest.mark.parametrize("image_format", WRITTEN)
def test_image_with_a_flipped_byte_is_read_or_refused_by_a_rule(image_format: str) -> None:
    good = encode(Image.fromarray(NOISE), image_format)
    damaged = [
        good[:position] + bytes([good[position] ^ 0x5A]) + good[position + 1 :]
        for position in range(len(good))
    ]
    assert {outcome(payload) for payload in damaged} <= {
        "read",
        "undecodable",
        "truncated",
        "pixel_bomb",
    }


SCENE = Image.fromarray(
    np.random.default_rng(1).integers(0, 256, (9, 13, 3), dtype=np.uint8)
).resize((67, 45), Image.Resampling.BICUBIC)
JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "progressive": {"progressive": True},
    "progressive 4:4:4": {"progressive": True, "subsampling": "4:4:4"},
    "with restart markers": {"restart_marker_blocks": 2},
    "of RGB": {"keep_rgb": True},
    "with EXIF that says upright": {"exif": b"Exif\0\0" + Image.Exif().tobytes()[6:]},
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("quality", [30, 75, 97])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_jpeg_decoders_return_equal_pixels(kind: str, quality: int, mode: str) -> None:
    payload = encode(SCENE.convert(mode), "JPEG", quality=quality, **JPEGS[kind])
    array = decode_jpeg(payload, 10_000)
    assert array is not None
    expected = decode_with_pillow(payload, 10_000).image
    assert np.array_equal(array if mode == "L" else array[:, :, :3], np.asarray(expected))
    image = decode_image(payload, 10_000)
    assert (image.mode, image.size, image.tobytes()) == (mode, SCENE.size, expected.tobytes())
    assert array_from_bytes(
        payload, contract(16, max_pixels=10_000, interpolation="bilinear")
    ).tobytes() == (
        np.asarray(expected.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)).tobytes()
    )


def test_rotated_and_cmyk_jpegs_are_left_to_pillow() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_jpeg(encode(SCENE, "JPEG", exif=exif), 10_000) is None
    assert decode_jpeg(encode(SCENE.convert("CMYK"), "JPEG"), 10_000) is None
    turned = decode_with_pillow(encode(SCENE, "JPEG", exif=exif), 10_000)
    assert (turned.image.size, turned.image_format, turned.orientation) == ((45, 67), "JPEG", 6)


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "with restart markers"])
def test_every_truncation_of_a_jpeg_is_refused_by_both_decoders(kind: str) -> None:
    payload = encode(SCENE, "JPEG", **JPEGS[kind])
    for length in range(2, len(payload)):
        assert decode_jpeg(payload[:length], 10_000) is None
        with pytest.raises(ImageError):
            decode_image(payload[:length], 10_000)


def test_jpeg_with_a_flipped_byte_decodes_alike_or_is_left_to_pillow() -> None:
    payload = encode(SCENE, "JPEG", quality=60)
    num_compared = 0
    for position in range(2, len(payload)):
        damaged = payload[:position] + bytes([payload[position] ^ 0x11]) + payload[position + 1 :]
        try:
            array = decode_jpeg(damaged, 10_000)
        except ImageError:  # the flipped byte is the size
            continue
        if array is not None:
            num_compared += 1
            assert np.array_equal(
                array[..., :3], np.asarray(decode_with_pillow(damaged, 10_000).image.convert("RGB"))
            )
    assert num_compared > 100


@pytest.mark.parametrize("kind", JPEGS)
def test_decoded_jpeg_luma_equals_the_grey_of_the_decoded_colours(kind: str) -> None:
    pale = SCENE.point(lambda level: 80 + level // 4)  # no colour is cut off at 0 or 255
    payload = encode(pale, "JPEG", quality=90, **JPEGS[kind])
    header = read_jpeg_header(payload, 10_000)
    assert header is not None
    assert header.has_luma == (kind != "of RGB")
    luma, colours = decode_jpeg_grey(payload, header), decode_jpeg(payload, 10_000)
    assert luma is not None
    assert colours is not None
    assert header.is_grey == (colours.ndim == 2)
    if header.has_luma:
        assert np.array_equal(luma, np.rint(colours[..., :3] @ [0.299, 0.587, 0.114]))


def decodes_alike(payload: bytes) -> bool | None:
    """True if the luma is decoded, which must hold exactly if colours are; None without luma."""
    try:
        header = read_jpeg_header(payload, 10_000)
    except ImageError:  # the flipped byte is the size
        return None
    if header is None or not header.has_luma:
        return None
    luma, colours = decode_jpeg_grey(payload, header), decode_jpeg(payload, 10_000)
    assert (luma is None) == (colours is None)
    return luma is not None


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "progressive", "with restart markers"])
def test_luma_decoding_refuses_damaged_chroma(kind: str) -> None:
    payload = encode(SCENE, "JPEG", quality=60, **JPEGS[kind])
    assert not any(decodes_alike(payload[:length]) for length in range(2, len(payload)))
    damaged = (
        payload[:position] + bytes([payload[position] ^ bits]) + payload[position + 1 :]
        for position in range(2, len(payload))
        for bits in (0x11, 0x80)
    )
    outcomes = [decodes_alike(copy) for copy in damaged]
    assert outcomes.count(True) > 50
    assert outcomes.count(False) > 50


def test_the_size_of_a_jpeg_is_checked_before_it_is_decoded() -> None:
    payload = encode(SCENE, "JPEG")
    broken_after_the_header = payload[: payload.index(b"\xff\xda") + 14]
    for given_bytes in (payload, broken_after_the_header):
        with pytest.raises(ImageError, match=r"67x45 pixels, the limit is 3014 pixels"):
            decode_image(given_bytes, 67 * 45 - 1)


def test_pixel_buffer_is_reused_and_grows() -> None:
    buffer = PixelBuffer()
    small = decode_jpeg(encode(SCENE.resize((8, 8)), "JPEG"), 10_000, buffer)
    assert small is not None
    assert small.shape == (8, 8, 4)
    first = decode_jpeg(encode(SCENE, "JPEG"), 10_000, buffer)
    assert first is not None
    before = first.copy()
    second = decode_jpeg(encode(SCENE.rotate(180), "JPEG"), 10_000, buffer)
    assert second is not None
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, small)
    assert not np.array_equal(first, before)


def _run_out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    "place",
    ["PIL.Image.open", "PIL.TiffImagePlugin.TiffImageFile.load", "PIL.Image.Image.getexif"],
)
def test_lack_of_memory_is_not_reported_as_a_damaged_image(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = encode(Image.fromarray(NOISE), "TIFF")
    monkeypatch.setattr(place, _run_out_of_memory)
    with pytest.raises(MemoryError):
        decode_image(payload, 1000)


def test_lack_of_memory_while_reading_the_orientation_is_not_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 1
    payload = encode(Image.fromarray(NOISE), "JPEG", exif=exif)
    monkeypatch.setattr("PIL.Image.Image.getexif", _run_out_of_memory)
    with pytest.raises(MemoryError):
        decode_image(payload, 1000)
