"""ROC-AUC and average precision of bootstrap resamples, from a single sort.

Rows are sorted by score once. The metrics of a resample then follow from running sums of how often
it contains each row. Rows with equal scores share a threshold, in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True)
class RankedClass:
    """N rows ordered by decreasing probability of one class; P of them have the class."""

    order: NDArray[np.int32]  # (N,) row numbers
    own: NDArray[np.int32]  # (P,) positions in `order` of the rows with the class
    first: NDArray[np.int32]  # (P,) first position with the same score
    end: NDArray[np.int32]  # (P,) position after the last one
    own_until_end: NDArray[np.int32]  # (P,) own rows before `end`


def rank_classes(targets: NDArray[np.int64], probabilities: Float) -> list[RankedClass]:
    """Rank the rows for each class that some but not all rows have; for two classes, the second.

    `targets` are class indices (N,), `probabilities` (N, K).
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    sides = ((targets == index, probabilities[:, index]) for index in classes)
    return [_ranked(is_own, scores) for is_own, scores in sides if 0 < is_own.sum() < len(targets)]


def rank_labels(is_own: NDArray[np.bool_], probabilities: Float) -> list[RankedClass]:
    """Sort the rows by the probability of each label that some but not all rows have.

    `is_own` (N, K) says which row has which label, `probabilities` is (N, K). `ranking_scores`
    takes the result.
    """
    sides = zip(is_own.T, probabilities.T, strict=True)
    return [_ranked(own, scores) for own, scores in sides if 0 < own.sum() < len(own)]


def ranking_scores(classes: Sequence[RankedClass], counts: Float) -> tuple[Float, Float]:
    """Return ROC-AUC and average precision of each resample, both (S,): means over `classes`.

    `counts` (S, N) is how often each resample contains each row. The mean omits a class that all
    rows of a resample have, or none; it is NaN if no class remains.

    ROC-AUC: fraction of pairs of an own and another row in which the own one scores higher, ties
    counting half (Hanley and McNeil 1982). Average precision: sum over thresholds of
    (R_n - R_(n-1)) P_n with precision P and recall R, not interpolated, as in scikit-learn.
    """
    areas, precisions, num_classes = (np.zeros(len(counts)) for _ in range(3))
    for ranked in classes:
        area, precision = _scores_of_class(ranked, counts)
        is_defined = np.isfinite(area)
        num_classes += is_defined
        areas += np.where(is_defined, area, 0)
        precisions += np.where(is_defined, precision, 0)
    return _mean(areas, num_classes), _mean(precisions, num_classes)


def _ranked(is_own: NDArray[np.bool_], scores: Float) -> RankedClass:
    order = np.argsort(-scores, kind="stable")
    own, rising = np.flatnonzero(is_own[order]), -scores[order]
    first, end = (np.searchsorted(rising, rising[own], side=side) for side in ("left", "right"))
    parts = (order, own, first, end, np.searchsorted(own, end))
    return RankedClass(*(part.astype(np.int32) for part in parts))


def _scores_of_class(ranked: RankedClass, counts: Float) -> tuple[Float, Float]:
    sorted_counts = counts.take(ranked.order, axis=1)
    before = _running_sums(sorted_counts)  # (S, N + 1)
    own = sorted_counts.take(ranked.own, axis=1)  # (S, P)
    own_before = _running_sums(own)
    num_rows, num_own = before[:, -1], own_before[:, -1]
    until_end = before.take(ranked.end, axis=1)
    # Rows ranked below each row of the class; ties count half. Rows of the class contribute
    # num_own ** 2 / 2 of them.
    below = num_rows[:, None] - (before.take(ranked.first, axis=1) + until_end) / 2
    area = (own * below).sum(axis=1) - num_own**2 / 2
    precision = np.divide(
        own_before.take(ranked.own_until_end, axis=1),
        until_end,
        out=np.zeros_like(own),
        where=until_end > 0,
    )
    pairs = num_own * (num_rows - num_own)
    return _mean(area, pairs), _mean((own * precision).sum(axis=1), np.where(pairs > 0, num_own, 0))


def _running_sums(numbers: Float) -> Float:
    """Return (S, N + 1) the cumulative sums of (S, N) numbers, beginning with 0."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1))
    np.cumsum(numbers, axis=1, out=sums[:, 1:])
    return sums


def _mean(total: Float, number: Float) -> Float:
    """Return total / number; NaN where `number` is 0."""
    return np.asarray(np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0))
