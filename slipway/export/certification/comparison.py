"""Decides whether two ways of running the model (hops) agree on the same rows.

It only compares predictions that were measured before. Predictions that are not finite, have
another shape, or come from another execution than requested never agree. Metrics are compared row
by row with those of the first hop; the paired interval of a change shows how much it may vary on
other test rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import Execution, Hop, HopBounds
from slipway.export.certification.measurement import (
    Distances,
    Measurement,
    TestRows,
    flips,
    measure_distances,
)
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, measure, why_absent
from slipway.metrics.uncertainty import ood_fraction
from slipway.system.errors import MetricError

_PER_CLASS = "f1_macro"  # the headline hides what happens to a rare class
# Every comparison with a limit is `not value <= limit`, so that NaN counts as above the limit.
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary
_NOT_COMPARED: dict[str, Any] = {
    "reference": None,
    "allowed": None,
    "max_difference": None,
    "mean_difference": None,
    "max_score_difference": None,
    "flipped": [],
    "worst_row": None,
    "batches": [],
    "metric_changes": {},
}
_NOT_MEASURED: dict[str, Any] = {
    "rows": 0,
    "metric": None,
    "latency_ms": None,
    "rows_per_second": None,
}


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of a hop from its reference. A bound that is None is not checked.

    Attributes:
        max_difference: largest allowed difference of outputs. It is absolute for probabilities; for
            values and OOD scores it is relative to the largest one if that is above 1. If it is
            set, all labels must be equal.
        max_metric_loss: largest allowed loss, in accuracy points or as relative growth of the RMSE.
            * It also limits the loss of macro F1.
            * The smaller end of the loss's paired interval is compared, because a single row proves
              nothing.
            * A budget below one row allows one row.
            * If it is set, the fraction of rows flagged as OOD may exceed the reference's by at
              most the requested fraction, compared at the favourable ends of both intervals.
        noise: absolute, added to `max_difference`. A label may flip if the two best probabilities
            are within twice the noise.
        score_noise: absolute, added to the bound of the OOD scores.
        budget_key: key in params.yaml, for error messages.
        is_served: False if no service uses the hop on this machine. A loss beyond the budget then
            leaves the hop uncertified, but the certificate is not refused.
    """

    max_difference: float | None = None
    max_metric_loss: float | None = None
    noise: float = 0.0
    score_noise: float = 0.0
    budget_key: str = "verify.max_metric_loss"
    is_served: bool = True


class HopComparison:
    """Compares hops on the same rows; one resampling gives all intervals."""

    def __init__(self, rows: TestRows, resampling: Resampling) -> None:
        self.rows = rows
        self._resampling = resampling
        self._target = kind_of(rows.task).target
        self._origin: Measurement | None = None  # the first hop

    def first(self, name: str, requested: Execution, measured: Measurement) -> Hop:
        """Return the first hop, with which the metrics of all others are compared.

        Its status is "differs" only if its predictions are invalid, or it did not run as requested.
        """
        metric, problems = self._metric(measured)
        if metric:
            self._origin = measured
        problems += _changed_execution(requested, measured.actual)
        status = "differs" if problems else "agrees"
        return self._hop(name, status, problems, requested, measured, metric, _NOT_COMPARED)

    def against(
        self,
        name: str,
        requested: Execution,
        measured: Measurement,
        reference: tuple[Hop, Measurement],
        tolerance: Tolerance,
    ) -> Hop:
        """Compare the predictions of a hop with those of `reference`.

        Returns the hop with its verdict.
        """
        before, expected = reference
        if measured.outputs.shape != expected.outputs.shape:
            found = f"answers of shape {measured.outputs.shape}, expected {expected.outputs.shape}"
            return failed(name, requested, found, before.name, measured.actual)

        metric, problems = self._metric(measured)
        changes = self._changes(measured) if metric else {}
        distances = measure_distances(measured, expected, self.rows.ids)
        bounds = self._bounds(expected, tolerance, before.ood_fraction)
        problems += _changed_execution(requested, measured.actual)
        problems += _difference_problems(distances, bounds, tolerance.noise)
        problems += _score_problems(distances.score, bounds)

        losses = self._losses(before.metric, metric, changes, tolerance)
        # One flipped row may cost macro F1 more than 1 / N, so one row is always allowed.
        is_one_row = self._has_changed_one_row(measured)
        beyond_budget = [loss.problem() for loss in losses if loss.is_proven and not is_one_row]
        beyond_budget += _ood_problems(self._ood_fraction(measured), bounds)
        remarks = [loss.remark() for loss in losses if loss.is_seen]

        must_agree = tolerance.is_served or _is_another_model(measured, expected)
        status, reasons = _verdict(problems, beyond_budget, remarks, must_agree=must_agree)
        compared = {
            "reference": before.name,
            "allowed": bounds,
            "metric_changes": changes,
        } | distances.fields()
        return self._hop(name, status, reasons, requested, measured, metric, compared)

    def _hop(
        self,
        name: str,
        status: str,
        reasons: list[str],
        requested: Execution,
        measured: Measurement,
        metric: Metric | None,
        compared: dict[str, Any],
    ) -> Hop:
        content = {
            "name": name,
            "status": status,
            "reason": "; ".join(reasons),
            "requested": requested,
            "actual": measured.actual,
            "rows": len(self.rows.ids),
            "ood_fraction": self._ood_fraction(measured),
            "metric": metric,
            "latency_ms": measured.latency_ms,
            "rows_per_second": measured.rows_per_second,
        }
        return Hop.model_validate(content | compared)

    def _metric(self, answered: Measurement) -> tuple[Metric | None, list[str]]:
        name, rows = self._target.headline, self.rows
        try:
            measured = measure(
                rows.task,
                rows.targets,
                answered.outputs,
                self._resampling,
                names=[name],
                thresholds=answered.thresholds,
            )
        except MetricError as error:
            return None, [str(error).rstrip(".")]
        return measured[name], []

    def _has_changed_one_row(self, measured: Measurement) -> bool:
        """Return True if the label of exactly one row differs from the first hop's."""
        origin = self._origin if self._target.has_classes else None
        return origin is not None and len(flips(measured, origin)) == 1

    def _changes(self, measured: Measurement) -> dict[str, Metric]:
        """Return the change of each metric since the first hop, paired by row."""
        if self._origin is None or self._origin.outputs.shape != measured.outputs.shape:
            return {}
        absent = why_absent(self.rows.task, self.rows.targets, max(1, len(self.rows.classes)), None)
        return {
            name: self._change(name, self._origin, measured)
            for name in self._target.compared_metrics
            if name not in absent
        }

    def _change(self, metric: str, before: Measurement, after: Measurement) -> Metric:
        confidence, num_rows = self._resampling.confidence, len(before.outputs)
        decides = metric in (self._target.headline, _PER_CLASS) and self._target.has_classes
        same_labels = decides and not len(flips(after, before))
        # In every resample; drawing them takes seconds.
        if same_labels or np.array_equal(before.outputs, after.outputs):
            return Metric(value=0.0, low=0.0, high=0.0, confidence=confidence, rows=num_rows)
        found = paired_difference(
            self.rows.task,
            metric,
            self.rows.targets,
            before.outputs,
            after.outputs,
            self._resampling,
            thresholds=(before.thresholds, after.thresholds),
        )
        return Metric(
            value=found.difference,
            low=found.low,
            high=found.high,
            confidence=found.confidence,
            rows=found.rows,
        )

    def _ood_fraction(self, measured: Measurement) -> Metric | None:
        """Return the fraction of rows flagged as OOD, with its interval.

        Returns None without a usable score.
        """
        scores, calibration = measured.scores, measured.calibration
        if scores is None or calibration is None or not np.isfinite(scores).all():
            return None
        return ood_fraction(scores, calibration, self._resampling.confidence)

    def _bounds(
        self, expected: Measurement, tolerance: Tolerance, flagged: Metric | None
    ) -> HopBounds:
        max_difference = max_score_difference = max_ood_fraction = None
        if tolerance.max_difference is not None:
            scale = (
                1.0 if self._target.has_classes else max(1.0, float(np.abs(expected.outputs).max()))
            )
            score_scale = 1.0 if expected.scores is None else max(1.0, float(expected.scores.max()))
            max_difference = tolerance.max_difference * scale + tolerance.noise
            max_score_difference = tolerance.max_difference * score_scale + tolerance.score_noise
        if tolerance.max_metric_loss is not None and flagged and expected.calibration:
            max_ood_fraction = flagged.high + expected.calibration.ood.fraction
        return HopBounds(
            max_difference=max_difference,
            max_score_difference=max_score_difference,
            max_metric_loss=tolerance.max_metric_loss,
            max_ood_fraction=max_ood_fraction,
        )

    def _losses(
        self,
        expected: Metric | None,
        found: Metric | None,
        changes: dict[str, Metric],
        tolerance: Tolerance,
    ) -> "list[_MetricLoss]":
        """Return the loss of each judged metric, in the unit of its budget."""
        if tolerance.max_metric_loss is None or expected is None or found is None or not changes:
            return []
        moved = f"(from {expected.value:.4f} to {found.value:.4f})"
        limits = (tolerance.max_metric_loss, tolerance.budget_key)
        if not self._target.headline_is_fraction:
            growth, unit = changes[self._target.headline], 1 / max(expected.value, 1e-12)
            what = f"relative growth of the RMSE {moved}"
            return [_MetricLoss(what, growth.value * unit, growth.low * unit, 0.0, *limits)]
        headline, row = self._target.headline, 1 / len(self.rows.ids)
        accuracy, per_class = changes[headline], changes[_PER_CLASS]
        points = f"{headline.replace('_', ' ')} points"
        what, what_per_class = f"{points} lost {moved}", "points of macro F1 lost"
        return [
            _MetricLoss(what, -accuracy.value, -accuracy.high, row, *limits),
            _MetricLoss(what_per_class, -per_class.value, -per_class.high, row, *limits),
        ]


@dataclass(frozen=True)
class _MetricLoss:
    """The loss of one metric; `mild` is the end of its paired interval with the smaller loss."""

    what: str
    measured: float
    mild: float
    row: float  # loss of the metric by one row; 0 if that is not fixed
    budget: float
    budget_key: str

    @property
    def is_proven(self) -> bool:
        """True if even the interval's smaller end exceeds the budget and the loss of one row."""
        return not self.mild <= max(self.budget, self.row) + _ROUNDING

    @property
    def is_seen(self) -> bool:
        """True if the loss measured on these rows exceeds the budget."""
        return not self.measured <= self.budget + _ROUNDING

    def problem(self) -> str:
        """Return text for an error message about a loss that is proven to exceed its budget."""
        if self.row > self.budget:
            limit = f"one row, {self.row:.4g}, because {self.budget_key} {self.budget:g} is less"
        else:
            limit = f"{self.budget:g} ({self.budget_key})"
        return f"{self._text()}, expected at most {limit}"

    def remark(self) -> str:
        """Return a sentence on a lost metric above the limit that may be due to chance."""
        limit = f"{self.budget_key} {self.budget:g}"
        return f"{self._text()}: above {limit}, but too few rows to tell it from chance"

    def _text(self) -> str:
        mild = f"{self.mild + 0.0:.4g} at the mild end of its interval"
        return f"{self.measured:.4g} {self.what}, {mild}"


def failed(
    name: str,
    requested: Execution,
    reason: str,
    reference: str | None = None,
    actual: Execution | None = None,
) -> Hop:
    """Return a hop with the status "differs", for predictions that cannot be compared."""
    content = {**_NOT_COMPARED, **_NOT_MEASURED, "reference": reference}
    return Hop(
        name=name, status="differs", reason=reason, requested=requested, actual=actual, **content
    )


def not_executed(name: str, requested: Execution, reason: str) -> Hop:
    """Return a hop that cannot run on this machine. It does not count as agreeing."""
    return failed(name, requested, reason).model_copy(update={"status": "not_executed"})


def _verdict(
    problems: list[str], beyond_budget: list[str], remarks: list[str], *, must_agree: bool
) -> tuple[str, list[str]]:
    """Return the status of a hop and its reasons."""
    if problems or (beyond_budget and must_agree):
        return "differs", problems + beyond_budget
    return ("uncertified", beyond_budget) if beyond_budget else ("agrees", remarks)


def _changed_execution(requested: Execution, actual: Execution) -> list[str]:
    return [
        f"{name}: {wanted} was requested, {getattr(actual, name)} ran"
        for name, wanted in requested
        if wanted not in ("auto", getattr(actual, name))
    ]


def _difference_problems(distances: Distances, bounds: HopBounds, noise: float) -> list[str]:
    if bounds.max_difference is None:
        return []
    problems, worst = [], distances.worst
    if not worst.largest <= bounds.max_difference:
        is_in_other_batches = worst.largest != distances.main.largest
        where = f" in batches of {worst.batch_size}" if is_in_other_batches else ""
        problems.append(
            f"the largest difference is {worst.largest:.3g}{where}, "
            f"expected at most {bounds.max_difference:.3g} (verify.max_difference)"
        )
    num_flipped = sum(not lead <= 2 * noise for lead in distances.leads.values())
    if num_flipped:
        problems.append(f"{num_flipped} labels flipped, expected none")
    return problems


def _score_problems(largest: float | None, bounds: HopBounds) -> list[str]:
    if largest is None:
        return []
    if not np.isfinite(largest):
        return ["OOD scores are not finite"]
    if bounds.max_score_difference is None or largest <= bounds.max_score_difference:
        return []
    return [
        f"the largest difference of an OOD score is {largest:.3g}, "
        f"expected at most {bounds.max_score_difference:.3g}"
    ]


def _ood_problems(found: Metric | None, bounds: HopBounds) -> list[str]:
    if found is None or bounds.max_ood_fraction is None or found.low <= bounds.max_ood_fraction:
        return []
    return [
        f"{found.value:.1%} of the rows are flagged as OOD, {found.low:.1%} at the mild end of "
        f"its interval, expected at most {bounds.max_ood_fraction:.1%}"
    ]


def _is_another_model(found: Measurement, expected: Measurement) -> bool:
    """Return True if the difference is too large for rounding, as between two different models.

    Then most labels changed, or the values are further from the reference than a constant would be.
    """
    if found.outputs.shape[1] > 1:
        return len(flips(found, expected)) > 0.5 * len(found.outputs)
    errors = found.outputs.astype(np.float64) - expected.outputs
    return bool((errors**2).mean() > expected.outputs.astype(np.float64).var())
