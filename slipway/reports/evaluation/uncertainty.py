"""Measures the uncertainty of answers on test rows: calibration, coverage, OOD flags.

The gain of the temperature shows in the calibration error and the log loss with and without it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import FEW_ROWS, Answers, Calibration, Conformal
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.calibration_error import ReliabilityBin, reliability_bins
from slipway.metrics.scores import (
    Resampling,
    classification_metrics,
    percentiles,
    resampled_rows,
    wilson_interval,
)
from slipway.metrics.uncertainty import softmax

Float = NDArray[np.float64]
_MAX_POINTS = 200  # of a curve


@dataclass(frozen=True)
class UncertaintyReport:
    """The answers to the test rows, their calibration, and the metrics of their uncertainty."""

    calibration: Calibration
    targets: Float  # (N,) class index, or the number itself
    answers: Answers
    before: NDArray[np.float32] | None  # (N, K) without the temperature; None for numeric targets
    resampling: Resampling

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics by name; those with "before" are without the temperature."""
        held, confidence = self.is_held, self.resampling.confidence
        coverage = {"coverage": share_of(held, confidence)} if held is not None else {}
        is_outlier = self.calibration.is_outlier(self.answers.scores)
        return coverage | self._class_metrics() | {"outliers": share_of(is_outlier, confidence)}

    @property
    def warnings(self) -> list[str]:
        """Reasons not to rely on the sets or intervals, as sentences."""
        return coverage_warnings(self.calibration.conformal, self.metrics.get("coverage"))

    @cached_property
    def is_held(self) -> NDArray[np.bool_] | None:
        """(N,) True if the set or interval holds the target; None without intervals."""
        return self.calibration.holds_truth(
            self.answers.outputs, self.targets, of_classes=self.before is not None
        )

    @cached_property
    def losses(self) -> Float:
        """(N,) 1 for a wrong label, else 0; or the absolute error."""
        if self.before is not None:
            return np.asarray(self.answers.outputs.argmax(axis=1) != self.targets, dtype=np.float64)
        return np.asarray(np.abs(self.answers.outputs[:, 0].astype(np.float64) - self.targets))

    def content(self) -> dict[str, Any]:
        """Return flat keys for DVC's table, and a list with the intervals, which DVC skips."""
        named = [{"name": name, **metric.model_dump()} for name, metric in self.metrics.items()]
        return {
            **{name: metric.value for name, metric in self.metrics.items() if "before" not in name},
            "calibration": named,
        }

    def reliability_bins(self, probabilities: NDArray[np.float32]) -> list[ReliabilityBin]:
        """Return the bins that have rows, by rising confidence."""
        confidence = probabilities.max(axis=1).astype(np.float64)
        return reliability_bins(confidence, probabilities.argmax(axis=1) == self.targets)

    def risk_curve(self, doubt: NDArray[np.floating]) -> tuple[Float, Float]:
        """Return the fraction of rows answered, least doubtful first, and their mean loss."""
        losses = self.losses[np.argsort(doubt, kind="stable")]
        risk = losses.cumsum() / np.arange(1, len(losses) + 1)
        first, last = max(len(losses) // 100, 1) - 1, len(losses) - 1
        points = np.unique(np.linspace(first, last, _MAX_POINTS).astype(np.int64))
        return (points + 1) / len(losses), risk[points]

    def _class_metrics(self) -> dict[str, Metric]:
        if self.before is None:
            return {}
        names = ("calibration_error", "log_loss")
        after, before = (
            classification_metrics(self.targets, probabilities, self.resampling, names=names)
            for probabilities in (self.answers.outputs, self.before)
        )
        set_sizes = self.calibration.prediction_sets(self.answers.outputs).sum(axis=1)
        return {
            "set_size": self._mean(set_sizes.astype(np.float64)),
            "calibration_error": after["calibration_error"],
            **{f"{name}_before": metric for name, metric in before.items()},
        }

    def _mean(self, values: Float) -> Metric:
        confidence = self.resampling.confidence
        means = [
            values[chosen].mean(axis=1) for chosen in resampled_rows(len(values), self.resampling)
        ]
        low, high = percentiles(np.concatenate(means), confidence)
        return Metric(
            value=float(values.mean()), low=low, high=high, confidence=confidence, rows=len(values)
        )


def share_of(is_so: NDArray[np.bool_], confidence: float) -> Metric:
    """Return the fraction of (N,) rows that are True, with Wilson's interval."""
    low, high = wilson_interval(int(is_so.sum()), len(is_so), confidence)
    return Metric(
        value=float(is_so.mean()), low=low, high=high, confidence=confidence, rows=len(is_so)
    )


def coverage_warnings(conformal: Conformal, measured: Metric | None) -> list[str]:
    """Return reasons not to rely on the sets or intervals, as sentences."""
    warnings = []
    verdict = conformal.verdict(measured.low, measured.high) if measured else "within"
    if measured and verdict != "within":
        found = (
            f"{measured.value:.1%} of {measured.rows:,} test rows "
            f"({measured.low:.1%} to {measured.high:.1%})"
        )
        warnings.append(
            f"The measured coverage, {found}, is {verdict} the target of {conformal.coverage:.0%}."
        )
    if conformal.has_few_rows:
        warnings.append(
            f"The coverage was fitted on {conformal.rows} rows, fewer than {FEW_ROWS}: "
            "on new rows it may be points off the target. Use a larger validation split."
        )
    return warnings


def uncalibrated(logits: NDArray[np.float32], task: Task) -> NDArray[np.float32] | None:
    """Return the (N, K) probabilities without a temperature; None for a numeric target."""
    return softmax(logits).astype(np.float32) if is_classification(task) else None
