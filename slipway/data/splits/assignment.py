"""Assignment: which part each unit goes to, by a random number that depends on its key and the seed alone.

`stable` compares that number with the shares: a unit's part depends on nothing but itself, and shares are met on average.
`exact` puts the units of each class in the order of their numbers and cuts at the exact shares: a new row may move those at the cuts.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.randomness import uniform
from slipway.data.splits.units import Int, Units, codes

_MAX_BINS = 10
_UNITS_PER_BIN = 20


def assign_stable(units: Units, shares: Sequence[float], seed: int, stream: str) -> Int:
    """(N,) the part of each row, by comparing its unit's number with the cumulated fractions."""
    parts = np.searchsorted(
        np.cumsum(shares)[:-1], uniform(seed, 0, units.keys, stream), side="right"
    )
    return parts.astype(np.int64)[units.of_row]


def assign_exact(
    rows: pa.Table, units: Units, shares: Sequence[float], seed: int, stream: str
) -> Int:
    """(N,) the part of each row, with exact fractions per class or per tenth of the target."""
    strata, sizes = _strata(rows, units), units.sizes
    order = np.lexsort((units.keys, uniform(seed, 0, units.keys, stream), strata))
    starts = np.searchsorted(strata[order], np.arange(strata.max() + 2))
    parts, owed = np.zeros(len(sizes), np.int64), np.zeros(len(shares))
    for begin, end in itertools.pairwise(starts):
        chosen = order[begin:end]
        parts[chosen] = _cut(sizes[chosen], shares, owed)
    return parts[units.of_row]


def largest_remainder(total: int, shares: Sequence[float], owed: Sequence[float] = ()) -> list[int]:
    """`total` in whole parts by `shares` (which sum to 1): each rounded down, what is left to the largest remainders.

    Of equal remainders the part that is `owed` most is first, otherwise the first would gain in every stratum.
    """
    debts = owed if len(owed) else [0.0] * len(shares)
    exact = [total * share for share in shares]
    counts = [int(value + 1e-9) for value in exact]
    remainders = [round(value - count, 9) for value, count in zip(exact, counts, strict=True)]
    order = sorted(
        range(len(shares)),
        key=lambda index: (-remainders[index], -round(float(debts[index]), 9), index),
    )
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _cut(sizes: Int, shares: Sequence[float], owed: NDArray[np.float64]) -> Int:
    """(U,) the part of each unit, by the position of its middle row. Updates `owed`."""
    total = int(sizes.sum())
    counts = largest_remainder(total, shares, owed.tolist())
    owed += total * np.asarray(shares) - counts
    middles = np.cumsum(sizes) - sizes / 2
    return np.searchsorted(np.cumsum(counts)[:-1], middles, side="right").astype(np.int64)


def _strata(rows: pa.Table, units: Units) -> Int:
    """(U,) the stratum of each unit: its most frequent class, or the tenth of its mean target."""
    return (
        _target_bins(rows, units)
        if rows["label"].null_count == rows.num_rows
        else _classes(rows, units)
    )


def _classes(rows: pa.Table, units: Units) -> Int:
    """(U,) the most frequent class of each unit; of equally frequent ones the first by name."""
    found, names = codes(rows["label"])
    rank = np.empty(len(names), np.int64)
    rank[pc.array_sort_indices(names).to_numpy()] = np.arange(len(names))
    pairs, counts = np.unique(units.of_row * len(names) + rank[found], return_counts=True)
    unit, label = np.divmod(pairs, len(names))
    order = np.lexsort((label, -counts, unit))
    _, first = np.unique(unit[order], return_index=True)
    classes: Int = label[order][first]
    return classes


def _target_bins(rows: pa.Table, units: Units) -> Int:
    means = np.bincount(units.of_row, weights=rows["target"].to_numpy()) / units.sizes
    num_bins = max(1, min(_MAX_BINS, len(means) // _UNITS_PER_BIN))
    bins = np.empty(len(means), np.int64)
    # By rank: unit number i of n is in bin b when n * b // num_bins <= i.
    edges = np.array([len(means) * index // num_bins for index in range(1, num_bins)], np.int64)
    bins[np.lexsort((units.keys, means))] = np.searchsorted(
        edges, np.arange(len(means)), side="right"
    )
    return bins
