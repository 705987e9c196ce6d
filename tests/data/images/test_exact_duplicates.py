"""Tests of JPEGs whose luma only was decoded: copies are found, and few files are read twice."""

import io
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from slipway.data.images.cleaning import clean_samples, compare_samples, digest_pixels
from slipway.data.rules.result import Cleaned
from slipway.data.sources.samples import RawSample
from slipway.system.errors import DataError
from slipway.system.files import sha256_bytes
from tests.data.images.test_near_duplicates import photograph
from tests.data.pictures import encode, from_memory, sample
from tests.project_params import clean_params

PARAMS = clean_params(
    rules=dict.fromkeys(("blurred", "constant_image", "too_dark", "too_bright"), None)
)


def clean(*samples: RawSample) -> tuple[Cleaned, set[str]]:
    """Clean the samples; also return the sources that were read a second time."""
    read = from_memory(samples)
    twice: set[str] = set()

    def again(wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        twice.update(wanted)
        return digest_pixels(read(wanted), PARAMS, 1)

    return compare_samples(
        clean_samples(samples, PARAMS, 1), PARAMS, "image_classification", again
    ), twice


def jpeg(image: Image.Image, **options: object) -> bytes:
    return encode(image, "JPEG", **{"quality": 85, **options})


def with_comment(payload: bytes, comment: bytes) -> bytes:
    """Return the same picture with other metadata."""
    return payload[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + payload[2:]


def decoded(payload: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(payload))
    image.load()
    return image


def duplicates(cleaned: Cleaned) -> set[str]:
    return {
        row["source"] for row in cleaned.quarantine.to_pylist() if row["rule"] == "exact_duplicate"
    }


def cartoon(seed: int) -> Image.Image:
    """Return a picture of pure colours, most of which are clipped at 0 or 255 when decoded."""
    blocks = np.random.default_rng(seed).choice(np.array([0, 255], np.uint8), (12, 16, 3))
    return Image.fromarray(np.kron(blocks, np.ones((15, 15, 1), np.uint8)))


@pytest.mark.parametrize("make", [photograph, cartoon], ids=["photograph", "pure colours"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_a_copy_with_different_bytes_is_an_exact_duplicate(make: object, subsampling: str) -> None:
    samples = []
    for seed in range(10):
        payload = jpeg(make(seed), subsampling=subsampling)  # type: ignore[operator]
        samples += [
            sample(f"{seed}.jpg", payload, "cat"),
            sample(f"{seed} same.jpg", payload, "cat"),
        ]
        samples.append(sample(f"{seed} comment.jpg", with_comment(payload, b"mine"), "cat"))
        for ending in ("PNG", "BMP", "TIFF"):
            samples.append(
                sample(f"{seed}.{ending[:3].lower()}", encode(decoded(payload), ending), "cat")
            )
    cleaned, _ = clean(*samples)
    assert (cleaned.rows.num_rows, len(duplicates(cleaned))) == (10, 50)
    by_sha256 = {
        sha256_bytes(each.payload): each.source.partition(".")[0].partition(" ")[0]
        for each in samples
    }
    kept = {by_sha256[row["sha256"]]: row["sha256"] for row in cleaned.rows.to_pylist()}
    assert all(
        digest == min(other for other, name in by_sha256.items() if name == seed)
        for seed, digest in kept.items()
    )


def test_equal_luma_with_different_colours_is_not_a_duplicate() -> None:
    """The twin: digests of what was decoded first would call these equal."""
    luma, blue, red = photograph(1).convert("YCbCr").split()
    samples = [sample("a.jpg", jpeg(Image.merge("YCbCr", (luma, blue, red))), "cat")]
    samples.append(sample("b.jpg", jpeg(Image.merge("YCbCr", (luma, red, blue))), "cat"))
    cleaned, twice = clean(*samples)
    assert twice == {"a.jpg", "b.jpg"}
    assert (cleaned.rows.num_rows, duplicates(cleaned)) == (2, set())
    assert cleaned.rows["flags"].to_pylist() == [["near_duplicate"]] * 2


def test_only_one_of_several_identical_files_is_decoded_again_for_comparison() -> None:
    payloads = [jpeg(photograph(seed)) for seed in range(8)]
    samples = [sample(f"{index}.jpg", payloads[index % 4], "cat") for index in range(20)]
    cleaned, twice = clean(*samples)
    assert (len(duplicates(cleaned)), twice) == (16, set())
    _, twice = clean(*samples, sample("other.jpg", with_comment(payloads[0], b"mine"), "cat"))
    assert twice == {"0.jpg", "other.jpg"}


def test_dissimilar_images_are_read_only_once() -> None:
    samples = [sample(f"{seed}.jpg", jpeg(photograph(seed)), "cat") for seed in range(20)]
    samples += [sample(f"{seed}.png", encode(photograph(100 + seed)), "cat") for seed in range(20)]
    samples += [
        sample(f"{seed} worse.jpg", jpeg(photograph(seed), quality=40), "cat") for seed in range(10)
    ]
    cleaned, twice = clean(*samples)
    assert (cleaned.rows.num_rows, twice) == (50, set())


def test_images_of_low_contrast_are_compared_by_all_of_their_pixels() -> None:
    """Thumbnails of flat images do not distinguish them, and those of stripes hardly do."""
    stripes = Image.fromarray(
        np.repeat(np.linspace(0, 255, 150).astype(np.uint8), 200).reshape(150, 200)
    ).convert("RGB")
    for image in (
        Image.new("RGB", (200, 150), (255, 0, 0)),
        Image.new("RGB", (200, 150), (90, 80, 70)),
        stripes,
    ):
        payload = jpeg(image)
        samples = [
            sample("a.jpg", payload, "cat"),
            sample("b.png", encode(decoded(payload)), "cat"),
        ]
        assert len(duplicates(clean(*samples)[0])) == 1


@pytest.mark.parametrize(
    "later", [jpeg(photograph(5)), b"", None], ids=["another", "empty", "gone"]
)
def test_error_names_images_that_change_during_clean(later: bytes | None) -> None:
    payload = jpeg(photograph(1))
    samples = [
        sample("a.jpg", payload, "cat"),
        sample("b.jpg", with_comment(payload, b"mine"), "cat"),
    ]
    changed = [samples[0], *([] if later is None else [samples[1]._replace(payload=later)])]
    read = from_memory(changed)
    with pytest.raises(DataError, match=r"1 images changed while `clean` read them: b.jpg"):
        compare_samples(
            clean_samples(samples, PARAMS, 1),
            PARAMS,
            "image_classification",
            lambda wanted: digest_pixels(read(wanted), PARAMS, 1),
        )
