"""Measures the quality of the remaining predictions if doubtful rows are rejected, by threshold.

A predicted class is doubtful if its confidence is low, a predicted number if its OOD score is high.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipway.kinds.registry import kind_of
from slipway.metrics.scores import wilson_interval
from slipway.reports.evaluation.uncertainty import UncertaintyReport

_MAX_STEPS = 100
_DIGITS = 3  # significant digits of a threshold; of its distance from 1 for a confidence


@dataclass(frozen=True)
class ThresholdStep:
    """The rows that remain at a threshold, and their metrics, the headline metric first."""

    threshold: float  # smallest confidence, or largest OOD score, of an answered row
    rows: int
    fraction: float  # of the test rows
    metrics: dict[str, float]
    bounds: tuple[float, float] | None  # of the headline, if it is a fraction of rows


def threshold_steps(report: UncertaintyReport) -> list[ThresholdStep]:
    """Measure at most 100 thresholds, from one that keeps 1 % of the rows to one that keeps all.

    Thresholds are rounded before they are applied, so results hold for the thresholds as shown.
    """
    target, outputs = kind_of(report.task).target, report.answers.outputs
    given = report.targets, outputs, None, report.calibration.thresholds
    answers = target.load_part("scores")(*given)
    names = target.compared_metrics[:2]
    is_of_classes = rejects_by_confidence(report)
    values = (outputs.max(axis=1) if is_of_classes else report.answers.scores).astype(np.float64)
    steps = []
    for threshold in _thresholds(values, is_of_classes):
        rows = np.flatnonzero(values >= threshold if is_of_classes else values <= threshold)
        found = answers.scores(rows[np.newaxis], names)
        metrics = {name: float(found[name][0]) for name in names}
        bounds = None
        if target.headline_is_fraction:
            num_right = round(metrics[target.headline] * len(rows))
            bounds = wilson_interval(num_right, len(rows), report.resampling.confidence)
        steps.append(ThresholdStep(threshold, len(rows), len(rows) / len(values), metrics, bounds))
    return steps


def rejects_by_confidence(report: UncertaintyReport) -> bool:
    """Return True if rows are rejected for low confidence, False if for a high OOD score."""
    target = kind_of(report.task).target
    return target.has_classes and not target.several


def _thresholds(values: NDArray[np.float64], is_of_classes: bool) -> list[float]:
    """Return rounded thresholds, the strictest first: values at evenly spaced ranks."""
    ordered = np.sort(values)[::-1] if is_of_classes else np.sort(values)
    first, last = max(len(ordered) // 100, 1) - 1, len(ordered) - 1
    places = np.unique(np.linspace(first, last, _MAX_STEPS).astype(np.int64))
    chosen = ordered[places].tolist()
    if is_of_classes:
        return list(dict.fromkeys(round(1 - _rounded_up(1 - value), 12) for value in chosen))
    return list(dict.fromkeys(_rounded_up(value) for value in chosen))


def _rounded_up(value: float) -> float:
    """Round a nonnegative threshold up to three digits, so that its own row is not rejected."""
    if value == 0 or math.isinf(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.ceil(value / unit) * unit:.{_DIGITS}g}")
