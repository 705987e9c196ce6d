"""Assigns units to splits by random numbers, drawn from each unit's key and the seed.

A unit is a set of rows that must stay in one split (see `units`). `stable` compares the number with
the fractions: a unit's split depends on nothing else, and the fractions are met on average. `exact`
sorts the units of each class by their numbers and cuts at the exact fractions: a new row may move
the units at the cuts. If a cut leaves a part without a row, because the class is small or a unit is
large, the part gets one unit of another part.
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


def assign_stable(units: Units, fractions: Sequence[float], seed: int, stream: str) -> Int:
    """Return the part of each row, (N,), from its unit's number and the cumulative fractions."""
    numbers = uniform(seed, 0, units.keys, stream)
    parts = np.searchsorted(np.cumsum(fractions)[:-1], numbers, side="right")
    return parts.astype(np.int64)[units.of_row]


def assign_exact(
    rows: pa.Table,
    units: Units,
    fractions: Sequence[float],
    seed: int,
    stream: str,
    *,
    is_filled: bool = False,
) -> Int:
    """Return the part of each row, (N,), with exact fractions per class or decile of the target.

    With `is_filled` no part is empty, or without a class, that has as many units as there are
    parts.
    """
    has_classes = rows["label"].null_count < rows.num_rows
    strata = _classes(rows, units) if has_classes else _target_bins(rows, units)
    sizes = units.sizes
    order = np.lexsort((units.keys, uniform(seed, 0, units.keys, stream), strata))
    starts = np.searchsorted(strata[order], np.arange(strata.max() + 2))
    parts = np.zeros(len(sizes), np.int64)
    owed = np.zeros(len(fractions))
    for begin, end in itertools.pairwise(starts):
        chosen = order[begin:end]
        parts[chosen] = _cut(sizes[chosen], fractions, owed)
        if is_filled and has_classes:
            _fill(parts, chosen, sizes, fractions)
    if is_filled and not has_classes:
        _fill(parts, order, sizes, fractions)
    return parts[units.of_row]


def _fill(parts: Int, chosen: Int, sizes: Int, fractions: Sequence[float]) -> None:
    """Give each empty part of the `chosen` units one unit, if there are enough units.

    It comes from the part with the most units, and is the one whose size is the closest to that of
    the part.
    """
    if len(chosen) < len(fractions):
        return
    for part, fraction in enumerate(fractions):
        counts = np.bincount(parts[chosen], minlength=len(fractions))
        if not counts[part]:
            spare = chosen[parts[chosen] == counts.argmax()]
            excess = np.abs(sizes[spare] - fraction * sizes[chosen].sum())
            parts[spare[excess.argmin()]] = part


def largest_remainder(
    total: int, fractions: Sequence[float], owed: Sequence[float] = ()
) -> list[int]:
    """Divide `total` into whole numbers in proportion to `fractions`, which sum to 1.

    Each part is rounded down; the rest goes to the largest remainders. Ties go to the part that has
    lost most by rounding so far (`owed`); otherwise the first part would gain in every stratum.
    """
    debts = owed if len(owed) else [0.0] * len(fractions)
    exact = [total * share for share in fractions]
    counts = [int(value + 1e-9) for value in exact]
    remainders = [round(value - count, 9) for value, count in zip(exact, counts, strict=True)]
    order = sorted(
        range(len(fractions)),
        key=lambda index: (-remainders[index], -round(float(debts[index]), 9), index),
    )
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _cut(sizes: Int, fractions: Sequence[float], owed: NDArray[np.float64]) -> Int:
    """Return the part of each unit, (U,), by the position of its middle row, and update `owed`."""
    total = int(sizes.sum())
    counts = largest_remainder(total, fractions, owed.tolist())
    owed += total * np.asarray(fractions) - counts
    middles = np.cumsum(sizes) - sizes / 2
    return np.searchsorted(np.cumsum(counts)[:-1], middles, side="right").astype(np.int64)


def _classes(rows: pa.Table, units: Units) -> Int:
    """Return the most frequent class of each unit, (U,); the first name wins a tie."""
    found, names = codes(rows["label"])
    rank = np.empty(len(names), np.int64)
    rank[pc.array_sort_indices(names).to_numpy()] = np.arange(len(names))
    pairs, counts = np.unique(units.of_row * len(names) + rank[found], return_counts=True)
    unit, label = np.divmod(pairs, len(names))
    order = np.lexsort((label, -counts, unit))
    _, first = np.unique(unit[order], return_index=True)
    return np.asarray(label[order][first])


def _target_bins(rows: pa.Table, units: Units) -> Int:
    """Return the decile of each unit's mean target, among all units, (U,)."""
    means = np.bincount(units.of_row, weights=rows["target"].to_numpy()) / units.sizes
    num_bins = max(1, min(_MAX_BINS, len(means) // _UNITS_PER_BIN))
    bins = np.empty(len(means), np.int64)
    edges = np.array([len(means) * index // num_bins for index in range(1, num_bins)], np.int64)
    bins[np.lexsort((units.keys, means))] = np.searchsorted(
        edges, np.arange(len(means)), side="right"
    )
    return bins
