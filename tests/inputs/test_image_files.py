"""Each generated image file gets the same verdict in `clean`, `precompute` and the service."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from slipway.inputs import images
from slipway.inputs.images import TransformContract, array_from_bytes, decode_with_pillow
from slipway.inputs.user_function import code_digest
from slipway.system.errors import ImageError
from tests.data.pictures import CONTRACT
from tests.inputs.image_files import FAMILIES, HEIGHT, WIDTH, png, tiff
from tests.inputs.verdicts import READ, UNREADABLE, verdict

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of damaged tags
NUM_PIXELS = WIDTH * HEIGHT
PREMULTIPLIED_GREY = tiff(1, 2, extra=1, pixels=bytes([100, 128]) * NUM_PIXELS)


def lab(lightness: int, a: int, b: int) -> bytes:
    return tiff(8, 3, pixels=bytes([lightness, a % 256, b % 256]) * NUM_PIXELS)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_image_files_get_the_same_verdict_in_clean_precompute_and_service(
    family: str,
) -> None:
    files = list(FAMILIES[family]())
    verdicts = Counter(verdict(*file) for file in files[:: len(files) // 60])
    assert verdicts.total() >= 60
    assert verdicts[READ] >= 2
    assert set(verdicts) <= {READ, *UNREADABLE}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_each_image_file_gets_the_same_verdict_in_clean_precompute_and_service(family: str) -> None:
    verdicts = Counter(verdict(*file) for file in FAMILIES[family]())
    print(family, dict(verdicts))
    assert verdicts[READ] >= 50


@pytest.mark.nightly
def test_generator_makes_more_than_four_thousand_different_image_files() -> None:
    payloads = {file.payload for files in FAMILIES.values() for file in files()}
    assert len(payloads) > 4000


def test_check_of_image_files_fails_on_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the checks above: without the conversion, premultiplied grey ends the stage."""
    assert verdict("grey.tif", PREMULTIPLIED_GREY) == READ
    monkeypatch.setattr(images, "_in_plain_mode", lambda image: image)
    with pytest.raises(ValueError, match="conversion from La"):
        verdict("grey.tif", PREMULTIPLIED_GREY)


def test_check_of_image_files_fails_if_two_verdicts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second twin of the checks above."""
    monkeypatch.setattr("tests.inputs.verdicts._in_service", lambda payload: "truncated")
    with pytest.raises(AssertionError, match="truncated"):
        verdict("grey.tif", PREMULTIPLIED_GREY)


@pytest.mark.parametrize("order", ["no PLTE", "PLTE behind IDAT"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("interlace", [0, 1])
def test_a_palette_png_without_a_palette_before_its_pixels_is_undecodable(
    order: str, depth: int, interlace: int
) -> None:
    payload = png(3, depth, interlace, order)
    assert verdict("palette.png", payload) == "undecodable"
    with pytest.raises(
        ImageError, match="mode P, which cannot become RGB: it has no palette before its pixels"
    ):
        array_from_bytes(payload, CONTRACT)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palette_png_with_more_alpha_values_than_colours_is_undecodable(depth: int) -> None:
    assert verdict("palette.png", png(3, depth, 0, "long tRNS")) == "undecodable"
    assert verdict("palette.png", png(3, depth, 0, "tRNS")) == READ


def test_premultiplied_grey_is_composed_over_white() -> None:
    grey = array_from_bytes(PREMULTIPLIED_GREY, CONTRACT)
    assert set(grey.ravel().tolist()) == {100 + 255 - 128}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((255, 0, 0), (255, 255, 255)),
        ((0, 0, 0), (0, 0, 0)),
        ((138, 81, 70), (255, 0, 0)),  # sRGB's red seen under D50
        ((75, 68, -112), (0, 0, 255)),
    ],
)
def test_lab_images_become_srgb(
    values: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    payload = lab(*values)
    assert verdict("lab.tif", payload) == READ
    assert np.abs(array_from_bytes(payload, CONTRACT)[0, 0].astype(int) - expected).max() <= 5


@pytest.mark.parametrize("is_big_endian", [False, True])
def test_16_bit_images_decode_to_the_same_mode_in_either_byte_order(is_big_endian: bool) -> None:
    pixels = (257 * 90).to_bytes(2, "big" if is_big_endian else "little") * NUM_PIXELS
    payload = tiff(1, 1, bits=16, pixels=pixels, is_big_endian=is_big_endian)
    assert decode_with_pillow(payload, NUM_PIXELS).image.mode == "I;16"
    assert verdict("grey.tif", payload) == READ
    assert set(array_from_bytes(payload, CONTRACT).ravel().tolist()) == {90}


@pytest.mark.parametrize("bits", [8, 16])
def test_a_tiff_of_five_bands_is_refused_with_their_number(bits: int) -> None:
    expected = f"5 bands of unsigned integers of {bits} bits, .* expected grey, RGB or RGBA"
    with pytest.raises(ImageError, match=expected):
        decode_with_pillow(tiff(1, 5, bits=bits), NUM_PIXELS)


def test_a_transform_may_return_any_mode_that_becomes_rgb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_modes.py").write_text(
        "from PIL import Image\n"
        "def premultiplied(image): return image.convert('LA').convert('La')\n"
        "def bare_palette(image):\n"
        "    made = image.convert('P')\n"
        "    made.palette = None\n"
        "    return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def read(name: str) -> None:
        transform = TransformContract(
            function=f"made_modes:{name}", sha256=code_digest(f"made_modes:{name}")
        )
        array_from_bytes(png(2, 8), CONTRACT.model_copy(update={"transform": transform}))

    read("premultiplied")
    with pytest.raises(ImageError, match="bare_palette returned an image of mode P") as raised:
        read("bare_palette")
    assert raised.value.rule == "transform_failed"
