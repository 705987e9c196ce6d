"""Metrics of a classifier in float64, with intervals.

A class that is never predicted, or that no row has, scores 0, as with scikit-learn's
`zero_division=0`. A class for which both hold is ignored. Fractions of correct rows have Wilson's
score interval (1927), which has a width even if every row is correct.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import decided_classes
from slipway.kinds.targets import CLASS
from slipway.metrics.calibration_error import calibration_errors, errors_by_chance
from slipway.metrics.roc_auc import RankedClass, rank_classes, ranking_scores
from slipway.metrics.scores import (
    Float,
    Int,
    Resampling,
    chunk_sizes,
    fraction,
    metric_of,
    percentiles,
    requested,
    row_counts,
    samples,
    wilson_interval,
)
from slipway.system.errors import MetricError

# These metrics are all the fraction of correct rows.
_ACCURACIES = ("accuracy", "precision_micro", "recall_micro", "recall_weighted", "f1_micro")
_RANKING = ("roc_auc", "average_precision")
_BY_ROW = {  # metric -> attribute of `ClassAnswers` whose mean over rows it is
    "accuracy": "is_right",
    "top_k_accuracy": "is_in_top_k",
    "log_loss": "log_losses",
    "brier": "squares",
}
_NOT_COUNTED = ("top_k_accuracy", "log_loss", "brier", *_RANKING, "calibration_error")
_COUNTED = tuple(name for name in CLASS.metrics if name not in _NOT_COUNTED)
_SUM_TOLERANCE = 0.01  # float16 probabilities do not sum to 1 exactly; logits are far away


@dataclass(frozen=True)
class ClassCounts:
    """Numbers of rows by class, (..., K) int64: correct, of the class, predicted as the class."""

    hits: Int
    actual: Int
    predicted: Int


@dataclass(frozen=True)
class ClassScores:
    """Precision, recall and F1 of each class, (..., K) in [0, 1]; 0 where undefined."""

    precision: Float
    recall: Float
    f1: Float


class ClassAnswers:
    """Validated class answers, which can be scored over any choice of their rows.

    `targets` are class indices (N,), `probabilities` (N, K) in [0, 1]. The prediction is the most
    probable class (the first of equal ones); with `thresholds`, one of two classes by threshold.
    Raises MetricError for NaN, no rows, an index outside [0, K), or rows that do not sum to 1.
    """

    def __init__(
        self,
        targets: ArrayLike,
        probabilities: ArrayLike,
        top_k: int | None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.probabilities = checked_probabilities(probabilities)  # (N, K)
        self.num_rows, self.num_classes = self.probabilities.shape
        self.targets = _checked_indices(targets, self.num_classes, "targets")  # (N,)
        self.log_losses = log_losses(self.targets, self.probabilities)  # (N,)
        # Compare in float32, as the service does.
        self.predicted: Int = self.probabilities.argmax(axis=1)
        if thresholds is not None:
            self.predicted = decided_classes(np.asarray(probabilities, np.float32), thresholds)
        self._top_k = top_k

    @staticmethod
    def baseline(train_targets: Float, num_rows: int, num_classes: int) -> Float:
        """Return the class frequencies of the training rows, repeated for each row: (N, K)."""
        counts = np.bincount(train_targets.astype(np.int64), minlength=num_classes)
        return np.tile(counts / counts.sum(), (num_rows, 1))

    @staticmethod
    def why_absent(targets: ArrayLike, num_classes: int, top_k: int | None) -> dict[str, str]:
        """Return the metrics that are undefined on these rows, with the reason."""
        absent = {}
        if top_k is None:
            absent["top_k_accuracy"] = "no k was given (evaluate.top_k)"
        elif top_k >= num_classes:
            absent["top_k_accuracy"] = (
                f"with {num_classes} classes, the best {top_k} always include the right one"
            )
        present = np.unique(_checked_indices(targets, num_classes, "targets"))
        if len(present) == 1:
            absent |= dict.fromkeys(
                _RANKING, "all rows have the same class, and a ranking needs rows of two"
            )
        return absent

    def metrics(self, resampling: Resampling, names: Collection[str] | None) -> dict[str, Metric]:
        """Compute the metrics in `names` with intervals; None for all that the rows define."""
        absent = self.why_absent(self.targets, self.num_classes, self._top_k)
        wanted = [name for name in requested(CLASS.metrics, names) if name not in absent]
        values = self.scores(np.arange(self.num_rows)[None], wanted)
        hits = dict.fromkeys(_ACCURACIES, int(self.is_right.sum()))
        hits["top_k_accuracy"] = int(self.is_in_top_k.sum())
        uncertain = [name for name in wanted if name not in hits]
        drawn = samples(self, [name for name in uncertain if name not in _COUNTED], resampling)
        if not set(_COUNTED).isdisjoint(uncertain):
            matrix = confusion_matrix(self.targets, self.predicted, self.num_classes)
            drawn |= _samples_of_counts(matrix, resampling)
        bounds = {
            name: wilson_interval(hits[name], self.num_rows, resampling.confidence)
            for name in wanted
            if name in hits
        }
        bounds |= {name: percentiles(drawn[name], resampling.confidence) for name in uncertain}
        if "calibration_error" in wanted:
            bounds["calibration_error"] = _calibration_bounds(
                float(values["calibration_error"][0]), self, bounds["calibration_error"], resampling
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

    @property
    def is_right(self) -> NDArray[np.bool_]:
        """(N,) True for rows that are predicted correctly."""
        return np.asarray(self.predicted == self.targets)

    @property
    def confidences(self) -> Float:
        """(N,) the probability of each predicted class."""
        return np.asarray(self.probabilities.max(axis=1))

    @property
    def is_in_top_k(self) -> NDArray[np.bool_]:
        """(N,) True for rows whose class is among the k most probable ones."""
        return np.asarray(self._ranks < (self._top_k or 0))

    def _scores_by_count(self, counts: Float, names: Collection[str]) -> dict[str, Float]:
        found: dict[str, Float] = {}
        if not set(_COUNTED).isdisjoint(names):
            found |= scores_from_counts(
                _class_counts(counts, self.targets, self.predicted, self.num_classes)
            )
        if "calibration_error" in names:
            found["calibration_error"] = calibration_errors(self.confidences, self.is_right, counts)
        if not set(_RANKING).isdisjoint(names):
            found |= zip(_RANKING, ranking_scores(self._ranked, counts), strict=True)
        return found

    @cached_property
    def squares(self) -> Float:
        """(N,) squared distance of each row's probabilities to its one-hot target, in [0, 2]."""
        gaps = self.probabilities.copy()
        gaps[np.arange(self.num_rows), self.targets] -= 1
        return np.asarray((gaps**2).sum(axis=1))

    @cached_property
    def _ranks(self) -> Int:
        """(N,) number of classes ranked before the row's own class; ties in class order."""
        own = self.probabilities[np.arange(self.num_rows), self.targets][:, None]
        is_before = np.arange(self.num_classes) < self.targets[:, None]
        is_more_probable = self.probabilities > own
        is_equal_and_before = (self.probabilities == own) & is_before
        return np.asarray((is_more_probable | is_equal_and_before).sum(axis=1))

    @cached_property
    def _ranked(self) -> list[RankedClass]:
        return rank_classes(self.targets, self.probabilities)


def confusion_matrix(targets: ArrayLike, predictions: ArrayLike, num_classes: int) -> Int:
    """Return the confusion matrix (K, K) int64: row = actual class, column = predicted class."""
    actual = _checked_indices(targets, num_classes, "targets")
    predicted = _checked_indices(predictions, num_classes, "predictions")
    if len(actual) != len(predicted):
        raise MetricError(
            f"{len(actual)} targets and {len(predicted)} predictions, "
            "expected one prediction for each target."
        )
    flat = np.bincount(actual * num_classes + predicted, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def count_classes(matrix: Int) -> ClassCounts:
    """Return the diagonal and the row and column sums of a confusion matrix (K, K)."""
    return ClassCounts(
        hits=np.diagonal(matrix).copy(), actual=matrix.sum(axis=1), predicted=matrix.sum(axis=0)
    )


def class_scores(counts: ClassCounts) -> ClassScores:
    """Compute precision, recall and F1 of each class; F1 = 2 hits / (actual + predicted)."""
    return ClassScores(
        precision=fraction(counts.hits, counts.predicted),
        recall=fraction(counts.hits, counts.actual),
        f1=fraction(2 * counts.hits, counts.actual + counts.predicted),
    )


def scores_from_counts(counts: ClassCounts) -> dict[str, Float]:
    """Compute the metrics that follow from a confusion matrix, over the leading axes of `counts`.

    macro: mean over the classes that occur or are predicted, so that a resample without some class
    does not lower the score. weighted: mean weighted by the rows of each class. micro: over all
    rows, which equals the accuracy. Balanced accuracy: mean recall of the classes that occur.
    """
    per_class, total = class_scores(counts), counts.actual.sum(axis=-1)
    accuracy = fraction(counts.hits.sum(axis=-1), total)
    num_seen = (counts.actual + counts.predicted > 0).sum(axis=-1)
    scores = {
        "accuracy": accuracy,
        "balanced_accuracy": fraction(
            per_class.recall.sum(axis=-1), (counts.actual > 0).sum(axis=-1)
        ),
    }
    for name in ("precision", "recall", "f1"):
        values: Float = getattr(per_class, name)
        scores[f"{name}_macro"] = fraction(values.sum(axis=-1), num_seen)
        scores[f"{name}_micro"] = accuracy
        scores[f"{name}_weighted"] = fraction((values * counts.actual).sum(axis=-1), total)
    return scores


def log_losses(targets: ArrayLike, probabilities: ArrayLike) -> Float:
    """Return (N,) the negative natural logarithm of the probability of each row's true class.

    Probabilities are clipped at the spacing of float64 at 1 (2.2e-16): a loss is at most 36.04.
    """
    shares = checked_probabilities(probabilities)
    actual = _checked_indices(targets, shares.shape[1], "targets")
    if len(actual) != len(shares):
        raise MetricError(
            f"{len(actual)} targets and {len(shares)} rows of probabilities, "
            "expected one row for each target."
        )
    own = shares[np.arange(len(shares)), actual]
    return np.asarray(-np.log(np.clip(own, np.finfo(np.float64).eps, 1.0)))


def checked_probabilities(probabilities: ArrayLike) -> Float:
    """Check probabilities (N, K), and return them as float64.

    Raises MetricError unless all numbers are in [0, 1] and each row sums to 1 within 0.01.
    """
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim != 2 or 0 in shares.shape:
        raise MetricError(
            f"probabilities of shape {shares.shape}, "
            "expected (rows, classes) with at least one of each."
        )
    wrong = ~((shares >= 0) & (shares <= 1)).all(axis=1) | ~(
        np.abs(shares.sum(axis=1) - 1) <= _SUM_TOLERANCE
    )
    if wrong.any():
        first = int(wrong.argmax())
        raise MetricError(
            f"{wrong.sum()} of {len(shares)} rows are not probabilities, the first is row {first}: "
            f"{shares[first][:8].tolist()}; expected numbers in [0, 1] that sum to 1."
        )
    return shares


def _samples_of_counts(matrix: Int, resampling: Resampling) -> dict[str, Float]:
    """Return (num_samples,) values of each metric, from confusion matrices of resampled rows.

    Rows in one cell of the matrix are interchangeable, so drawing N rows is one multinomial draw.
    """
    generator = np.random.default_rng(resampling.seed)
    actual, predicted = np.nonzero(matrix)
    shares, total, num_classes = matrix[actual, predicted] / matrix.sum(), matrix.sum(), len(matrix)
    chunks = []
    for size in chunk_sizes(resampling.num_samples, max(len(actual), num_classes)):
        drawn = generator.multinomial(total, shares, size=size)  # (size, cells)
        chunks.append(scores_from_counts(_class_counts(drawn, actual, predicted, num_classes)))
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _class_counts(
    drawn: NDArray[Any], actual: Int, predicted: Int, num_classes: int
) -> ClassCounts:
    """Count the rows of each class in S resamples.

    `drawn` (S, M) counts how often each resample contains each row or cell.
    """
    return ClassCounts(
        hits=_sum_by_class(drawn * (actual == predicted), actual, num_classes),
        actual=_sum_by_class(drawn, actual, num_classes),
        predicted=_sum_by_class(drawn, predicted, num_classes),
    )


def _sum_by_class(drawn: NDArray[Any], classes: Int, num_classes: int) -> Int:
    """Return (S, K) the sums of `drawn` (S, cells) over the cells of each class."""
    order = np.argsort(classes, kind="stable")
    present, starts = np.unique(classes[order], return_index=True)
    sums = np.zeros((len(drawn), num_classes), dtype=np.int64)
    sums[:, present] = np.add.reduceat(drawn.take(order, axis=1), starts, axis=1)
    return sums


def _calibration_bounds(
    value: float,
    answers: ClassAnswers,
    percentile_bounds: tuple[float, float],
    resampling: Resampling,
) -> tuple[float, float]:
    """Return the basic bootstrap interval of the calibration error.

    The interval is widened to contain the value, and to contain 0 if noise explains the value
    (Davison and Hinkley 1997, chapter 5). Noise increases a calibration error, and resampling
    increases it again, so percentiles never cover the error of a calibrated network. These bounds
    cover it in 97 of 100 cases, and the error of a miscalibrated network in 83 to 97 of 100
    (docs/reference/metrics.md).
    """
    low = max(0.0, 2 * value - percentile_bounds[1])
    high = min(1.0, 2 * value - percentile_bounds[0])
    generator = np.random.default_rng(resampling.seed)
    sizes = chunk_sizes(resampling.num_samples, answers.num_rows)
    chance = np.concatenate(
        [
            errors_by_chance(answers.confidences, generator.random((size, answers.num_rows)))
            for size in sizes
        ]
    )
    is_noise = value <= np.quantile(chance, (1 + resampling.confidence) / 2)
    return 0.0 if is_noise else min(value, low), max(value, high)


def _checked_indices(indices: ArrayLike, num_classes: int, name: str) -> Int:
    numbers = np.asarray(indices, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise MetricError(
            f"{name} of shape {numbers.shape}, expected (rows,) with at least one row."
        )
    wrong = ~((numbers >= 0) & (numbers < num_classes) & (numbers == np.floor(numbers)))
    if wrong.any():
        first = int(wrong.argmax())
        raise MetricError(
            f"{name}: {wrong.sum()} of {len(numbers)} are not a class index, the first is row "
            f"{first}: {numbers[first]}; expected a whole number from 0 to {num_classes - 1}."
        )
    return numbers.astype(np.int64)
