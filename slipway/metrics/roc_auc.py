"""How well the probabilities of a class put its rows before the others: ROC-AUC and average precision, on numpy alone.

Scores are sorted once; what a choice of the rows scores then follows from how often each row is in it, by running
sums. So a bootstrap costs no sorting. Rows with equal scores are one threshold, in whatever order they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True)
class RankedClass:
    """The rows by falling probability of one class, and the places of its P own rows among them; all int32."""

    order: NDArray[np.int32]  # (N,) rows
    own: NDArray[np.int32]  # (P,) places in `order`
    first: NDArray[np.int32]  # (P,) where the rows with the same score begin
    end: NDArray[np.int32]  # (P,) where they have ended
    own_until_end: NDArray[np.int32]  # (P,) own rows before `end`


def rank_classes(targets: NDArray[np.int64], probabilities: Float) -> list[RankedClass]:
    """One entry for each class that some rows have and some have not; of two classes only the second.

    `targets` (N,) class indices, `probabilities` (N, K).
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    sides = ((targets == index, probabilities[:, index]) for index in classes)
    return [_ranked(is_own, scores) for is_own, scores in sides if 0 < is_own.sum() < len(targets)]


def ranking_scores(classes: Sequence[RankedClass], counts: Float) -> tuple[Float, Float]:
    """ROC-AUC and average precision, (S,) each: means over `classes`; `counts` (S, N) is how often each row is there.

    A class that has all the rows of a choice, or none, is left out of the mean; NaN where no class is left.

    ROC-AUC: the share of pairs of an own and another row in which the own one has the higher score, equal scores
    counting half (Hanley and McNeil 1982). Average precision: the sum over thresholds of (R_n - R_(n-1)) P_n, with
    precision P and recall R, without interpolation, as scikit-learn's.
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
    before, own = (
        _running_sums(sorted_counts),
        sorted_counts.take(ranked.own, axis=1),
    )  # (S, N + 1), (S, P)
    own_before = _running_sums(own)
    num_rows, num_own = before[:, -1], own_before[:, -1]
    until_end = before.take(ranked.end, axis=1)
    # Of the rows at or below the middle of each own row's equals, those of the class itself make num_own ** 2 / 2.
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
    """(S, N) -> (S, N + 1), the first 0."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1))
    np.cumsum(numbers, axis=1, out=sums[:, 1:])
    return sums


def _mean(total: Float, number: Float) -> Float:
    """NaN where there is nothing."""
    mean: Float = np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0)
    return mean
