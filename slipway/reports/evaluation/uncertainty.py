"""Measures the uncertainty of predictions on test rows: calibration, coverage, OOD flags.

The calibration error and the log loss are measured with and without the temperature, to show its
gain.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import FEW_ROWS, Answers, Calibration, Conformal
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.calibration_error import ReliabilityBin, reliability_bins
from slipway.metrics.scores import (
    Resampling,
    fraction_of,
    measure,
    percentiles,
    resampled_rows,
)

Float = NDArray[np.float64]
_MAX_POINTS = 200  # of a curve


@dataclass(frozen=True)
class UncertaintyReport:
    """The predictions for the test rows, their calibration, and metrics of their uncertainty."""

    task: Task
    calibration: Calibration
    targets: NDArray[Any]  # (N,) class index, or the number itself; (N, K) labels, 0 or 1
    answers: Answers
    before: NDArray[np.float32] | None  # (N, K) without the temperature; None for numeric targets
    resampling: Resampling

    @property
    def _uncertainty(self) -> Any:
        return kind_of(self.task).target.load_part("uncertainty")

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics by name; those with "before" are without the temperature."""
        held, confidence = self.is_held, self.resampling.confidence
        coverage = {"coverage": fraction_of(held, confidence)} if held is not None else {}
        is_ood = self.calibration.is_ood(self.answers.scores)
        measured = coverage | self._class_metrics() | self._decision_metrics()
        return measured | {"ood_fraction": fraction_of(is_ood, confidence)}

    @property
    def warnings(self) -> list[str]:
        """Reasons not to rely on the sets or intervals, as sentences."""
        return coverage_warnings(self.calibration.conformal, self.metrics.get("coverage"))

    @cached_property
    def is_held(self) -> NDArray[np.bool_] | None:
        """Mask (N,) of the rows whose set or interval contains the target; None without these."""
        held = self._uncertainty.is_held(self.calibration, self.answers.outputs, self.targets)
        return cast(NDArray[np.bool_] | None, held)

    @cached_property
    def losses(self) -> Float:
        """The loss of each row (N,): 1 for a wrong label, else 0; or the absolute error."""
        given = self.answers.outputs, self.targets, self.calibration.thresholds
        return cast(Float, self._uncertainty.losses(*given))

    @property
    def certainty(self) -> Float:
        """The certainty of each prediction, (N,), from the probabilities of classes or labels."""
        given = self.answers.outputs, self.calibration.thresholds
        return cast(Float, self._uncertainty.certainty(*given))

    def content(self) -> dict[str, Any]:
        """Return flat keys for DVC's table, and a list with the intervals, which DVC skips."""
        named = [{"name": name, **metric.model_dump()} for name, metric in self.metrics.items()]
        return {
            **{name: metric.value for name, metric in self.metrics.items() if "before" not in name},
            "calibration": named,
        }

    def reliability_bins(self, probabilities: NDArray[np.float32]) -> list[ReliabilityBin]:
        """Return the bins that have rows, by rising confidence."""
        return reliability_bins(*self._uncertainty.reliability(probabilities, self.targets))

    def risk_curve(self, doubt: NDArray[np.floating]) -> tuple[Float, Float]:
        """Return the fractions of rows kept, in order of doubt, and the mean loss of each."""
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
            measure(self.task, self.targets, probabilities, self.resampling, names=names)
            for probabilities in (self.answers.outputs, self.before)
        )
        set_sizes = self.calibration.prediction_sets(self.answers.outputs).sum(axis=1)
        return {
            "set_size": self._mean(set_sizes.astype(np.float64)),
            "calibration_error": after["calibration_error"],
            **{f"{name}_before": metric for name, metric in before.items()},
        }

    def _decision_metrics(self) -> dict[str, Metric]:
        """Measure the mean cost of the decisions, and the fraction of rows left to a person."""
        rule, thresholds = self.calibration.decision, self.calibration.thresholds
        if rule is None or rule.costs is None or thresholds is None:
            return {}
        costs = rule.costs_of(self.answers.outputs, thresholds, self.targets)
        assert costs is not None
        found = {"cost": self._mean(costs)}
        if rule.costs.abstain is not None:
            abstains = rule.abstains(self.answers.outputs)
            found["abstained"] = fraction_of(abstains, self.resampling.confidence)
        return found

    @property
    def cheapest_constant(self) -> float | None:
        """The mean cost of the best constant decision for all rows; None without costs."""
        rule = self.calibration.decision
        if rule is None or rule.costs is None:
            return None
        share = float((self.targets == rule.place).mean())
        costs = [(1 - share) * rule.costs.false_positive, share * rule.costs.false_negative]
        return min([*costs, *([] if rule.costs.abstain is None else [rule.costs.abstain])])

    def _mean(self, values: Float) -> Metric:
        confidence = self.resampling.confidence
        means = [
            values[chosen].mean(axis=1) for chosen in resampled_rows(len(values), self.resampling)
        ]
        low, high = percentiles(np.concatenate(means), confidence)
        return Metric(
            value=float(values.mean()), low=low, high=high, confidence=confidence, rows=len(values)
        )


def coverage_warnings(conformal: Conformal, measured: Metric | None) -> list[str]:
    """Return reasons not to rely on the sets or intervals, as sentences."""
    warnings = []
    if measured and conformal.verdict(measured.low, measured.high) == "below":
        found = (
            f"{measured.value:.1%} of {measured.rows:,} test rows "
            f"({measured.low:.1%} to {measured.high:.1%})"
        )
        warnings.append(
            f"The measured coverage, {found}, is below the target of {conformal.coverage:.0%}."
        )
    if conformal.has_few_rows:
        warnings.append(
            f"The coverage was fitted on {conformal.rows} rows, fewer than {FEW_ROWS}: "
            "on new rows it may be points off the target. Use a larger validation split."
        )
    return warnings


def uncalibrated(logits: NDArray[np.float32], task: Task) -> NDArray[np.float32] | None:
    """Return the (N, K) probabilities without a temperature; None for a numeric target."""
    target = kind_of(task).target
    if not target.has_classes:
        return None
    return cast(NDArray[np.float32], target.load_part("uncertainty").answers(logits, 1.0))
