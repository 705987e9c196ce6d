import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipway.inference.images import ImageReader, image_bytes
from slipway.inference.local import LoadedModel
from slipway.inputs.images import array_from_bytes
from slipway.system.errors import DataError, ImageError
from tests.serving.bundles import CONTRACT, picture


def test_every_form_of_an_image_has_the_answer_of_its_file(
    image_model: LoadedModel, tmp_path: Path
) -> None:
    payload = picture(3, (20, 31))
    path = tmp_path / "picture.png"
    path.write_bytes(payload)
    with Image.open(path) as image:
        forms = [path, str(path), payload, image, np.asarray(image)]
        answers = [image_model.predict(form) for form in forms]
    assert answers == [answers[0]] * 5
    assert image_model.predict(forms[:3]) == answers[:3]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr"])
def test_pil_image_of_any_mode_has_the_pixels_of_its_lossless_file(mode: str) -> None:
    base = Image.open(io.BytesIO(picture(5, (12, 9))))
    image = base.convert("L").convert("I").convert("I;16") if mode == "I;16" else base.convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF" if mode in ("CMYK", "YCbCr") else "PNG")
    expected = array_from_bytes(stream.getvalue(), CONTRACT)
    assert (array_from_bytes(image_bytes(image), CONTRACT) == expected).all()


def test_a_camera_picture_that_pillow_opened_is_turned_upright() -> None:
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.open(io.BytesIO(picture(6, (16, 8)))).save(stream, "PNG", exif=exif)
    from_file = array_from_bytes(stream.getvalue(), CONTRACT)
    opened = Image.open(io.BytesIO(stream.getvalue()))
    assert (array_from_bytes(image_bytes(opened), CONTRACT) == from_file).all()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("absent.png", r"'absent.png' cannot be read: No such file"),
        (7, "found int, expected a path, encoded bytes, a PIL image or an array of uint8"),
        (np.zeros((8, 8, 3)), r"an array of float64 \(8, 8, 3\), expected uint8 from 0 to 255"),
        (np.zeros((8, 8, 2), np.uint8), "with 1, 3 or 4 channels"),
        (np.zeros((0, 8), np.uint8), r"uint8 \(0, 8\)"),
    ],
)
def test_error_for_a_value_that_is_not_an_image_gives_the_expectation(
    item: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        image_bytes(item)


def test_error_gives_the_position_of_a_bad_image() -> None:
    reader = ImageReader(CONTRACT)
    batches, is_list = reader.read([picture(1), picture(2), b"no image"], 2)
    assert is_list
    assert len(next(batches)) == 2
    with pytest.raises(ImageError, match="item 2: ") as caught:
        next(batches)
    assert caught.value.rule == "undecodable"
    reader.close()
