"""What the answers are worth, measured on test rows: calibration, sets or intervals that hold the truth, rows taken for outliers.

What the temperature gained is told by the calibration error and the log loss without it and with it.
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
_MOST_POINTS = 200  # of a curve


@dataclass(frozen=True)
class UncertaintyReport:
    """The answers to the test rows, how they were made, and the metrics of what they are worth."""

    calibration: Calibration
    targets: Float  # (N,) class index, or the number itself
    answers: Answers
    before: (
        NDArray[np.float32] | None
    )  # (N, K) probabilities without the temperature; None for a numeric target
    resampling: Resampling

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """By name; what is measured "before" is without the temperature."""
        held, outliers = self.is_held, self.calibration.is_outlier(self.answers.scores)
        shares = {"coverage": self._share(held)} if held is not None else {}
        return shares | self._means() | {"outliers": self._share(outliers)}

    @property
    def doubts(self) -> list[str]:
        """Reasons not to rely on the sets or intervals, as sentences."""
        return coverage_doubts(self.calibration.conformal, self.metrics.get("coverage"))

    @cached_property
    def is_held(self) -> NDArray[np.bool_] | None:
        """(N,) whether each row's set or interval has the truth; None where there is no interval."""
        return self.calibration.holds_truth(
            self.answers.outputs, self.targets, of_classes=self.before is not None
        )

    @cached_property
    def losses(self) -> Float:
        """(N,) 1 where the label is wrong, else 0; or the absolute error."""
        if self.before is not None:
            return np.asarray(self.answers.outputs.argmax(axis=1) != self.targets, dtype=np.float64)
        return np.asarray(np.abs(self.answers.outputs[:, 0].astype(np.float64) - self.targets))

    def content(self) -> dict[str, Any]:
        """For `metrics/evaluate.json`: flat keys, which DVC shows, and a list with the intervals, which it skips."""
        named = [{"name": name, **metric.model_dump()} for name, metric in self.metrics.items()]
        return {
            **{name: metric.value for name, metric in self.metrics.items() if "before" not in name},
            "calibration": named,
        }

    def reliability_bins(self, probabilities: NDArray[np.float32]) -> list[ReliabilityBin]:
        """Those that have rows, by rising confidence."""
        confidence, hits = (
            probabilities.max(axis=1).astype(np.float64),
            probabilities.argmax(axis=1) == self.targets,
        )
        return reliability_bins(confidence, hits)

    def reliability(self, probabilities: NDArray[np.float32]) -> tuple[Float, Float]:
        """Mean confidence and accuracy of each bin that has rows."""
        bins = self.reliability_bins(probabilities)
        return np.array([one.confidence for one in bins]), np.array([one.accuracy for one in bins])

    def risk_curve(self, doubt: NDArray[np.floating]) -> tuple[Float, Float]:
        """Share of rows that are answered, the least doubtful first, and the mean loss of these."""
        losses = self.losses[np.argsort(doubt, kind="stable")]
        risk = losses.cumsum() / np.arange(1, len(losses) + 1)
        points = np.unique(
            np.linspace(max(len(losses) // 100, 1) - 1, len(losses) - 1, _MOST_POINTS).astype(
                np.int64
            )
        )
        return (points + 1) / len(losses), risk[points]

    def _share(self, is_so: NDArray[np.bool_]) -> Metric:
        return share_of(is_so, self.resampling.confidence)

    def _means(self) -> dict[str, Metric]:
        """Everything whose interval is made by resampling rows."""
        if self.before is None:
            return {}
        after, before = (
            classification_metrics(
                self.targets,
                probabilities,
                self.resampling,
                names=("calibration_error", "log_loss"),
            )
            for probabilities in (self.answers.outputs, self.before)
        )
        return {
            "set_size": self._mean(
                self.calibration.prediction_sets(self.answers.outputs)
                .sum(axis=1)
                .astype(np.float64)
            ),
            "calibration_error": after["calibration_error"],
            **{f"{name}_before": metric for name, metric in before.items()},
        }

    def _mean(self, values: Float) -> Metric:
        means = np.concatenate(
            [values[chosen].mean(axis=1) for chosen in resampled_rows(len(values), self.resampling)]
        )
        low, high = percentiles(means, self.resampling.confidence)
        return Metric(
            value=float(values.mean()),
            low=low,
            high=high,
            confidence=self.resampling.confidence,
            rows=len(values),
        )


def share_of(is_so: NDArray[np.bool_], confidence: float) -> Metric:
    """The share of (N,) rows, with Wilson's interval."""
    low, high = wilson_interval(int(is_so.sum()), len(is_so), confidence)
    return Metric(
        value=float(is_so.mean()), low=low, high=high, confidence=confidence, rows=len(is_so)
    )


def coverage_doubts(conformal: Conformal, measured: Metric | None) -> list[str]:
    """Reasons not to rely on the sets or intervals, as sentences."""
    doubts = []
    verdict = conformal.verdict(measured.low, measured.high) if measured else "within"
    if measured and verdict != "within":
        found = f"{measured.value:.1%} of {measured.rows:,} test rows ({measured.low:.1%} to {measured.high:.1%})"
        doubts.append(
            f"The measured coverage, {found}, is {verdict} the target of {conformal.coverage:.0%}."
        )
    if conformal.has_few_rows:
        doubts.append(
            f"The coverage was fitted on {conformal.rows} rows, fewer than {FEW_ROWS}: on new rows it may be points off the target. "
            "Use a larger validation split."
        )
    return doubts


def uncalibrated(logits: NDArray[np.float32], task: Task) -> NDArray[np.float32] | None:
    """(N, K) logits to the probabilities they would be without a temperature; None for a numeric target."""
    return softmax(logits).astype(np.float32) if is_classification(task) else None
