"""All numbers of the input together: a change of how they go together, which no feature shows alone.

The maximum mean discrepancy (Gretton et al., A kernel two-sample test, Journal of Machine Learning Research 13, 2012) with a Gaussian
kernel, computed by random Fourier features (Rahimi and Recht, NIPS 2007), whose means can be summed over rows, windows and workers.
Each number enters as the normal score of its bin, so that no unit and no far value weighs more than others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference
from slipway.drift.laws import quadratic_form_tail, quadratic_form_threshold
from slipway.drift.statistics import Comparison
from slipway.system.contract import Contract

Bins = NDArray[np.intp]
Sums = NDArray[np.int64]

NUM_FREQUENCIES = 64
FIXED_POINT = 2.0**20  # sums are whole numbers, so that they are the same in any order
_SEED = 20261122
_LEAST_ROWS = 100  # of the reference
_MOST_PAIRS = 4096  # of rows, for the median distance
_BLOCK_ROWS = 1024


class JointReference(Contract):
    """The random features' mean over the reference, and the law of a window's distance from it."""

    columns: list[int]  # of the features that enter, all of them numbers of the input
    seed: int  # of the frequencies and phases, by numpy's RandomState, whose stream is fixed
    bandwidth: float  # of the Gaussian kernel, in normal scores
    mean: list[float]  # (frequencies,) of the reference
    eigenvalues: list[float]  # of the random features' covariance: the law's weights, above 0
    rows: int

    def test(self, mean: NDArray[np.float64], num_rows: int, level: float) -> Comparison:
        """The squared distance of a window's `mean` from the reference's, by the law of the reference's own covariance."""
        scale, weights = 1 / num_rows + 1 / self.rows, self.eigenvalues
        value = np.asarray(np.square(mean - np.array(self.mean)).sum())
        threshold = np.asarray(quadratic_form_threshold(level, tuple(weights)) * scale)
        return Comparison(
            "mmd",
            value,
            threshold,
            lambda: np.asarray(quadratic_form_tail(float(value) / scale, np.array(weights))),
        )

    @property
    def _draws(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return _frequencies(self.seed, len(self.columns), self.bandwidth, len(self.mean))

    def table(self, features: Sequence[FeatureReference]) -> list[NDArray[np.float64]]:
        """For each column (bins, frequencies): what its bin adds to the angle; the phase is in the first."""
        return _angle_table([features[column] for column in self.columns], *self._draws)


def random_sums(bins: Sequence[Bins], table: Sequence[NDArray[np.float64]]) -> Sums:
    """(frequencies,) whole numbers: the random features, times FIXED_POINT and rounded, summed over rows.

    `bins` holds for each column the (rows,) bins. The same for any order and any division of the rows.
    """
    total = np.zeros(table[0].shape[1], np.int64)
    for start in range(0, len(bins[0]), _BLOCK_ROWS):
        total += _rounded([column[start : start + _BLOCK_ROWS] for column in bins], table).sum(
            axis=0
        )
    return total


def fit_joint(
    features: Sequence[FeatureReference], values: NDArray[np.float32]
) -> JointReference | None:
    """From the features of the input and their (rows, features) values; None with fewer than two numbers that vary, or few rows."""
    columns = [
        place
        for place, feature in enumerate(features)
        if feature.kind == "number" and feature.varies
    ]
    if len(columns) < 2 or len(values) < _LEAST_ROWS:
        return None
    taken = [features[column] for column in columns]
    bins = [feature.bins(values[:, column]) for feature, column in zip(taken, columns, strict=True)]
    bandwidth = _bandwidth(
        np.column_stack(
            [feature.normal_scores[own] for feature, own in zip(taken, bins, strict=True)]
        )
    )
    table = _angle_table(taken, *_frequencies(_SEED, len(columns), bandwidth, NUM_FREQUENCIES))
    mean, covariance = _moments(bins, table)
    eigenvalues = np.linalg.eigvalsh(covariance)[::-1]
    kept = eigenvalues[eigenvalues > eigenvalues[0] * 1e-9]
    return JointReference(
        columns=columns,
        seed=_SEED,
        bandwidth=bandwidth,
        mean=mean.tolist(),
        eigenvalues=kept.tolist(),
        rows=len(values),
    )


def _frequencies(
    seed: int, num_columns: int, bandwidth: float, num: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(columns, num) and (num,) phases."""
    generator = np.random.RandomState(seed)
    return generator.standard_normal((num_columns, num)) / bandwidth, generator.uniform(
        0, 2 * np.pi, num
    )


def _angle_table(
    features: Sequence[FeatureReference],
    frequencies: NDArray[np.float64],
    phases: NDArray[np.float64],
) -> list[NDArray[np.float64]]:
    table = [
        np.outer(feature.normal_scores, own)
        for feature, own in zip(features, frequencies, strict=True)
    ]
    return [table[0] + phases, *table[1:]]


def _rounded(bins: Sequence[Bins], table: Sequence[NDArray[np.float64]]) -> Sums:
    """(rows, frequencies). Column after column, never by a matrix product, whose last digit depends on the rows beside it."""
    angles = table[0][bins[0]]
    for own, column in zip(table[1:], bins[1:], strict=True):
        angles += own[column]
    rounded: Sums = np.rint(np.cos(angles) * (np.sqrt(2) * FIXED_POINT)).astype(np.int64)
    return rounded


def _moments(
    bins: Sequence[Bins], table: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and covariance of the random features, from blocks of rows."""
    num_rows, size = len(bins[0]), table[0].shape[1]
    total, products = np.zeros(size), np.zeros((size, size))
    for start in range(0, num_rows, _BLOCK_ROWS):
        block = (
            _rounded([column[start : start + _BLOCK_ROWS] for column in bins], table) / FIXED_POINT
        )
        total += block.sum(axis=0)
        products += block.T @ block
    mean = total / num_rows
    return mean, (products / num_rows - np.outer(mean, mean)) * num_rows / (num_rows - 1)


def _bandwidth(scores: NDArray[np.float64]) -> float:
    """The median distance of pairs of rows over the root of 2: the usual choice, by which the kernel of the median pair is exp(-1)."""
    half = len(scores) // 2
    pairs = min(half, _MOST_PAIRS)
    distances = np.linalg.norm(scores[:pairs] - scores[half : half + pairs], axis=1)
    return max(float(np.median(distances)), 1e-3) / float(np.sqrt(2))
