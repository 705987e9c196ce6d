"""Quantile bins with ties, constants and missing values, and merging of rare bins."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.histogram import bins_of, category_bins, equal_edges, merge_rare


def _counts(numbers: NDArray[Any], edges: NDArray[np.float32]) -> list[int]:
    counts: list[int] = np.bincount(
        bins_of(numbers.astype(np.float32), edges), minlength=len(edges) + 2
    ).tolist()
    return counts


def test_bins_hold_equal_numbers_of_distinct_values() -> None:
    numbers = np.random.default_rng(1).permutation(np.arange(1000)).astype(np.float32)
    assert _counts(numbers, equal_edges(numbers)) == [100] * 10 + [0]


def test_common_number_gets_its_own_bin() -> None:
    numbers = np.concatenate([np.zeros(600), np.arange(1, 401)]).astype(np.float32)
    edges = equal_edges(numbers)
    counts = _counts(numbers, edges)
    assert counts[bins_of(np.zeros(1, np.float32), edges)[0]] == 600
    assert bins_of(np.array([-1e-30, 0, 1e-30], np.float32), edges).tolist() == [0, 1, 2]


def test_a_constant_column_gets_its_own_bin_between_two_empty_bins() -> None:
    edges = equal_edges(np.full(500, 3.25, np.float32))
    assert _counts(np.array([3.0, 3.25, 3.25, 3.5]), edges) == [1, 2, 1, 0]


def test_bins_need_at_least_20_rows_each() -> None:
    numbers = np.arange(60, dtype=np.float32)
    assert _counts(numbers, equal_edges(numbers)) == [20, 20, 20, 0]
    assert len(equal_edges(np.arange(5, dtype=np.float32))) == 0


def test_missing_numbers_fall_into_the_last_bin_and_set_no_edge() -> None:
    numbers = np.concatenate([np.arange(100.0), np.full(50, np.nan)]).astype(np.float32)
    edges = equal_edges(numbers)
    assert _counts(numbers, edges) == [20] * 5 + [50]
    assert _counts(np.full(4, np.nan), equal_edges(np.full(30, np.nan, np.float32))) == [0, 4]


def test_unknown_and_missing_codes_fall_into_the_last_bin() -> None:
    assert category_bins(np.array([0, 2, 3, -1, np.nan], np.float32), 3).tolist() == [0, 2, 3, 3, 3]


@pytest.mark.parametrize("ordered", [True, False])
def test_merging_rare_bins_keeps_every_row_and_leaves_no_rare_bin(ordered: bool) -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        window, reference = (
            random.poisson(random.gamma(0.5, 40, 12)),
            random.poisson(random.gamma(0.5, 400, 12)),
        )
        merged = merge_rare(window, reference, ordered=ordered)
        assert (merged[0].sum(), merged[1].sum()) == (window.sum(), reference.sum())
        smaller = min(window.sum(), reference.sum()) / max(1, window.sum() + reference.sum())
        assert len(merged[0]) <= 1 or ((merged[0] + merged[1]) * smaller).min() >= 20


def test_rare_ordered_bins_merge_with_neighbours_and_unordered_ones_with_the_rarest_bin() -> None:
    window, reference = np.array([100, 1, 100, 2]), np.array([1000, 10, 1000, 10])
    assert [part.tolist() for part in merge_rare(window, reference, ordered=True)] == [
        [100, 103],
        [1000, 1020],
    ]
    assert [part.tolist() for part in merge_rare(window, reference, ordered=False)] == [
        [103, 100],
        [1020, 1000],
    ]
