"""Tests of stateless random numbers: pure, uniform, and independent in all four arguments."""

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.engine.randomness import id_keys, permutation, uniform

IDS = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(20_000)]
KEYS = id_keys(IDS)


def correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def test_the_random_number_of_a_key_does_not_depend_on_the_other_keys() -> None:
    everything = uniform(7, 3, KEYS, "x")
    assert np.array_equal(uniform(7, 3, KEYS[::-1], "x"), everything[::-1])
    assert np.array_equal(uniform(7, 3, KEYS[5:6], "x"), everything[5:6])


def test_equal_rows_draw_different_numbers_and_the_first_those_of_its_digest() -> None:
    digest = IDS[0][:32]
    ids = [digest, *(f"{digest}-{number}" for number in range(2, 1000))]
    keys = id_keys(ids)
    assert keys[0] == id_keys([IDS[0]])[0]
    assert len(np.unique(keys)) == 999
    assert np.isin(keys[1:], KEYS).sum() == 0
    other = id_keys([*(f"{name[:32]}-2" for name in IDS[1:1001])])
    assert abs(correlation(uniform(7, 0, keys, "x")[1:], uniform(7, 0, other, "x")[:998])) < 0.1


def splitmix64(state: int) -> int:
    """Return SplitMix64's next output after `state`, computed with Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_splitmix64_matches_the_published_values() -> None:
    """The expected values are the first outputs of the authors' C code for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567 + step * 0x9E3779B97F4A7C15) for step in range(3)] == published


def test_random_numbers_are_the_same_on_every_machine() -> None:
    start = int.from_bytes(hashlib.sha256(b"7/3/x").digest()[:8], "little")
    expected = [(splitmix64(splitmix64(int(key) ^ start)) >> 11) / 2**53 for key in KEYS[:100]]
    assert uniform(7, 3, KEYS[:100], "x").tolist() == expected


def test_random_numbers_are_distributed_uniformly() -> None:
    numbers = np.sort(uniform(7, 0, KEYS, "x"))
    assert 0 <= numbers[0] <= numbers[-1] < 1
    distance = np.abs(numbers - (np.arange(len(numbers)) + 0.5) / len(numbers)).max()
    assert distance < 1.95 / np.sqrt(len(numbers))  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("other", [(8, 0, "x"), (7, 1, "x"), (7, 0, "y")])
def test_random_numbers_of_different_seeds_epochs_and_streams_are_independent(
    other: tuple[int, int, str],
) -> None:
    seed, epoch, stream = other
    assert abs(
        correlation(uniform(7, 0, KEYS, "x"), uniform(seed, epoch, KEYS, stream))
    ) < 4 / np.sqrt(len(KEYS))


def test_random_numbers_of_neighbouring_keys_are_independent() -> None:
    numbers = uniform(7, 0, np.arange(20_000, dtype=np.uint64), "x")
    assert abs(correlation(numbers[:-1], numbers[1:])) < 4 / np.sqrt(len(numbers))


def test_a_permutation_holds_every_index_and_depends_on_the_epoch() -> None:
    first, second = permutation(7, 0, KEYS), permutation(7, 1, KEYS)
    assert np.array_equal(np.sort(first), np.arange(len(KEYS)))
    assert not np.array_equal(first, second)


def test_a_permutation_depends_on_the_ids_and_not_on_their_positions() -> None:
    backwards = KEYS[::-1]
    assert np.array_equal(KEYS[permutation(7, 0, KEYS)], backwards[permutation(7, 0, backwards)])
