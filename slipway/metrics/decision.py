"""Chooses decision thresholds on labelled rows, for the largest F1 of a label or the lowest cost.

Candidate thresholds are midway between neighbouring probabilities, rounded to float32, because
every backend compares in float32.
"""

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
HALF = 0.5
_ALIKE = 1e-12  # relative difference of equal costs that were summed in another order


def best_threshold(probabilities: NDArray[np.float32], is_own: NDArray[np.bool_]) -> float:
    """Return the threshold with the largest F1 of one label on these (N,) rows.

    If several are best, the one nearest to 1/2 is returned. Returns 1/2 if no row or every row has
    the label, because such rows determine no threshold.
    """
    if is_own.all() or not is_own.any():
        return HALF
    thresholds, given, hits = _candidates(probabilities, is_own)
    scores = 2 * hits[1:] / (given[1:] + is_own.sum())  # without the one above all rows
    is_best = scores >= scores.max() - _ALIKE
    return _nearest(thresholds[1:][is_best], HALF)


def cheapest_threshold(
    probabilities: NDArray[np.float32],
    is_own: NDArray[np.bool_],
    false_positive: float,
    false_negative: float,
) -> float:
    """Return the threshold with the lowest cost on these (N,) rows.

    If several are cheapest, the one nearest to the optimum for perfect probabilities is returned.
    That optimum is also returned without rows (Elkan 2001, "The Foundations of Cost-Sensitive
    Learning").
    """
    perfect = false_positive / (false_positive + false_negative)
    if not len(probabilities):
        return float(np.float32(perfect))
    thresholds, given, hits = _candidates(probabilities, is_own)
    costs = false_positive * (given - hits) + false_negative * (is_own.sum() - hits)
    is_best = costs <= costs.min() + _ALIKE * max(1.0, costs.min())
    return _nearest(thresholds[is_best], perfect)


def abstention(
    probabilities: NDArray[np.float32],
    is_own: NDArray[np.bool_],
    false_positive: float,
    false_negative: float,
    abstain: float,
) -> tuple[float, float] | None:
    """Return (lower, upper): abstaining is cheaper for probabilities in between; None if nowhere.

    The prediction is positive from the upper bound upwards, and negative below the lower bound.
    """
    if not len(probabilities):
        perfect = abstain / max(false_negative, 1e-12), 1 - abstain / max(false_positive, 1e-12)
        low, high = (float(np.float32(min(max(bound, 0.0), 1.0))) for bound in perfect)
        return (low, high) if low < high else None
    thresholds, given, hits = _candidates(probabilities, is_own)
    # Costs saved by answering the rows above (below) a threshold instead of abstaining on them.
    above = abstain * given - false_positive * (given - hits)
    below = abstain * (len(is_own) - given) - false_negative * (is_own.sum() - hits)
    high = _nearest(thresholds[above >= above.max() - _ALIKE], 1.0)
    low = _nearest(thresholds[below >= below.max() - _ALIKE], 0.0)
    return (low, high) if low < high else None


def _candidates(
    probabilities: NDArray[np.float32], is_own: NDArray[np.bool_]
) -> tuple[Float, NDArray[np.int64], NDArray[np.int64]]:
    """Return (thresholds, rows, hits), each (C,); the thresholds decrease.

    `rows` is the number of rows that reach a threshold, `hits` the number of these that have the
    label. The first threshold is above every row.
    """
    order = np.argsort(-probabilities, kind="stable")
    falling = probabilities[order].astype(np.float64)
    is_end = np.append(falling[1:] < falling[:-1], True)  # the last row of each probability
    following = np.append(falling[1:], 0.0)
    middles = ((falling + following) / 2).astype(np.float32).astype(np.float64)
    # Rounding to float32 must not move a row to the other side of a threshold.
    thresholds = np.where((middles > following) & (middles <= falling), middles, falling)[is_end]
    above = float(np.nextafter(np.float32(falling[0]), np.float32(2)))
    given = np.flatnonzero(is_end) + 1
    hits = np.cumsum(is_own[order])[is_end]
    return (
        np.append(above, thresholds),
        np.append(0, given).astype(np.int64),
        np.append(0, hits).astype(np.int64),
    )


def _nearest(thresholds: Float, wanted: float) -> float:
    return float(thresholds[np.abs(thresholds - wanted).argmin()])
