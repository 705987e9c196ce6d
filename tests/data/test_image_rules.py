"""Tests of every image rule of `clean`, with each action that the user may choose."""

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from slipway.config.sections import CleanParams
from slipway.data.images.cleaning import image_report
from slipway.data.images.quality import measure
from slipway.data.rules.result import Cleaned
from slipway.data.sources.samples import RawSample
from slipway.kinds.registry import Task
from tests.data.pictures import CLEAN, cleaned_by, encode, from_memory, picture, sample
from tests.project_params import PROJECT, clean_params


def scene(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Return a smooth picture with an edge, which the rules accept like a photograph."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (
        255 - pixels[height // 3 : height // 2, width // 4 : width // 2]
    )
    return Image.fromarray(pixels)


def plain(level: int, **options: Any) -> Image.Image:
    return Image.new("RGB", (64, 48), (level, level, level), **options)


def clean(
    samples: list[RawSample],
    params: CleanParams,
    task: Task = "image_classification",
    classes: Any = None,
) -> Cleaned:
    return cleaned_by(from_memory(samples), params, task, classes=classes)


def shifted(level: int) -> Image.Image:
    """Return a picture of edges around a mean grey level."""
    noise = np.random.default_rng(0).integers(-8, 9, (48, 64))
    return Image.fromarray(np.clip(level + noise, 0, 255).astype(np.uint8))


BREAKING: dict[str, tuple[RawSample, str]] = {
    "too_small": (
        sample("a.png", encode(scene(1, 64, 3)), "cat"),
        "64x3 pixels, clean.min_side_px is 4",
    ),
    "odd_aspect": (
        sample("a.png", encode(scene(1, 400, 48)), "cat"),
        "400x48 pixels, a ratio of 8.3, clean.max_aspect is 8",
    ),
    "wrong_extension": (
        sample("a.jpg", encode(scene(1)), "cat"),
        "the name ends in .jpg, the content is PNG",
    ),
    "constant_image": (
        sample("a.png", encode(plain(90)), "cat"),
        "grey levels spread by 0.00, clean.constant_std is 1",
    ),
    "too_dark": (sample("a.png", encode(shifted(2)), "cat"), "clean.dark_mean is 10"),
    "too_bright": (sample("a.png", encode(shifted(254)), "cat"), "clean.bright_mean is 245"),
    "blurred": (
        sample(
            "a.png",
            encode(Image.fromarray(np.linspace(20, 220, 64 * 48).reshape(48, 64).astype(np.uint8))),
            "cat",
        ),
        "clean.blur_variance is 5",
    ),
    "unknown_label": (
        sample("a.png", encode(scene(1)), "cow"),
        "the class is 'cow', which is not among the 2 of data.classes",
    ),
}
CLASSES = ["cat", "dog"]


@pytest.mark.parametrize("rule", BREAKING)
def test_a_broken_rule_refuses_flags_or_ignores_as_the_params_say(rule: str) -> None:
    broken, words = BREAKING[rule]
    every = dict.fromkeys(BREAKING, None)
    good = sample("good.png", encode(scene(2)), "dog")
    refused = clean(
        [broken, good],
        clean_params(rules=every | {rule: "refuse"}, max_aspect=8.0),
        classes=CLASSES,
    )
    assert [(row["rule"], row["severity"]) for row in refused.quarantine.to_pylist()] == [
        (rule, "error")
    ]
    assert words in refused.quarantine["detail"][0].as_py()
    flagged = clean(
        [broken, good], clean_params(rules=every | {rule: "flag"}, max_aspect=8.0), classes=CLASSES
    )
    assert {row["source"]: row["flags"] for row in flagged.rows.to_pylist()} == {
        broken.source: [rule],
        "good.png": [],
    }
    assert words in flagged.flagged["detail"][0].as_py()
    unchecked = clean([broken, good], clean_params(rules=every, max_aspect=8.0), classes=CLASSES)
    assert [row["flags"] for row in unchecked.rows.to_pylist()] == [[], []]


def test_a_10_bit_image_refused_as_constant_gets_the_hint_for_12_bit_images() -> None:
    values = np.random.default_rng(0).integers(0, 512, (48, 64)).astype(np.uint16)
    values[0, 0] = 1023
    images = [encode(Image.fromarray(values)), encode(scene(1)), encode(scene(2))]
    cleaned = clean(
        [sample(f"{name}.png", image, name) for name, image in zip("abc", images, strict=True)],
        CLEAN,
    )
    (row,) = cleaned.quarantine.to_pylist()
    assert row["rule"] == "constant_image"
    assert row["detail"].endswith("; its highest value is 1023 of 65535: it uses 2% of its range")
    hint = image_report(cleaned, CLEAN, PROJECT.data).hints[0]
    assert hint.startswith("1 images of 16 bits are nearly black to the network (a.png: ")


@pytest.mark.parametrize(("bits", "flags"), [(12, ["narrow_range"]), (15, []), (16, [])])
def test_an_image_of_16_bits_that_uses_a_quarter_of_them_is_flagged_with_a_hint(
    bits: int, flags: list[str]
) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (48, 64)).astype(np.uint16)
    values[0, 0] = (1 << bits) - 1
    image = encode(Image.fromarray(values))
    cleaned = clean(
        [sample("a.png", image, "cat"), sample("b.png", encode(scene(1)), "dog")],
        clean_params(rules=dict.fromkeys(BREAKING, None)),
    )
    assert {row["source"]: row["flags"] for row in cleaned.rows.to_pylist()} == {
        "a.png": flags,
        "b.png": [],
    }
    hints = image_report(cleaned, CLEAN, PROJECT.data).hints
    assert bool(hints) is bool(flags)
    if flags:
        words = "a.png: its highest value is 4095 of 65535: it uses 6% of its range"
        assert words in hints[0]
        assert "precompute.transform" in hints[0]


def test_an_ordinary_picture_breaks_no_image_rule() -> None:
    every = dict.fromkeys(BREAKING, "refuse")
    samples = [sample(f"{seed}.png", encode(scene(seed)), "cat") for seed in range(20)]
    assert clean(samples, clean_params(rules=every), classes=CLASSES).quarantine.num_rows == 0


@pytest.mark.parametrize("rule", ["too_dark", "blurred", "constant_image"])
def test_an_image_rule_is_decided_on_every_pixel_and_not_on_sampled_rows(rule: str) -> None:
    """The picture has content only in the rows between the sampled ones."""
    pixels = np.zeros((300, 200), np.uint8)
    bright = np.random.default_rng(0).integers(0, 256, (300, 200), dtype=np.uint8)
    seen = {row for row in range(300) if measure(_one_white_row(row))[0].mean > 0}
    assert 0 < len(seen) < 150
    unseen = sorted(set(range(300)) - seen)
    pixels[unseen] = bright[unseen]
    every = dict.fromkeys(BREAKING, None) | {rule: "refuse"}
    assert (
        clean(
            [sample("a.png", encode(Image.fromarray(pixels)), "cat")], clean_params(rules=every)
        ).quarantine.num_rows
        == 0
    )
    black = encode(Image.fromarray(np.zeros((300, 200), np.uint8)))
    expected = 0 if rule == "blurred" else 1  # one colour is constant, not blurred
    assert (
        clean([sample("a.png", black, "cat")], clean_params(rules=every)).quarantine.num_rows
        == expected
    )


def _one_white_row(row: int) -> NDArray[np.uint8]:
    pixels = np.zeros((300, 200), np.uint8)
    pixels[row] = 255
    return pixels


def test_quality_is_measured_for_images_of_any_size() -> None:
    every = dict.fromkeys(BREAKING, None) | {"too_dark": "refuse", "constant_image": "refuse"}
    for width, height in ((4, 4), (5, 129), (500, 127), (500, 128), (500, 129), (1000, 700)):
        [row] = clean(
            [sample("a.png", encode(scene(3, width, height)), "cat")], clean_params(rules=every)
        ).rows.to_pylist()
        assert (row["width"], row["height"]) == (width, height)


def test_clean_rotates_an_image_by_its_exif_tag_and_records_the_correction() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    [row] = clean(
        [sample("a.jpg", encode(scene(1), "JPEG", exif=exif), "cat")], clean_params()
    ).rows.to_pylist()
    assert (row["width"], row["height"], row["corrections"]) == (48, 64, ["exif: turned by 90"])


@pytest.mark.parametrize(("image", "hint"), [(Image.new("F", (8, 8)), False), (None, True)])
def test_only_undecodable_bytes_get_a_guess_of_their_file_type(
    image: Image.Image | None, hint: bool
) -> None:
    payload = encode(image, "TIFF") if image else b"II*\0 and no more"
    [row] = clean([sample("a.tif", payload, "cat")], clean_params()).quarantine.to_pylist()
    assert row["rule"] == "undecodable"
    assert ("looks like a TIFF whose header is damaged" in row["detail"]) == hint


def test_equal_pixels_are_duplicates_in_any_format_and_with_any_metadata() -> None:
    jpeg = encode(scene(1), "JPEG")
    decoded = Image.open(io.BytesIO(jpeg))
    exif = Image.Exif()
    exif[0x010F] = "maker"
    samples = [
        sample("a.jpg", jpeg, "cat"),
        sample("b.png", encode(decoded.convert("RGB")), "cat"),
        sample("c.bmp", encode(decoded.convert("RGB"), "BMP"), "cat"),
        sample("d.png", encode(decoded.convert("RGBA")), "cat"),
        sample("e.png", encode(scene(2)), "cat"),
    ]
    cleaned = clean(samples, clean_params())
    assert cleaned.rows.num_rows == 2
    assert set(cleaned.quarantine["rule"].to_pylist()) == {"exact_duplicate"}


@pytest.mark.parametrize(
    ("choice", "num_kept", "flags"),
    [("refuse", 0, []), ("flag", 1, ["conflicting_label"]), (None, 1, [])],
)
def test_equal_images_under_two_classes_follow_the_conflict_rule(
    choice: str, num_kept: int, flags: list[str]
) -> None:
    samples = [sample("1", picture(1), "cat"), sample("2", picture(1), "dog")]
    cleaned = clean(samples, clean_params(rules={"conflicting_label": choice}))
    assert cleaned.rows.num_rows == num_kept
    assert [flag for row in cleaned.rows["flags"].to_pylist() for flag in row] == flags
    assert cleaned.rows.num_rows + cleaned.quarantine.num_rows == 2


def looks_same(seed: int) -> list[bytes]:
    image = scene(seed, 160, 120)
    return [
        encode(image, "JPEG", quality=95),
        encode(image, "JPEG", quality=40),
        encode(image.resize((100, 75)), "JPEG"),
    ]


def test_near_duplicates_are_one_cluster_named_by_its_smallest_id() -> None:
    samples = [
        sample(f"{seed}/{index}", payload, "cat")
        for seed in range(6)
        for index, payload in enumerate(looks_same(seed))
    ]
    samples.append(sample("alone", encode(scene(99, 160, 120)), "cat"))
    rows = clean(samples, clean_params()).rows.to_pylist()
    for seed in range(6):
        same = [row for row in rows if row["source"].startswith(f"{seed}/")]
        assert {row["cluster"] for row in same} == {min(row["id"] for row in same)}
        assert all(row["flags"] == ["near_duplicate"] for row in same)
    [alone] = [row for row in rows if row["source"] == "alone"]
    assert (alone["cluster"], alone["flags"]) == (None, [])


def test_near_duplicates_can_be_refused_or_ignored() -> None:
    samples = [sample(f"{index}", payload, "cat") for index, payload in enumerate(looks_same(1))]
    refused = clean(samples, clean_params(rules={"near_duplicate": "refuse"}))
    assert (refused.rows.num_rows, refused.num_bad) == (1, 0)
    assert set(refused.quarantine["rule"].to_pylist()) == {"near_duplicate"}
    assert refused.quarantine["severity"].to_pylist() == ["duplicate"] * 2
    unchecked = clean(samples, clean_params(rules={"near_duplicate": None}))
    assert unchecked.rows["cluster"].null_count == 3


def test_near_duplicates_with_different_classes_are_flagged_as_a_conflict() -> None:
    samples = [
        sample(f"{index}", payload, label)
        for index, (payload, label) in enumerate(zip(looks_same(1), "ccd", strict=True))
    ]
    cleaned = clean(samples, clean_params())
    assert [row["flags"] for row in cleaned.rows.to_pylist()] == [
        ["near_conflict", "near_duplicate"]
    ] * 3


def test_pictures_smaller_than_a_thumbnail_are_not_compared() -> None:
    image = scene(1, 16, 15)
    samples = [
        sample("1", encode(image, "JPEG", quality=95), "cat"),
        sample("2", encode(image, "JPEG", quality=60), "cat"),
    ]
    assert clean(samples, clean_params()).rows["cluster"].null_count == 2


@pytest.mark.parametrize(("choice", "num_kept"), [("refuse", 30), ("flag", 31), (None, 31)])
def test_a_target_far_from_the_others_is_an_outlier(choice: str, num_kept: int) -> None:
    samples = [sample(str(index), picture(index), target=100 + index % 7) for index in range(30)]
    samples.append(sample("far", picture(99), target=1e6))
    cleaned = clean(samples, clean_params(rules={"outlier": choice}), "image_regression")
    assert cleaned.rows.num_rows == num_kept
    assert [row["source"] for row in cleaned.rows.to_pylist() if row["flags"]] == (
        ["far"] if choice == "flag" else []
    )
