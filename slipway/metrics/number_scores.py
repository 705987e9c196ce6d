"""Metrics of a numeric target in float64, with intervals, and conformal intervals of values."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration
from slipway.kinds.targets import NUMBER
from slipway.metrics.calibration_error import equal_bins
from slipway.metrics.scores import (
    Float,
    Int,
    Resampling,
    TargetErrors,
    metric_of,
    percentiles,
    requested,
    resampled_rows,
    samples,
)
from slipway.metrics.uncertainty import upper_quantile
from slipway.system.errors import MetricError


class NumberAnswers:
    """Validated numeric answers, which can be scored over any choice of their rows.

    `targets` and `values` are (N,) or (N, 1) in the target's unit. Raises MetricError for NaN,
    other shapes, or fewer than two rows, for which R2 is not defined.
    """

    num_classes = 0

    def __init__(
        self,
        targets: ArrayLike,
        values: ArrayLike,
        top_k: int | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.targets = _checked_values(targets, "targets")
        self.values = _checked_values(values, "values")
        if len(self.targets) != len(self.values):
            raise MetricError(
                f"{len(self.targets)} targets and {len(self.values)} values, "
                "expected one value for each target."
            )
        if len(self.targets) < 2:
            raise MetricError(
                "1 row, expected at least 2: R2 compares with the spread of the targets. "
                "Use a larger test split."
            )
        self.num_rows = len(self.targets)

    @staticmethod
    def baseline(train_targets: Float, num_rows: int, num_classes: int) -> Float:
        """Return the mean of the training targets, repeated for each row: (N,)."""
        return np.full(num_rows, train_targets.mean())

    @staticmethod
    def why_absent(targets: ArrayLike, num_classes: int, top_k: int | None) -> dict[str, str]:
        return {}  # two rows define every metric

    def metrics(self, resampling: Resampling, names: Collection[str] | None) -> dict[str, Metric]:
        wanted = requested(NUMBER.metrics, names)
        found = self.scores(np.arange(self.num_rows)[None], wanted)
        drawn = samples(self, wanted, resampling)
        return {
            name: metric_of(
                found[name],
                percentiles(drawn[name], resampling.confidence),
                resampling,
                self.num_rows,
            )
            for name in wanted
        }

    def scores(self, chosen: Int, names: Collection[str]) -> dict[str, Float]:
        """Return (S,) scores of each metric, for S selections of rows: row numbers (S, M)."""
        found = _regression_scores(self.targets[chosen], self.values[chosen])
        return {name: found[name] for name in names}


class NumberUncertainty:
    """Fits and applies prediction intervals of values; a value has no temperature."""

    @staticmethod
    def temperature(values: NDArray[np.floating], targets: Float) -> float:
        return 1.0

    @staticmethod
    def answers(values: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
        return values

    @staticmethod
    def threshold(values: NDArray[np.float32], targets: Float, coverage: float) -> float | None:
        """Return half the width of prediction intervals; None for too few rows."""
        return upper_quantile(NumberUncertainty.losses(values, targets), coverage)

    @staticmethod
    def is_held(
        calibration: Calibration, values: NDArray[np.float32], targets: Float
    ) -> NDArray[np.bool_] | None:
        half = calibration.conformal.threshold
        if half is None:
            return None
        return np.asarray(NumberUncertainty.losses(values, targets) <= half)

    @staticmethod
    def decide(
        calibration: Calibration, values: NDArray[np.float32], targets: Float
    ) -> dict[str, Any]:
        """Return {}: there is no decision to fit, because the answer is the value itself."""
        return {}

    @staticmethod
    def certainty(values: NDArray[np.float32], thresholds: Sequence[float] | None) -> Float:
        """Return (N,) zeros, because a value does not show how certain it is."""
        return np.zeros(len(values))

    @staticmethod
    def losses(
        values: NDArray[np.float32], targets: Float, thresholds: Sequence[float] | None = None
    ) -> Float:
        """Return (N,) the absolute errors."""
        return np.asarray(np.abs(values[:, 0].astype(np.float64) - targets))


def errors_by_target(
    targets: ArrayLike, values: ArrayLike, num_ranges: int, resampling: Resampling
) -> list[TargetErrors]:
    """Measure errors with bootstrap intervals, separately for ranges of the target.

    A single number hides a network that fails on rare large targets. The ranges have about equal
    numbers of rows, by rising target. `targets` and `values` are as for `NumberAnswers`. Rows with
    equal targets share a range, so there may be fewer than `num_ranges`.
    """
    if num_ranges < 1:
        raise MetricError(f"num_ranges is {num_ranges}, expected at least 1.")
    answers = NumberAnswers(targets, values)
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


def _regression_scores(actual: Float, predicted: Float) -> dict[str, Float]:
    """Compute all scores over the last axis.

    R2 of constant targets is 1 if all values are right, else 0.
    """
    errors = predicted - actual
    squares = (errors**2).sum(axis=-1)
    mean_square = squares / actual.shape[-1]
    spread = ((actual - actual.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    constant = (actual.min(axis=-1) == actual.max(axis=-1)) | (spread == 0)
    explained = 1 - np.divide(squares, spread, out=np.ones_like(squares), where=~constant)
    return {
        "mse": mean_square,
        "rmse": np.sqrt(mean_square),
        "mae": np.abs(errors).mean(axis=-1),
        "r2": np.where(constant & (squares == 0), 1.0, explained),
        "median_error": np.median(np.abs(errors), axis=-1),
    }


def _checked_values(values: ArrayLike, name: str) -> Float:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim != 1 or not len(numbers):
        raise MetricError(
            f"{name} of shape {numbers.shape}, expected (rows,) or (rows, 1) with at least one row."
        )
    if not np.isfinite(numbers).all():
        first = int((~np.isfinite(numbers)).argmax())
        raise MetricError(f"{name}: row {first} is {numbers[first]}, expected finite numbers.")
    return numbers
