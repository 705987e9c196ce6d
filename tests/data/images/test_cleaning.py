"""Tests of cleaning: each fault has a rule, no image is lost, and file order has no effect."""

import random
from typing import Any

import pytest
from PIL import Image

from slipway.config.sections import CleanParams
from slipway.data.images.cleaning import image_report
from slipway.data.rules.report import CleanReport
from slipway.data.rules.result import Cleaned, check_usable
from slipway.data.rules.rules import IMAGE_RULES
from slipway.data.sources.samples import Fault, RawSample, looks_like
from slipway.kinds.registry import Task
from slipway.system.errors import DataError
from tests.data.pictures import (
    CLEAN,
    WRITTEN,
    cleaned_by,
    encode,
    from_memory,
    picture,
    pixels,
    sample,
)
from tests.project_params import PROJECT, clean_params


def clean(
    *samples: RawSample,
    params: CleanParams = CLEAN,
    task: Task = "image_classification",
    num_workers: int = 1,
    classes: Any = None,
) -> Cleaned:
    return cleaned_by(from_memory(samples), params, task, num_workers, classes)


def summary_of(
    cleaned: Cleaned, task: Task = "image_classification", params: CleanParams = CLEAN
) -> CleanReport:
    return image_report(cleaned, params, PROJECT.data.model_copy(update={"task": task}))


def refused(cleaned: Cleaned) -> dict[str, str]:
    return {row["source"]: row["rule"] for row in cleaned.quarantine.to_pylist()}


def kept(cleaned: Cleaned) -> list[str]:
    return sorted(cleaned.rows["source"].to_pylist())


def test_a_valid_image_is_kept_with_its_measured_facts() -> None:
    [row] = clean(sample("a.png", picture(1, 9), "cat", group="g")).rows.to_pylist()
    assert row["id"] == row["sha256"][:32]
    assert (row["source"], row["label"], row["group"], row["width"], row["height"]) == (
        "a.png",
        "cat",
        "g",
        9,
        9,
    )
    assert row["bytes"] == len(picture(1, 9))


FAULTY = {
    "empty": (b"", "empty", "0 bytes"),
    "a text file": (b"just some words", "undecodable", "it looks like text: 'just some words'"),
    "garbage": (bytes(range(128, 256)) * 8, "undecodable", "it looks like binary data"),
    "zeros": (bytes(500), "undecodable", "it looks like zero bytes"),
    "another format": (
        encode(Image.new("L", (8, 8)), "ICO"),
        "undecodable",
        "it looks like an icon",
    ),
    "a truncated PNG": (picture(1, 32)[:-600], "truncated", "is truncated or damaged"),
    "a truncated JPEG": (picture(1, 32, "JPEG")[:-300], "truncated", "is truncated or damaged"),
    "a header alone": (
        picture(1, 32, "JPEG")[:40],
        "undecodable",
        "it looks like a JPEG whose header is damaged",
    ),
    "a pixel bomb": (
        encode(Image.new("1", (101, 100))),
        "pixel_bomb",
        "101x100 pixels, the limit is 10000",
    ),
    "a tiny picture": (picture(1, 3), "too_small", "3x3 pixels, clean.min_side_px is 4"),
    "floating-point pixels": (
        encode(Image.new("F", (8, 8), 0.5), "TIFF"),
        "undecodable",
        "no fixed range",
    ),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_each_kind_of_corrupt_image_is_refused_under_its_rule(kind: str) -> None:
    payload, rule, words = FAULTY[kind]
    cleaned = clean(sample("good.png", picture(7), "cat"), sample("bad.png", payload, "cat"))
    assert kept(cleaned) == ["good.png"]
    [row] = cleaned.quarantine.to_pylist()
    assert (row["source"], row["rule"], row["severity"]) == ("bad.png", rule, "error")
    assert words in row["detail"]


@pytest.mark.parametrize("image_format", WRITTEN)
def test_clean_refuses_no_valid_image(image_format: str) -> None:
    assert not refused(
        clean(*(sample(str(seed), picture(seed, 16, image_format), "cat") for seed in range(20)))
    )


def test_inspection_keeps_the_fault_of_an_unreadable_sample() -> None:
    broken = RawSample("1", b"", "cat", None, None, Fault("missing_file", "gone"))
    assert clean(broken).quarantine.to_pylist() == [
        {"source": "1", "rule": "missing_file", "detail": "gone", "severity": "error"}
    ]


def test_one_of_several_images_with_equal_pixels_is_kept() -> None:
    image = Image.fromarray(pixels(1))
    samples = [
        sample("b", encode(image, compress_level=0), "cat"),
        sample("a", encode(image, compress_level=9), "cat"),
    ]
    samples += [sample("copy", samples[0].payload, "cat"), sample("other", picture(2), "cat")]
    cleaned = clean(*samples)
    assert len(kept(cleaned)) == 2
    assert set(refused(cleaned).values()) == {"exact_duplicate"}
    assert cleaned.num_bad == 0


def test_equal_palette_indices_with_different_colours_are_not_duplicates() -> None:
    images = [Image.new("P", (8, 8), 1) for _ in range(2)]
    images[0].putpalette([0, 0, 0, 255, 0, 0])
    images[1].putpalette([0, 0, 0, 0, 255, 0])
    one_colour_is_fine = clean_params(rules={"constant_image": None})
    assert (
        len(
            kept(
                clean(
                    *(sample(str(image.getpalette()), encode(image), "cat") for image in images),
                    params=one_colour_is_fine,
                )
            )
        )
        == 2
    )


def test_equal_pictures_of_different_classes_are_all_refused() -> None:
    cleaned = clean(
        sample("1", picture(1), "cat"),
        sample("2", picture(1), "dog"),
        sample("3", picture(1), "cat"),
        sample("4", picture(2), "dog"),
    )
    assert kept(cleaned) == ["4"]
    assert refused(cleaned) == {
        "1": "conflicting_label",
        "2": "conflicting_label",
        "3": "conflicting_label",
    }
    assert "'cat', 'dog'" in cleaned.quarantine["detail"][0].as_py()
    assert cleaned.num_bad == 3


def test_equal_pictures_with_different_numbers_are_all_refused() -> None:
    cleaned = clean(
        sample("1", picture(1), target=1.0),
        sample("2", picture(1), target=2.0),
        sample("3", picture(2), target=0.0),
    )
    assert refused(cleaned) == {"1": "conflicting_target", "2": "conflicting_target"}


def test_kept_and_refused_images_add_up_to_those_read() -> None:
    samples = [
        sample(str(index), picture(index % 7) if index % 3 else b"", "cat" if index % 5 else "dog")
        for index in range(60)
    ]
    cleaned = clean(*samples)
    assert sorted([*kept(cleaned), *refused(cleaned)]) == sorted(str(index) for index in range(60))
    assert cleaned.num_read == 60


def test_clean_does_not_depend_on_the_order_of_files() -> None:
    samples = [
        sample(str(index), picture(index // 2), "cat" if index % 14 else "dog")
        for index in range(40)
    ]
    expected = clean(*samples)
    for seed in range(5):
        random.Random(seed).shuffle(samples)
        found = clean(*samples)
        assert found.rows.equals(expected.rows)
        assert found.quarantine.equals(expected.quarantine)


@pytest.mark.process
def test_clean_does_not_depend_on_the_number_of_workers() -> None:
    samples = [
        sample(str(index), picture(index) if index % 9 else b"x", "cat") for index in range(700)
    ]
    expected = clean(*samples)
    found = clean(*samples, num_workers=2)
    assert found.rows.equals(expected.rows)
    assert found.quarantine.equals(expected.quarantine)


def test_too_many_bad_samples_fail_with_rules_counts_and_examples() -> None:
    cleaned = clean(
        *(sample(f"{index}.png", b"words", "cat") for index in range(6)),
        *(sample(str(seed), picture(seed), "cat") for seed in range(5)),
    )
    with pytest.raises(DataError) as raised:
        check_usable(cleaned, CLEAN, "image_classification")
    text = str(raised.value)
    assert "6 of 11 samples are bad, a fraction of 0.5455, above clean.max_bad_fraction 0.5" in text
    assert "undecodable: 6" in text
    assert "0.png: not a readable image" in text


def test_clean_accepts_exactly_the_maximum_fraction_of_bad_rows() -> None:
    good = [sample(str(seed), picture(seed), "cat" if seed else "dog") for seed in range(3)]
    check_usable(
        clean(*good, *(sample(f"bad{index}", b"", "cat") for index in range(3))),
        CLEAN,
        "image_classification",
    )


def test_duplicates_do_not_count_towards_the_maximum_fraction_of_bad_rows() -> None:
    copies = [sample(f"copy{index}", picture(0), "dog") for index in range(10)]
    check_usable(clean(*copies, sample("1", picture(1), "cat")), CLEAN, "image_classification")


def test_images_without_a_label_are_set_aside_and_are_not_bad() -> None:
    no_label = Fault("missing_label", "the target column is empty, expected a class")
    unlabelled = [RawSample(f"no{n}", b"", None, None, None, no_label) for n in range(9)]
    labelled = [sample(str(seed), picture(seed), "cat" if seed else "dog") for seed in range(3)]
    cleaned = clean(*unlabelled, *labelled, sample("bad", b"", "cat"))
    assert (cleaned.rows.num_rows, cleaned.num_bad, cleaned.num_unlabelled) == (3, 1, 9)
    check_usable(cleaned, CLEAN, "image_classification")


@pytest.mark.parametrize(
    ("samples", "task", "words"),
    [
        ([], "image_classification", "holds no samples"),
        (
            [sample("1", picture(1), "cat"), sample("2", picture(2), "cat")],
            "image_classification",
            "the label 'cat', expected at least two",
        ),
        (
            [sample("1", picture(1), target=3), sample("2", picture(2), target=3)],
            "image_regression",
            "the target 3.0, expected at least two",
        ),
        (
            [sample("1", picture(1), "cat"), sample("2", picture(1), "dog")],
            "image_classification",
            "2 of 2 samples are bad",
        ),
    ],
)
def test_data_with_a_single_class_or_no_rows_is_refused(
    samples: list[RawSample], task: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        check_usable(clean(*samples), CLEAN, task)


def test_the_report_counts_all_findings_and_shows_at_most_twenty_examples() -> None:
    bad = [sample(f"bad{index:02}", b"", "cat") for index in range(30)]
    summary = summary_of(
        clean(*bad, sample("1", picture(1), "cat"), sample("2", picture(2), "dog"))
    )
    assert (summary.read, summary.kept, summary.classes) == (32, 2, {"cat": 1, "dog": 1})
    assert summary.refused["empty"].count == 30
    assert [example.source for example in summary.refused["empty"].examples] == [
        f"bad{index:02}" for index in range(20)
    ]


def test_the_report_lists_checked_rules_and_reasons_for_unchecked_ones() -> None:
    summary = summary_of(
        clean(sample("1", picture(1), "cat")),
        params=clean_params(rules={"blurred": None, "near_duplicate": None}),
    )
    assert set(summary.checks) | set(summary.not_checked) == set(IMAGE_RULES)
    assert not set(summary.checks) & set(summary.not_checked)
    assert summary.not_checked["blurred"] == "clean.rules.blurred is null"
    assert summary.not_checked["near_conflict"] == "clean.rules.near_duplicate is null"
    assert summary.not_checked["bad_time"] == "data.time_column is null"
    assert (
        "a flipped byte that still decodes stays undetected"
        in summary.not_checked["digest_mismatch"]
    )


def test_the_report_summarises_a_numeric_target() -> None:
    task: Task = "image_regression"
    summary = summary_of(
        clean(
            *(sample(str(value), picture(value), target=float(value)) for value in range(5)),
            task=task,
        ),
        task,
    )
    assert summary.target is not None
    found = summary.target.model_dump(exclude={"histogram"})
    assert found == {
        "min": 0,
        "p25": 1,
        "median": 2,
        "p75": 3,
        "max": 4,
        "mean": 2,
        "std": pytest.approx(2**0.5),
    }
    assert sum(summary.target.histogram) == 5


def test_looks_like_recognises_text_in_any_script_and_other_file_types() -> None:
    assert looks_like("größer 好 ".encode() * 20).startswith("text:")
    assert looks_like(b"<html>\n<body>").startswith("text: '<html>")
    assert looks_like(b"\x00\x00\x00\x18ftypheic").startswith("a damaged HEIC or AVIF")
