"""Metrics with intervals: `measure` for any kind of target, and helpers that the kinds share.

Every row counts once. NaN, no rows and mismatched shapes raise MetricError. A metric that is
undefined on the rows is absent, never NaN (see `why_absent`). Intervals show how much a metric
would change with other test rows, not with another training run. They are percentiles of resampled
rows (Efron and Tibshirani 1993, chapter 13), or Wilson intervals for fractions of rows.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.artifacts.bundle import Metric
from slipway.kinds.registry import Task, kind_of
from slipway.system.contract import Contract
from slipway.system.errors import MetricError

Float = NDArray[np.float64]
Int = NDArray[np.int64]

_CHUNK_NUMBERS = 1 << 22  # resamples are drawn in chunks of about this many numbers, 32 MiB each


@dataclass(frozen=True)
class Resampling:
    """Settings of bootstrap intervals: seed, number of resamples and confidence."""

    seed: int
    num_samples: int
    confidence: float


class TargetErrors(Contract):
    """Errors (value - target) in one range, in the target's unit."""

    low: float  # smallest and largest target of the range
    high: float
    mean_error: Metric  # above 0: values are too large
    mae: Metric
    rmse: Metric


def measure(
    task: Task,
    targets: ArrayLike,
    outputs: ArrayLike,
    resampling: Resampling,
    *,
    top_k: int | None = None,
    names: Collection[str] | None = None,
    thresholds: Sequence[float] | None = None,
) -> dict[str, Metric]:
    """Compute metrics of `task` by name, except those in `why_absent`.

    Args:
        outputs: (N, K) probabilities, or (N, 1) values.
        thresholds: (K,) decision thresholds; None for the most probable class, or 1/2 for labels.
        top_k: the k of `top_k_accuracy`; None omits the metric.
        names: requested metrics, None for all; intervals do not depend on the choice.
    """
    answers = kind_of(task).target.load_part("scores")(targets, outputs, top_k, thresholds)
    return cast(dict[str, Metric], answers.metrics(resampling, names))


def why_absent(
    task: Task, targets: ArrayLike, num_classes: int, top_k: int | None
) -> dict[str, str]:
    """Return the metrics of `task` that are undefined on these rows, with the reason."""
    answers = kind_of(task).target.load_part("scores")
    return cast(dict[str, str], answers.why_absent(targets, num_classes, top_k))


def baseline_scores(
    task: Task,
    train_targets: NDArray[Any],
    targets: NDArray[Any],
    num_classes: int,
    top_k: int | None,
) -> dict[str, float]:
    """Compute the metrics of the trivial predictor on the test `targets` (N,).

    The trivial predictor gives each row the same answer, fitted on the training rows: the class
    frequencies, or the mean target. Metrics that the test rows do not define are absent.
    """
    target = kind_of(task).target
    make_answers = target.load_part("scores")
    outputs = baseline_outputs(task, train_targets, len(targets), num_classes)
    answers = make_answers(targets, outputs, top_k)
    absent = make_answers.why_absent(targets, num_classes, top_k)
    names = [name for name in target.metrics if name not in absent]
    found = answers.scores(np.arange(len(targets))[None], names)
    return {name: float(found[name][0]) for name in names}


def baseline_outputs(
    task: Task, train_targets: NDArray[Any], num_rows: int, num_classes: int
) -> Float:
    """Return the outputs of the trivial predictor for `num_rows` rows: (N, K) or (N,)."""
    make_answers = kind_of(task).target.load_part("scores")
    return cast(Float, make_answers.baseline(train_targets, num_rows, num_classes))


def wilson_interval(num_hits: int, num_rows: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval, in [0, 1], of the fraction `num_hits` / `num_rows`.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22
    (1927) 209-212.
    """
    share, square = num_hits / num_rows, NormalDist().inv_cdf((1 + confidence) / 2) ** 2 / num_rows
    centre = (share + square / 2) / (1 + square)
    reach = np.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return min(share, max(0.0, float(centre - reach))), max(share, min(1.0, float(centre + reach)))


def fraction(part: NDArray[np.number], whole: ArrayLike) -> Float:
    """Return `part` / `whole` in float64; 0 where `whole` is 0."""
    divisor = np.asarray(whole, np.float64)
    return np.asarray(np.divide(part, divisor, out=np.zeros(divisor.shape), where=divisor > 0))


def fraction_of(is_so: NDArray[np.bool_], confidence: float) -> Metric:
    """Return the fraction of (N,) rows that are True, with Wilson's interval."""
    low, high = wilson_interval(int(is_so.sum()), len(is_so), confidence)
    return Metric(
        value=float(is_so.mean()), low=low, high=high, confidence=confidence, rows=len(is_so)
    )


def samples(answers: Any, names: Collection[str], resampling: Resampling) -> dict[str, Float]:
    """Return (num_samples,) values of each metric, one for each resample of the rows."""
    if not names:
        return {}
    chunks = [
        answers.scores(chosen, names) for chosen in resampled_rows(answers.num_rows, resampling)
    ]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in names}


def resampled_rows(num_rows: int, resampling: Resampling) -> Iterator[Int]:
    """Yield chunks (size, N) of row numbers drawn with replacement; equal for equal arguments."""
    generator = np.random.default_rng(resampling.seed)
    for size in chunk_sizes(resampling.num_samples, num_rows):
        yield generator.integers(num_rows, size=(size, num_rows))


def row_counts(chosen: Int, num_rows: int) -> Float:
    """Return (S, N) how often each line of row numbers `chosen` (S, M) contains each row."""
    places = chosen + num_rows * np.arange(len(chosen))[:, None]
    return (
        np.bincount(places.ravel(), minlength=len(chosen) * num_rows)
        .reshape(-1, num_rows)
        .astype(np.float64)
    )


def chunk_sizes(num_samples: int, width: int) -> Iterator[int]:
    largest = max(1, _CHUNK_NUMBERS // width)
    for start in range(0, num_samples, largest):
        yield min(largest, num_samples - start)


def requested(known: tuple[str, ...], names: Collection[str] | None) -> list[str]:
    """Return the `known` metrics that are in `names`, or all if None.

    Raises MetricError for an unknown name.
    """
    unknown = sorted(set(names or ()).difference(known))
    if unknown:
        raise MetricError(
            f"{', '.join(unknown)}: not a metric of this task, expected some of {', '.join(known)}."
        )
    return [name for name in known if names is None or name in names]


def metric_of(
    value: Float, bounds: tuple[float, float], resampling: Resampling, rows: int
) -> Metric:
    low, high = bounds
    return Metric(
        value=float(value[0]), low=low, high=high, confidence=resampling.confidence, rows=rows
    )


def percentiles(samples: Float, confidence: float) -> tuple[float, float]:
    """Return the central interval with `confidence` of the (S,) `samples`; NaN is ignored."""
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        raise MetricError(
            f"none of {len(samples)} resamples has rows of two classes. "
            "Use more rows, or more resamples."
        )
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
