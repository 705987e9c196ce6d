"""Paired comparison of two sets of predictions on the same rows.

Each resample scores both sets on the same rows, so the difficulty of rows cancels out. The interval
of the difference is much narrower than the two separate intervals suggest; it has width 0 if no
prediction differs.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import (
    Resampling,
    percentiles,
    resampled_rows,
    why_absent,
)
from slipway.system.contract import Contract
from slipway.system.errors import MetricError

_NEGLIGIBLE = 1e-18  # terms below it do not change a sum of at least 1


class PairedDifference(Contract):
    """Change of a metric from one set of predictions to another, on the same rows."""

    metric: str
    before: float
    after: float
    difference: float  # after - before
    low: float  # lower bound of the difference
    high: float
    confidence: float
    rows: int
    p_value: float | None  # McNemar's exact test, two-sided; None except for a fraction of rows


def paired_difference(
    task: Task,
    metric: str,
    targets: ArrayLike,
    before: ArrayLike,
    after: ArrayLike,
    resampling: Resampling,
    *,
    top_k: int | None = None,
    thresholds: tuple[Sequence[float] | None, Sequence[float] | None] = (None, None),
) -> PairedDifference:
    """Return the difference of `metric` with its paired bootstrap interval (percentiles).

    Arguments are as for `slipway.metrics.scores.measure`; only `top_k_accuracy` needs `top_k`.
    `thresholds` is a pair: those of `before` and those of `after`. Raises MetricError for invalid
    predictions, different shapes, or a metric that is undefined on these rows.
    """
    make_answers = kind_of(task).target.load_part("scores")
    first, second = (
        make_answers(targets, outputs, top_k, own)
        for outputs, own in zip((before, after), thresholds, strict=True)
    )
    _check_fit(task, metric, first, second, top_k)
    every_row = np.arange(first.num_rows)[None]
    old, new = (
        float(answers.scores(every_row, [metric])[metric][0]) for answers in (first, second)
    )
    chunks = [
        second.scores(chosen, [metric])[metric] - first.scores(chosen, [metric])[metric]
        for chosen in resampled_rows(first.num_rows, resampling)
    ]
    low, high = percentiles(np.concatenate(chunks), resampling.confidence)
    p_value = None
    target = kind_of(task).target
    if metric == target.headline and target.headline_is_fraction:
        is_lost, is_gained = first.is_right & ~second.is_right, second.is_right & ~first.is_right
        p_value = mcnemar_p_value(int(is_lost.sum()), int(is_gained.sum()))
    return PairedDifference(
        metric=metric,
        before=old,
        after=new,
        difference=new - old,
        low=low,
        high=high,
        confidence=resampling.confidence,
        rows=first.num_rows,
        p_value=p_value,
    )


def mcnemar_p_value(num_lost: int, num_gained: int) -> float:
    """Return the exact two-sided p-value of McNemar's test (Psychometrika 12, 1947, 153-157).

    `num_lost` rows are correct only in the first set, `num_gained` only in the second. Under the
    null hypothesis each of these rows belongs to either group with probability 1/2.
    """
    total, fewer = num_lost + num_gained, min(num_lost, num_gained)
    logarithm = (
        math.lgamma(total + 1)
        - math.lgamma(fewer + 1)
        - math.lgamma(total - fewer + 1)
        - total * math.log(2)
    )
    terms, term = 1.0, 1.0  # C(total, k) / C(total, fewer) for k = fewer, ..., 0, summed
    for number in range(fewer, 0, -1):
        term *= number / (total - number + 1)
        terms += term
        if term < _NEGLIGIBLE:
            break
    return min(1.0, 2 * math.exp(logarithm) * terms)


def _check_fit(
    task: Task,
    metric: str,
    first: Any,
    second: Any,
    top_k: int | None,
) -> None:
    known = kind_of(task).target.metrics
    if metric not in known:
        raise MetricError(
            f"{metric!r} is not a metric of {task}, expected one of {', '.join(known)}."
        )
    if first.num_classes != second.num_classes:
        raise MetricError(
            f"{first.num_classes} classes before and {second.num_classes} after, "
            "expected the same classes."
        )
    absent = why_absent(task, first.targets, first.num_classes, top_k)
    if metric in absent:
        raise MetricError(f"{metric} is not defined: {absent[metric]}.")
