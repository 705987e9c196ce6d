"""Scores each slice, and finds slices that are significantly worse than the other rows.

The test is a permutation test. The losses of all rows (wrong or not, or the squared error) are
permuted many times, and the largest standardised mean over all slices is recorded each time. A
slice is called worse if its own mean exceeds nearly all of these maxima: the step-down procedure of
Westfall and Young (Resampling-Based Multiple Testing, 1993, algorithm 2.8). The probability of
calling any slice worse by chance stays below 1 - confidence, for any number of slices, even if they
overlap. The procedure has more power than Holm's correction.

Rows are assumed to be independent. If many rows come from one source, the p-values are too small.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Resampling, fraction_of, measure
from slipway.metrics.user_metrics import UserMetric, measure_user_metrics
from slipway.reports.evaluation.slices import Dimension

_CHUNK_NUMBERS = 1 << 22  # permuted rows held in memory at a time
_MAX_NAMED = 20  # small slices listed for one dimension; more are reported as one
_TIES = 1e-9  # relative: sums of the same losses in another order differ by rounding


@dataclass(frozen=True)
class RowAnswers:
    """The targets (N,) of the test rows and the answers: (N, K) probabilities or (N, 1) values."""

    task: Task
    targets: NDArray[Any]
    outputs: NDArray[np.float32]
    top_k: int | None = None
    user_metrics: Sequence[UserMetric] = ()
    thresholds: Sequence[float] | None = None  # of the labels, if rows have several

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """The loss of each row (N,): 1 for a wrong label, else 0; or the squared error."""
        target = kind_of(self.task).target
        losses: NDArray[np.float64]
        losses = target.load_part("uncertainty").losses(self.outputs, self.targets, self.thresholds)
        return losses if target.has_classes else losses**2

    def measure(
        self, rows: NDArray[np.bool_], names: Collection[str], resampling: Resampling
    ) -> dict[str, Metric]:
        """Measure these metrics over `rows` (N,), without those that the rows do not define."""
        own = [metric for metric in self.user_metrics if metric.name in names]
        given = self.task, self.targets[rows], self.outputs[rows]
        built_in = set(names).difference(metric.name for metric in own)
        return {
            **measure(
                *given, resampling, top_k=self.top_k, names=built_in, thresholds=self.thresholds
            ),
            **measure_user_metrics(own, *given, resampling),
        }


@dataclass(frozen=True)
class SmallSlice:
    """A slice with too few rows to be judged, or several such slices of one dimension."""

    by: str
    value: str
    rows: int


@dataclass(frozen=True)
class SliceScore:
    """One slice. `p_value`, adjusted for all slices, tests if it is worse than the other rows."""

    by: str
    value: str
    members: NDArray[np.bool_]  # (N,)
    metric: Metric
    p_value: float
    is_worse: bool

    @property
    def title(self) -> str:
        """Name such as "class 7" or "size below 1,000 px"."""
        return f"{self.by} {self.value}"


@dataclass(frozen=True)
class SliceScores:
    """Every slice, measured by the headline `metric`.

    The worst comes first, by the better bound of its interval.
    """

    metric: str
    judged: list[SliceScore]
    too_small: list[SmallSlice]
    constant: list[str]  # dimensions with all rows in one slice
    confidence: float

    @property
    def worse(self) -> list[SliceScore]:
        """Slices that are worse than the other rows."""
        return [score for score in self.judged if score.is_worse]


@dataclass(frozen=True)
class _Candidate:
    by: str
    value: str
    dimension: int
    code: int


def score_slices(
    dimensions: Sequence[Dimension], answers: RowAnswers, min_rows: int, resampling: Resampling
) -> SliceScores:
    """Measure every slice of at least `min_rows` rows, with as many permutations as resamples."""
    constant = [dimension.name for dimension in dimensions if not dimension.varies]
    dimensions = [dimension for dimension in dimensions if dimension.varies]
    chosen, too_small = _large_and_small(dimensions, min_rows)
    p_values = adjusted_p_values(
        answers.losses, _slice_of_rows(dimensions, chosen), len(chosen), resampling
    )
    judged = []
    for candidate, p_value in zip(chosen, p_values.tolist(), strict=True):
        members = dimensions[candidate.dimension].codes == candidate.code
        metric = _measured(answers, members, resampling)
        is_worse = p_value <= 1 - resampling.confidence
        judged.append(SliceScore(candidate.by, candidate.value, members, metric, p_value, is_worse))
    target = kind_of(answers.task).target
    # By the better bound of the interval, as a number that rises with quality.
    if target.headline_is_fraction:
        judged.sort(key=lambda score: (score.metric.high, score.p_value))
    else:
        judged.sort(key=lambda score: (-score.metric.low, score.p_value))
    return SliceScores(target.headline, judged, too_small, constant, resampling.confidence)


def adjusted_p_values(
    losses: NDArray[np.float64], slices: NDArray[np.int64], num_slices: int, resampling: Resampling
) -> NDArray[np.float64]:
    """Return (num_slices,) p-values in (0, 1]: the probability that chance makes any slice as bad.

    Args:
        losses: (N,) 0 or more.
        slices: (D, N) slice of each row in each dimension, `num_slices` for none. No slice has all
            rows.
    """
    if not num_slices or losses.var() == 0:
        return np.ones(num_slices)
    sizes = np.bincount(slices.ravel(), minlength=num_slices + 1)[:num_slices]
    standardise = _Standardised(losses, sizes)
    lossy = np.flatnonzero(losses)
    observed = standardise(_sums(slices[:, lossy][None], losses[lossy], num_slices))[0]
    drawn = _permuted_sums(losses[lossy], slices, num_slices, resampling)
    chance = np.concatenate([standardise(sums) for sums in drawn])  # (P, num_slices)
    order = np.argsort(-observed, kind="stable")
    largest_left = np.maximum.accumulate(chance[:, order[::-1]], axis=1)[:, ::-1]
    as_bad = (largest_left >= observed[order] - _TIES * np.abs(observed[order])).sum(axis=0)
    p_values = np.empty(num_slices)
    p_values[order] = np.maximum.accumulate((1 + as_bad) / (1 + len(chance)))
    return p_values


class _Standardised:
    """Standardises sums of losses in slices of `sizes` rows drawn without replacement."""

    def __init__(self, losses: NDArray[np.float64], sizes: NDArray[np.int64]) -> None:
        num_rows = len(losses)
        self._expected = sizes * losses.mean()
        self._spread = np.sqrt(sizes * losses.var() * (num_rows - sizes) / (num_rows - 1))

    def __call__(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((sums - self._expected) / self._spread)


def _permuted_sums(
    losses: NDArray[np.float64], slices: NDArray[np.int64], num_slices: int, resampling: Resampling
) -> Iterator[NDArray[np.float64]]:
    """Yield sums of losses by slice, (chunk, num_slices), with `losses` assigned to random rows."""
    num_rows = slices.shape[1]
    generator = np.random.default_rng(resampling.seed)
    largest = max(1, _CHUNK_NUMBERS // slices.size)
    for start in range(0, resampling.num_samples, largest):
        shape = (min(largest, resampling.num_samples - start), num_rows)
        rows = generator.permuted(
            np.broadcast_to(np.arange(num_rows, dtype=np.int32), shape), axis=1
        )[:, : len(losses)]
        yield _sums(slices[:, rows].swapaxes(0, 1), losses, num_slices)


def _sums(
    slices: NDArray[np.int64], losses: NDArray[np.float64], num_slices: int
) -> NDArray[np.float64]:
    """Sum E losses by slice, (P, num_slices); `slices` (P, D, E) has the slice of each loss."""
    width = num_slices + 1
    places = slices + width * np.arange(len(slices))[:, None, None]
    sums = np.bincount(
        places.ravel(), np.broadcast_to(losses, slices.shape).ravel(), minlength=width * len(slices)
    ).astype(np.float64)
    return sums.reshape(len(slices), width)[:, :num_slices]


def _large_and_small(
    dimensions: Sequence[Dimension], min_rows: int
) -> tuple[list[_Candidate], list[SmallSlice]]:
    chosen, small = [], []
    for place, dimension in enumerate(dimensions):
        counts = dimension.counts
        chosen += [
            _Candidate(dimension.name, dimension.values[code], place, int(code))
            for code in np.flatnonzero(counts >= min_rows)
        ]
        small += _small(dimension, np.flatnonzero(counts < min_rows))
    return chosen, small


def _small(dimension: Dimension, codes: NDArray[np.int64]) -> list[SmallSlice]:
    counts = dimension.counts
    if len(codes) > _MAX_NAMED:
        return [SmallSlice(dimension.name, f"({len(codes)} values)", int(counts[codes].sum()))]
    return [SmallSlice(dimension.name, dimension.values[code], int(counts[code])) for code in codes]


def _slice_of_rows(
    dimensions: Sequence[Dimension], chosen: Sequence[_Candidate]
) -> NDArray[np.int64]:
    """Return the index in `chosen` of each row's slice, (D, N); len(chosen) for none."""
    found = []
    for place, dimension in enumerate(dimensions):
        numbers = np.full(len(dimension.values) + 1, len(chosen))  # the last is for code -1
        for number, candidate in enumerate(chosen):
            if candidate.dimension == place:
                numbers[candidate.code] = number
        found.append(numbers[dimension.codes])
    return np.array(found, np.int64)


def _measured(answers: RowAnswers, members: NDArray[np.bool_], resampling: Resampling) -> Metric:
    target = kind_of(answers.task).target
    if not target.headline_is_fraction:
        return answers.measure(members, [target.headline], resampling)[target.headline]
    return fraction_of(answers.losses[members] == 0, resampling.confidence)
