"""Metrics of multi-label predictions in float64, with intervals.

A label is predicted if its probability reaches the label's threshold. Micro scores count all cells
of rows and labels together. Macro scores are means over the labels that some row has or is
predicted to have, so that a resample without some label does not lower the score. Mean average
precision needs no threshold: it is the mean of the average precision (not interpolated) over the
labels that some but not all rows have.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import given_labels
from slipway.kinds.targets import LABELS
from slipway.metrics.calibration_error import calibration_errors
from slipway.metrics.roc_auc import RankedClass, rank_labels, ranking_scores
from slipway.metrics.scores import (
    Float,
    Int,
    Resampling,
    fraction,
    metric_of,
    percentiles,
    requested,
    row_counts,
    samples,
    wilson_interval,
)
from slipway.system.errors import MetricError

Bool = NDArray[np.bool_]
_BY_ROW = {  # metric -> attribute of `LabelAnswers` whose mean over rows it is
    "subset_accuracy": "is_right",
    "hamming_loss": "wrong_fractions",
    "log_loss": "log_losses",
}
_COUNTED = ("f1_micro", "f1_macro", "precision_micro", "recall_micro")
_RANKING = "mean_average_precision"


class LabelAnswers:
    """Validated multi-label answers, which can be scored over any choice of their rows.

    `targets` (N, K) are 0 or 1, `probabilities` (N, K) in [0, 1], `thresholds` (K,) or None for a
    half. Raises MetricError for NaN, no rows, other values or other shapes.
    """

    def __init__(
        self,
        targets: ArrayLike,
        probabilities: ArrayLike,
        top_k: int | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.probabilities = checked_labels(probabilities, "probabilities")  # (N, K)
        self.num_rows, self.num_classes = self.probabilities.shape
        self.targets = _checked_targets(targets)  # (N, K)
        if self.targets.shape != self.probabilities.shape:
            raise MetricError(
                f"targets of shape {self.targets.shape} and probabilities of shape "
                f"{self.probabilities.shape}, expected a number for each label of each row in both."
            )
        # Compare in float32, as the service does.
        given = given_labels(np.asarray(probabilities, np.float32), thresholds)
        self.actual: Bool = self.targets > 0
        self.given: Bool = given

    @staticmethod
    def baseline(train_targets: Float, num_rows: int, num_classes: int) -> Float:
        """Return the label frequencies of the training rows, repeated for each row: (N, K)."""
        return np.tile(np.asarray(train_targets, np.float64).mean(axis=0), (num_rows, 1))

    @staticmethod
    def why_absent(targets: ArrayLike, num_classes: int, top_k: int | None) -> dict[str, str]:
        """Return the metrics that are undefined on these rows, with the reason."""
        counts, rows = _checked_targets(targets).sum(axis=0), len(np.asarray(targets))
        if ((counts > 0) & (counts < rows)).any():
            return {}
        reason = "each label is in all rows or in none, and a ranking needs both kinds of rows"
        return {_RANKING: reason}

    def metrics(self, resampling: Resampling, names: Collection[str] | None) -> dict[str, Metric]:
        """Compute the metrics in `names` with intervals; None for all that the rows define."""
        absent = self.why_absent(self.targets, self.num_classes, None)
        wanted = [name for name in requested(LABELS.metrics, names) if name not in absent]
        values = self.scores(np.arange(self.num_rows)[None], wanted)
        drawn = samples(self, [name for name in wanted if name != "subset_accuracy"], resampling)
        bounds = {name: percentiles(found, resampling.confidence) for name, found in drawn.items()}
        if "calibration_error" in wanted:  # resampling only increases it, by noise
            low, high = bounds["calibration_error"]
            value = float(values["calibration_error"][0])
            bounds["calibration_error"] = min(low, value), max(high, value)
        if "subset_accuracy" in wanted:
            num_right = int(self.is_right.sum())
            bounds["subset_accuracy"] = wilson_interval(
                num_right, self.num_rows, resampling.confidence
            )
        return {
            name: metric_of(values[name], bounds[name], resampling, self.num_rows)
            for name in wanted
        }

    def scores(self, chosen: Int, names: Collection[str]) -> dict[str, Float]:
        """Return (S,) scores of each metric, for S selections of M rows.

        `chosen` (S, M) are row numbers. A score is NaN if the selected rows do not define it.
        """
        found = {
            name: np.asarray(getattr(self, values), np.float64)[chosen].mean(axis=1)
            for name, values in _BY_ROW.items()
            if name in names
        }
        if found.keys() != set(names):
            found |= self._scores_by_count(row_counts(chosen, self.num_rows), names)
        return {name: found[name] for name in names}

    def label_counts(self, counts: Float | None = None) -> tuple[Float, Float, Float]:
        """Count by label the true positives, the rows with the label, and the predictions of it.

        All three are (S, K). `counts` (S, N) is how often each resample contains each row; None
        counts each row once.
        """
        if counts is None:
            counts = np.ones((1, self.num_rows))
        hits, actual, given = (
            counts @ part.astype(np.float64)
            for part in (self.actual & self.given, self.actual, self.given)
        )
        return hits, actual, given

    @cached_property
    def is_right(self) -> Bool:
        """(N,) True for rows whose predicted labels are exactly their true labels."""
        return np.asarray((self.given == self.actual).all(axis=1))

    @cached_property
    def wrong_fractions(self) -> Float:
        """(N,) fraction of labels that are wrongly predicted or wrongly missing."""
        return np.asarray((self.given != self.actual).mean(axis=1))

    @cached_property
    def log_losses(self) -> Float:
        """(N,) binary cross-entropy of each row in nats, as a mean over labels."""
        losses = label_log_losses(self.targets, self.probabilities)
        return np.asarray(losses.mean(axis=1))

    def _scores_by_count(self, counts: Float, names: Collection[str]) -> dict[str, Float]:
        found: dict[str, Float] = {}
        if not set(_COUNTED).isdisjoint(names):
            hits, actual, given = self.label_counts(counts)
            sums = [part.sum(axis=1) for part in (hits, actual, given)]
            found["f1_micro"] = fraction(2 * sums[0], sums[1] + sums[2])
            found["precision_micro"] = fraction(sums[0], sums[2])
            found["recall_micro"] = fraction(sums[0], sums[1])
            num_seen = (actual + given > 0).sum(axis=1)
            found["f1_macro"] = fraction(fraction(2 * hits, actual + given).sum(axis=1), num_seen)
        if "calibration_error" in names:  # the mean over labels
            errors = [
                calibration_errors(own, actual, counts)
                for own, actual in zip(self.probabilities.T, self.actual.T, strict=True)
            ]
            found["calibration_error"] = np.mean(errors, axis=0)
        if _RANKING in names:
            found[_RANKING] = ranking_scores(self._ranked, counts)[1]
        return found

    @cached_property
    def _ranked(self) -> list[RankedClass]:
        return rank_labels(self.actual, self.probabilities)


def label_log_losses(targets: ArrayLike, probabilities: ArrayLike) -> Float:
    """Return (N, K) the binary cross-entropy of each label of each row, in nats.

    Probabilities are clipped at the spacing of float64 at 1 (2.2e-16): a loss is at most 36.04.
    """
    shares = np.asarray(probabilities, np.float64)
    own = np.where(np.asarray(targets) > 0, shares, 1 - shares)
    return np.asarray(-np.log(np.clip(own, np.finfo(np.float64).eps, 1.0)))


def checked_labels(numbers: ArrayLike, name: str) -> Float:
    """Check numbers (N, K), and return them as float64.

    Raises MetricError unless there is a row and a label, and all numbers are in [0, 1].
    """
    found = np.asarray(numbers, np.float64)
    if found.ndim != 2 or 0 in found.shape:
        raise MetricError(
            f"{name} of shape {found.shape}, expected (rows, labels) with at least one of each."
        )
    wrong = ~((found >= 0) & (found <= 1))
    if wrong.any():
        row, label = np.argwhere(wrong)[0]
        raise MetricError(
            f"{name}: row {row} has {found[row, label]} for label {label}, "
            "expected numbers from 0 to 1."
        )
    return found


def _checked_targets(targets: ArrayLike) -> Float:
    found = checked_labels(targets, "targets")
    if not np.isin(found, (0.0, 1.0)).all():
        raise MetricError("targets have numbers between 0 and 1, expected 0 or 1 for each label.")
    return found
