"""How good predictions are: metrics in float64 with intervals, on numpy alone.

Every row counts once. NaN, no rows and shapes that do not fit are refused. A class that is never predicted,
or that no row has, scores 0, as with scikit-learn's `zero_division=0`; one that is neither does not count.
The intervals tell how much a number would move with other test rows, not with another training run. The
accuracy has Wilson's score interval (1927), which has a width even where every row is right; the others have
percentiles of resampled rows (Efron and Tibshirani 1993, chapter 13), which have none there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.bundle import Metric
from slipway.contract import CLASSIFICATION_METRICS, REGRESSION_METRICS, Task, is_classification
from slipway.errors import MetricError

Float = NDArray[np.float64]
Int = NDArray[np.int64]

_CHUNK_NUMBERS = 1 << 22  # resamples are drawn in chunks of about this many numbers, 32 MiB each
_ACCURACIES = ("accuracy", "precision_micro", "recall_micro", "f1_micro")  # all are the share of rows that are right
_SUM_TOLERANCE = 0.01  # float16 probabilities do not sum to 1 exactly; logits are far away


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: `num_samples` resamples drawn with `seed`, and the share of them inside."""

    seed: int
    num_samples: int
    confidence: float


@dataclass(frozen=True)
class ClassCounts:
    """Rows per class, (..., K) int64: rightly predicted, having the class, predicted as the class."""

    hits: Int
    actual: Int
    predicted: Int


@dataclass(frozen=True)
class ClassScores:
    """Precision, recall and F1 of each class, (..., K) float64 in [0, 1]; 0 where nothing is divided by."""

    precision: Float
    recall: Float
    f1: Float


def measure(task: Task, targets: ArrayLike, outputs: ArrayLike, resampling: Resampling) -> dict[str, Metric]:
    """Every metric of `task` by name: `outputs` are probabilities (N, K), or values (N, 1) for a numeric target."""
    measure_task = classification_metrics if is_classification(task) else regression_metrics
    return measure_task(targets, outputs, resampling)


def classification_metrics(targets: ArrayLike, probabilities: ArrayLike, resampling: Resampling) -> dict[str, Metric]:
    """Every classification metric with its interval.

    `targets` (N,) class indices, `probabilities` (N, K) in [0, 1]; the prediction is the largest, the first of equals.
    Raises MetricError for NaN, no rows, an index outside [0, K), or rows that do not sum to 1.
    """
    shares = checked_probabilities(probabilities)
    matrix = confusion_matrix(targets, shares.argmax(axis=1), shares.shape[1])
    loss = log_losses(targets, shares)
    values = {**scores_from_counts(count_classes(matrix)), "log_loss": loss.mean()}
    generator = np.random.default_rng(resampling.seed)
    chunks = [scores_from_counts(counts) for counts in _resampled_counts(matrix, resampling.num_samples, generator)]
    samples = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    rows = _resampled_rows(len(loss), resampling.num_samples, generator)
    samples["log_loss"] = np.concatenate([loss[chosen].mean(axis=1) for chosen in rows])
    measured = _with_intervals(CLASSIFICATION_METRICS, values, samples, resampling, len(loss))
    low, high = wilson_interval(int(np.trace(matrix)), len(loss), resampling.confidence)
    return {name: metric.model_copy(update={"low": low, "high": high} if name in _ACCURACIES else {}) for name, metric in measured.items()}


def regression_metrics(targets: ArrayLike, values: ArrayLike, resampling: Resampling) -> dict[str, Metric]:
    """MSE, RMSE, MAE and R2 with their intervals; `targets` and `values` are (N,) or (N, 1) in the target's unit.

    Raises MetricError for NaN, other shapes, or fewer than two rows, where R2 is not defined.
    """
    actual, predicted = _checked_values(targets, "targets"), _checked_values(values, "values")
    if len(actual) != len(predicted):
        raise MetricError(f"{len(actual)} targets and {len(predicted)} values, expected one value for each target.")
    if len(actual) < 2:
        raise MetricError("1 row, expected at least 2: R2 compares with the spread of the targets. Use a larger test split.")
    generator = np.random.default_rng(resampling.seed)
    rows = _resampled_rows(len(actual), resampling.num_samples, generator)
    chunks = [_regression_scores(actual[chosen], predicted[chosen]) for chosen in rows]
    samples = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return _with_intervals(REGRESSION_METRICS, _regression_scores(actual, predicted), samples, resampling, len(actual))


def wilson_interval(num_hits: int, num_rows: int, confidence: float) -> tuple[float, float]:
    """Bounds in [0, 1] of a share that was found to be `num_hits` of `num_rows`.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927) 209-212.
    """
    share, square = num_hits / num_rows, NormalDist().inv_cdf((1 + confidence) / 2) ** 2 / num_rows
    centre = (share + square / 2) / (1 + square)
    reach = np.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return min(share, max(0.0, float(centre - reach))), max(share, min(1.0, float(centre + reach)))


def confusion_matrix(targets: ArrayLike, predictions: ArrayLike, num_classes: int) -> Int:
    """(K, K) int64 from (N,) class indices: row = actual class, column = predicted class."""
    actual = _checked_indices(targets, num_classes, "targets")
    predicted = _checked_indices(predictions, num_classes, "predictions")
    if len(actual) != len(predicted):
        raise MetricError(f"{len(actual)} targets and {len(predicted)} predictions, expected one prediction for each target.")
    flat = np.bincount(actual * num_classes + predicted, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def count_classes(matrix: Int) -> ClassCounts:
    """The margins and the diagonal of a (K, K) confusion matrix."""
    return ClassCounts(hits=np.diagonal(matrix).copy(), actual=matrix.sum(axis=1), predicted=matrix.sum(axis=0))


def class_scores(counts: ClassCounts) -> ClassScores:
    """Precision, recall and F1 of each class; F1 = 2 hits / (actual + predicted)."""
    return ClassScores(
        precision=_share(counts.hits, counts.predicted),
        recall=_share(counts.hits, counts.actual),
        f1=_share(2 * counts.hits, counts.actual + counts.predicted),
    )


def scores_from_counts(counts: ClassCounts) -> dict[str, Float]:
    """Every metric that follows from the confusion matrix, (...) float64, over the leading axes of `counts`.

    macro: mean over the classes that occur or are predicted, so that a resample without some class is not held
    against the network; weighted: by the rows that have the class; micro: over all rows, which is the accuracy
    when each row has one class. Balanced accuracy is the mean recall of the classes that occur.
    """
    per_class, total = class_scores(counts), counts.actual.sum(axis=-1)
    accuracy, num_seen = _share(counts.hits.sum(axis=-1), total), (counts.actual + counts.predicted > 0).sum(axis=-1)
    scores = {"accuracy": accuracy, "balanced_accuracy": _share(per_class.recall.sum(axis=-1), (counts.actual > 0).sum(axis=-1))}
    for name in ("precision", "recall", "f1"):
        values: Float = getattr(per_class, name)
        scores[f"{name}_macro"] = _share(values.sum(axis=-1), num_seen)
        scores[f"{name}_micro"] = accuracy
        scores[f"{name}_weighted"] = _share((values * counts.actual).sum(axis=-1), total)
    return scores


def log_losses(targets: ArrayLike, probabilities: ArrayLike) -> Float:
    """(N,) minus the natural logarithm of the probability of each row's own class.

    A probability below the spacing of float64 at 1 (2.2e-16) is taken as that, so that a loss is at most 36.04.
    """
    shares = checked_probabilities(probabilities)
    actual = _checked_indices(targets, shares.shape[1], "targets")
    if len(actual) != len(shares):
        raise MetricError(f"{len(actual)} targets and {len(shares)} rows of probabilities, expected one row for each target.")
    own: Float = shares[np.arange(len(shares)), actual]
    return -np.log(np.clip(own, np.finfo(np.float64).eps, 1.0))


def checked_probabilities(probabilities: ArrayLike) -> Float:
    """`probabilities` as (N, K) float64; MetricError unless each row is in [0, 1] and sums to 1 within 0.01."""
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim != 2 or 0 in shares.shape:
        raise MetricError(f"probabilities of shape {shares.shape}, expected (rows, classes) with at least one of each.")
    wrong = ~((shares >= 0) & (shares <= 1)).all(axis=1) | ~(np.abs(shares.sum(axis=1) - 1) <= _SUM_TOLERANCE)
    if wrong.any():
        first = int(wrong.argmax())
        raise MetricError(
            f"{wrong.sum()} of {len(shares)} rows are no probabilities, the first is row {first}: {shares[first][:8].tolist()}; "
            "expected numbers in [0, 1] that sum to 1."
        )
    return shares


def _regression_scores(actual: Float, predicted: Float) -> dict[str, Float]:
    """Over the last axis. R2 of targets that are all equal is 1 where every value is right, else 0."""
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
    }


def _resampled_counts(matrix: Int, num_samples: int, generator: np.random.Generator) -> Iterator[ClassCounts]:
    """Counts of resampled rows. Rows in one cell of the matrix are alike, so drawing N rows is one multinomial draw."""
    actual, predicted = np.nonzero(matrix)
    shares, total, num_classes = matrix[actual, predicted] / matrix.sum(), matrix.sum(), len(matrix)
    for size in _chunk_sizes(num_samples, max(len(actual), num_classes)):
        drawn = generator.multinomial(total, shares, size=size)  # (size, cells)
        yield ClassCounts(
            hits=_sum_by_class(drawn * (actual == predicted), actual, num_classes),
            actual=_sum_by_class(drawn, actual, num_classes),
            predicted=_sum_by_class(drawn, predicted, num_classes),
        )


def _sum_by_class(drawn: Int, classes: Int, num_classes: int) -> Int:
    """(S, cells) and the class of each cell -> (S, K)."""
    order = np.argsort(classes, kind="stable")
    present, starts = np.unique(classes[order], return_index=True)
    sums = np.zeros((len(drawn), num_classes), dtype=np.int64)
    sums[:, present] = np.add.reduceat(drawn[:, order], starts, axis=1)
    return sums


def _resampled_rows(num_rows: int, num_samples: int, generator: np.random.Generator) -> Iterator[Int]:
    """(size, N) indices of rows drawn with replacement."""
    for size in _chunk_sizes(num_samples, num_rows):
        yield generator.integers(num_rows, size=(size, num_rows))


def _chunk_sizes(num_samples: int, width: int) -> Iterator[int]:
    largest = max(1, _CHUNK_NUMBERS // width)
    for start in range(0, num_samples, largest):
        yield min(largest, num_samples - start)


def _with_intervals(
    names: tuple[str, ...], values: dict[str, Float], samples: dict[str, Float], resampling: Resampling, rows: int
) -> dict[str, Metric]:
    outside = (1 - resampling.confidence) / 2
    metrics = {}
    for name in names:
        low, high = np.quantile(samples[name], [outside, 1 - outside])
        metrics[name] = Metric(value=float(values[name]), low=float(low), high=float(high), confidence=resampling.confidence, rows=rows)
    return metrics


def _checked_indices(indices: ArrayLike, num_classes: int, name: str) -> Int:
    numbers = np.asarray(indices, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise MetricError(f"{name} of shape {numbers.shape}, expected (rows,) with at least one row.")
    wrong = ~((numbers >= 0) & (numbers < num_classes) & (numbers == np.floor(numbers)))
    if wrong.any():
        first = int(wrong.argmax())
        raise MetricError(
            f"{name}: {wrong.sum()} of {len(numbers)} are no class index, the first is row {first}: {numbers[first]}; "
            f"expected a whole number from 0 to {num_classes - 1}."
        )
    return numbers.astype(np.int64)


def _checked_values(values: ArrayLike, name: str) -> Float:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim != 1 or not len(numbers):
        raise MetricError(f"{name} of shape {numbers.shape}, expected (rows,) or (rows, 1) with at least one row.")
    if not np.isfinite(numbers).all():
        first = int((~np.isfinite(numbers)).argmax())
        raise MetricError(f"{name}: row {first} is {numbers[first]}, expected finite numbers.")
    return numbers


def _share(part: NDArray[np.number], whole: NDArray[np.number]) -> Float:
    """part / whole in float64, 0 where the whole is 0."""
    share: Float = np.divide(part, whole, out=np.zeros(np.shape(part), dtype=np.float64), where=np.asarray(whole) != 0)
    return share
