"""Errors of a numeric target by ranges of the target with equal numbers of rows.

A single number hides a network that fails on the rare large targets.
"""

import numpy as np
from numpy.typing import ArrayLike

from slipway.artifacts.bundle import Metric
from slipway.metrics.calibration_error import equal_bins
from slipway.metrics.scores import Float, Resampling, ValueAnswers, percentiles, resampled_rows
from slipway.system.contract import Contract
from slipway.system.errors import MetricError


class TargetErrors(Contract):
    """Errors (value - target) in one range, in the target's unit."""

    low: float  # smallest and largest target of the range
    high: float
    mean_error: Metric  # above 0: values are too large
    mae: Metric
    rmse: Metric


def errors_by_target(
    targets: ArrayLike, values: ArrayLike, num_ranges: int, resampling: Resampling
) -> list[TargetErrors]:
    """Compute errors with bootstrap intervals by rising target.

    `targets` and `values` are as for `slipway.metrics.scores.ValueAnswers`. Rows with equal targets
    share a range, so there may be fewer than `num_ranges`.
    """
    if num_ranges < 1:
        raise MetricError(f"num_ranges is {num_ranges}, expected at least 1.")
    answers = ValueAnswers(targets, values)
    ranges = equal_bins(answers.targets, num_ranges)
    return [
        _range(answers.targets[ranges == index], answers.values[ranges == index], resampling)
        for index in np.unique(ranges)
    ]


def _range(targets: Float, values: Float, resampling: Resampling) -> TargetErrors:
    errors = values - targets
    rows = list(resampled_rows(len(errors), resampling))
    named = {"mean_error": errors, "mae": np.abs(errors), "rmse": errors**2}
    metrics = {}
    for name, numbers in named.items():
        means = np.concatenate(
            [numbers.mean(keepdims=True), *(numbers[chosen].mean(axis=1) for chosen in rows)]
        )
        found = np.sqrt(means) if name == "rmse" else means
        low, high = percentiles(found[1:], resampling.confidence)
        metrics[name] = Metric(
            value=float(found[0]),
            low=low,
            high=high,
            confidence=resampling.confidence,
            rows=len(errors),
        )
    return TargetErrors(low=float(targets.min()), high=float(targets.max()), **metrics)
