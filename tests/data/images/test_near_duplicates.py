"""Tests of near duplicates: only planted ones are found, in any order of the images."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from slipway.data.images.near_duplicates import (
    MIN_CORRELATION,
    DuplicatePairs,
    cluster_roots,
    find_pairs,
    find_pairs_by_hash,
    hashes,
)
from slipway.data.images.quality import measure

BITS = 8
SEEDS = range(60)


def photograph(seed: int) -> Image.Image:
    """Return noise of 200x150 px whose amplitude falls with frequency, as in photographs."""
    random = np.random.default_rng(seed)
    across, down = np.meshgrid(np.fft.fftfreq(200), np.fft.fftfreq(150))
    falling = np.maximum(np.hypot(across, down), 1 / 200) ** -1.2
    layers = [
        np.fft.ifft2(np.fft.fft2(random.normal(size=(150, 200))) * falling).real for _ in range(3)
    ]
    pixels = np.stack([127 + 45 * layer / layer.std() for layer in layers], axis=2)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    return measure(np.asarray(image.convert("RGBA")))[1].ravel()


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


def cropped(image: Image.Image, share: float, seed: int) -> Image.Image:
    width, height = round(image.width * (1 - share)), round(image.height * (1 - share))
    left, top = (
        np.random.default_rng(seed)
        .integers(0, [image.width - width + 1, image.height - height + 1])
        .tolist()
    )
    return image.crop((left, top, left + width, top + height))


PLANTED: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "quality 30": lambda image, seed: recompressed(image, 30),
    "quality 95": lambda image, seed: recompressed(image, 95),
    "half the size": lambda image, seed: image.resize((100, 75), Image.Resampling.BICUBIC),
    "twice the size": lambda image, seed: image.resize((400, 300), Image.Resampling.LANCZOS),
    "two hundredths less": lambda image, seed: cropped(image, 0.02, seed),
    "five hundredths less": lambda image, seed: cropped(image, 0.05, seed),
    "darker": lambda image, seed: ImageEnhance.Brightness(image).enhance(0.7),
    "brighter": lambda image, seed: ImageEnhance.Brightness(image).enhance(1.2),
}


@pytest.fixture(name="originals", scope="module")
def _originals() -> NDArray[np.uint8]:
    return np.stack([thumbnail(photograph(seed)) for seed in SEEDS])


@pytest.mark.process
@pytest.mark.parametrize("kind", PLANTED)
def test_only_planted_copies_are_near_duplicates(kind: str, originals: NDArray[np.uint8]) -> None:
    copies = np.stack([thumbnail(PLANTED[kind](photograph(seed), seed)) for seed in SEEDS])
    pairs = find_pairs(np.concatenate([originals, copies]), BITS).pairs.tolist()
    expected = [[index, index + len(originals)] for index in range(len(originals))]
    assert sum(pair in pairs for pair in expected) >= 0.95 * len(expected)
    assert [pair for pair in pairs if pair not in expected] == []


def test_mirrored_images_are_not_near_duplicates(originals: NDArray[np.uint8]) -> None:
    mirrored = originals.reshape(-1, 16, 16)[:, :, ::-1].reshape(-1, 256)
    assert len(find_pairs(np.concatenate([originals, mirrored]), BITS).pairs) == 0


def test_near_duplicates_do_not_depend_on_the_order_of_pictures(
    originals: NDArray[np.uint8],
) -> None:
    noisy = np.clip(
        originals + np.random.default_rng(0).integers(-9, 10, originals.shape), 0, 255
    ).astype(np.uint8)
    pictures = np.concatenate([originals, noisy])
    expected = {tuple(pair) for pair in find_pairs(pictures, BITS).pairs.tolist()}
    assert expected
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(pictures))
        found = order[find_pairs(pictures[order], BITS).pairs]
        assert {tuple(sorted(pair)) for pair in found.tolist()} == expected


def noisy(originals: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    """Return the pictures, and a copy of each with Gaussian noise of `sigma` grey levels."""
    noise = np.random.default_rng(0).normal(0, sigma, originals.shape)
    return np.concatenate([originals, np.clip(originals + noise, 0, 255).astype(np.uint8)])


def test_near_duplicates_differ_in_at_most_the_allowed_number_of_bits(
    originals: NDArray[np.uint8],
) -> None:
    pictures = noisy(originals, 9)
    codes = hashes(pictures).codes
    for max_bits in (0, 4, 8):
        pairs = find_pairs(pictures, max_bits).pairs
        one_way, other_way = (
            codes[pairs[:, side]] ^ codes[pairs[:, 1 - side], :1] for side in (0, 1)
        )
        distances = np.bitwise_count(np.concatenate([one_way, other_way], axis=1)).min(axis=1)
        assert distances.max(initial=0) == (max_bits if len(pairs) else 0)
        assert (len(pairs) > 0) == (max_bits > 0)


def test_pictures_with_similar_hashes_but_low_correlation_are_not_duplicates(
    originals: NDArray[np.uint8],
) -> None:
    pictures = noisy(originals, 25)
    near = find_pairs_by_hash(pictures, 16)
    correlations = [
        np.corrcoef(pictures[first], pictures[second])[0, 1] for first, second in near.tolist()
    ]
    assert (
        len([correlation for correlation in correlations if 0.7 < correlation < MIN_CORRELATION])
        > 5
    )
    assert len(find_pairs(pictures, 16).pairs) == 0


def test_the_hash_of_a_thumbnail_does_not_depend_on_the_others_in_its_batch(
    originals: NDArray[np.uint8],
) -> None:
    together = hashes(np.tile(originals, (80, 1)))
    for row in (0, 7, 4095, 4096, 4799):
        alone = hashes(originals[row % len(originals)][None])
        assert np.array_equal(together.codes[row], alone.codes[0])
        assert np.array_equal(together.weakest[row], alone.weakest[0])


def test_many_equal_pictures_form_one_cluster_without_comparing_all_pairs() -> None:
    crowd = np.tile(thumbnail(photograph(1)), (1000, 1))
    twins = find_pairs(crowd, BITS)
    assert len(twins.pairs) < 1000 * 100
    assert set(cluster_roots(twins, 1000).tolist()) == {0}


def test_constant_images_have_no_near_duplicates() -> None:
    assert len(find_pairs(np.full((50, 256), 90, np.uint8), BITS).pairs) == 0


def chain(length: int, correlation: float) -> DuplicatePairs:
    pairs = np.stack([np.arange(length - 1), np.arange(1, length)], axis=1)
    return DuplicatePairs(pairs, np.full(length - 1, correlation))


def test_cluster_roots_returns_the_smallest_row_of_each_cluster() -> None:
    twins = DuplicatePairs(np.array([[1, 4], [2, 3], [4, 5]]), np.array([0.99, 0.99, 0.99]))
    assert cluster_roots(twins, 7).tolist() == [-1, 1, 2, 2, 1, 1, -1]


def test_a_chain_of_similar_images_does_not_merge_the_data_set() -> None:
    weak = chain(1000, MIN_CORRELATION)
    assert np.bincount(cluster_roots(weak, 1000) + 1)[1:].max(initial=0) <= 20


def test_short_chains_and_large_clusters_of_true_copies_stay_whole() -> None:
    assert set(cluster_roots(chain(20, MIN_CORRELATION), 1000)[:20].tolist()) == {0}
    assert set(cluster_roots(chain(1000, 0.999), 1000).tolist()) == {0}


def test_zero_images_have_no_near_duplicates() -> None:
    assert len(find_pairs(np.zeros((0, 256), np.uint8), BITS).pairs) == 0
    assert len(find_pairs(np.zeros((1, 256), np.uint8), BITS).pairs) == 0
