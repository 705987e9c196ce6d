"""Two sets of answers to the same rows: is one better, or is it chance?

Each resample scores both on the same rows, so that what makes rows hard or easy cancels: the interval of the
difference is much narrower than the intervals of the two suggest. Where no answer differs it has no width.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from slipway.kinds.registry import Task, is_classification, metric_names
from slipway.metrics.scores import (
    ClassAnswers,
    Resampling,
    ValueAnswers,
    percentiles,
    resampled_rows,
    why_absent,
)
from slipway.system.contract import Contract
from slipway.system.errors import MetricError

_NEGLIGIBLE = 1e-18  # of a sum that is at least 1


class PairedDifference(Contract):
    """How far a metric moved from one set of answers to another, over the same rows."""

    metric: str
    before: float
    after: float
    difference: (
        float  # after - before: above 0 is better for an accuracy, worse for a loss or an error
    )
    low: float  # of the difference
    high: float
    confidence: float
    rows: int
    p_value: (
        float | None
    )  # of McNemar's exact test, two-sided; None for other metrics than the accuracy


def paired_difference(
    task: Task,
    metric: str,
    targets: ArrayLike,
    before: ArrayLike,
    after: ArrayLike,
    resampling: Resampling,
    *,
    top_k: int | None = None,
) -> PairedDifference:
    """The difference of `metric` with its paired bootstrap interval (percentiles), and for the accuracy its p-value.

    `targets` (N,), `before` and `after` (N, K) probabilities, or (N, 1) values: as `slipway.metrics.scores.measure` takes
    them; `top_k` is needed for `top_k_accuracy` alone. Raises MetricError for answers that are none, of different
    shapes, and where these rows do not define the metric.
    """
    first, second = (_answers(task, targets, outputs, top_k) for outputs in (before, after))
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
    return PairedDifference(
        metric=metric,
        before=old,
        after=new,
        difference=new - old,
        low=low,
        high=high,
        confidence=resampling.confidence,
        rows=first.num_rows,
        p_value=_accuracy_p_value(first, second) if metric == "accuracy" else None,
    )


def mcnemar_p_value(num_lost: int, num_gained: int) -> float:
    """Two-sided p-value of `num_lost` rows that only the first was right on, against `num_gained` that only the second was.

    Q. McNemar, Note on the sampling error of the difference between correlated proportions or percentages,
    Psychometrika 12 (1947) 153-157; exact: rows on which one alone is right fall to either side with probability 1/2.
    """
    total, fewer = num_lost + num_gained, min(num_lost, num_gained)
    logarithm = (
        math.lgamma(total + 1)
        - math.lgamma(fewer + 1)
        - math.lgamma(total - fewer + 1)
        - total * math.log(2)
    )
    terms, term = 1.0, 1.0  # binomial coefficients from `fewer` down to 0, over the first
    for number in range(fewer, 0, -1):
        term *= number / (total - number + 1)
        terms += term
        if term < _NEGLIGIBLE:
            break
    return min(1.0, 2 * math.exp(logarithm) * terms)


def _answers(
    task: Task, targets: ArrayLike, outputs: ArrayLike, top_k: int | None
) -> ClassAnswers | ValueAnswers:
    return (
        ClassAnswers(targets, outputs, top_k)
        if is_classification(task)
        else ValueAnswers(targets, outputs)
    )


def _check_fit(
    task: Task,
    metric: str,
    first: ClassAnswers | ValueAnswers,
    second: ClassAnswers | ValueAnswers,
    top_k: int | None,
) -> None:
    if metric not in metric_names(task):
        raise MetricError(
            f"{metric!r} is no metric of {task}, expected one of {', '.join(metric_names(task))}."
        )
    if not isinstance(first, ClassAnswers) or not isinstance(second, ClassAnswers):
        return
    if first.num_classes != second.num_classes:
        raise MetricError(
            f"{first.num_classes} classes before and {second.num_classes} after, expected the same classes."
        )
    absent = why_absent(task, first.targets, first.num_classes, top_k)
    if metric in absent:
        raise MetricError(f"{metric} is not defined: {absent[metric]}.")


def _accuracy_p_value(
    first: ClassAnswers | ValueAnswers, second: ClassAnswers | ValueAnswers
) -> float | None:
    if not isinstance(first, ClassAnswers) or not isinstance(second, ClassAnswers):
        return None
    num_lost, num_gained = (
        (first.is_right & ~second.is_right).sum(),
        (second.is_right & ~first.is_right).sum(),
    )
    return mcnemar_p_value(int(num_lost), int(num_gained))
