"""Joint reference of all numeric inputs, to detect changes in how the features vary together.

Maximum mean discrepancy (Gretton et al., A kernel two-sample test, JMLR 13, 2012) with a Gaussian
kernel, approximated by random Fourier features (Rahimi and Recht, NIPS 2007). Their means can be
summed over rows, windows and workers. Each number enters as the normal score of its bin, so units
and extreme values do not matter.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.drift.distributions import quadratic_form_tail, quadratic_form_threshold
from slipway.drift.feature_reference import FeatureReference
from slipway.drift.two_sample_tests import TwoSampleTest
from slipway.system.contract import Contract

Float = NDArray[np.float64]
Bins = NDArray[np.intp]
Sums = NDArray[np.int64]

NUM_FREQUENCIES = 64
FIXED_POINT = 2.0**20  # sums are integers, so they are equal in any order of summation
_SEED = 20261122
_MIN_ROWS = 100  # fewest rows of the reference
_MAX_PAIRS = 4096  # most pairs of rows for the median distance
_BLOCK_ROWS = 1024


class JointReference(Contract):
    """The reference's mean random features, and the null distribution of a window's distance."""

    columns: list[int]  # indices of the numeric input features
    seed: int  # seed of frequencies and phases, drawn by numpy's RandomState, whose stream is fixed
    bandwidth: float  # bandwidth of the Gaussian kernel, in normal scores
    mean: list[float]  # (frequencies,) of the reference
    # Eigenvalues of the random features' covariance: the chi-square weights, above 0.
    eigenvalues: list[float]
    rows: int

    def test(self, mean: Float, num_rows: int, level: float) -> TwoSampleTest:
        """Test the squared distance between a window's `mean` and the reference's."""
        scale = 1 / num_rows + 1 / self.rows
        value = np.asarray(np.square(mean - np.array(self.mean)).sum())
        threshold = quadratic_form_threshold(level, tuple(self.eigenvalues)) * scale
        return TwoSampleTest(
            "mmd",
            value,
            np.asarray(threshold),
            np.asarray(quadratic_form_tail(float(value) / scale, np.array(self.eigenvalues))),
        )

    def angle_table(self, features: Sequence[FeatureReference]) -> list[Float]:
        """Return for each column (bins, frequencies): what a value in a bin adds to the angle.

        The first column's table includes the random phase.
        """
        chosen = [features[column] for column in self.columns]
        return _angle_table(chosen, self.seed, self.bandwidth, len(self.mean))


def random_sums(bins: Sequence[Bins], table: Sequence[Float]) -> Sums:
    """Return (frequencies,) integer sums over rows of random features times FIXED_POINT.

    `bins` has the (rows,) bin indices of each column. Each row is rounded before the sum, so the
    result does not depend on the order or the division of the rows.
    """
    total = np.zeros(table[0].shape[1], np.int64)
    for block in _random_features(bins, table):
        total += block.sum(axis=0)
    return total


def fit_joint(
    features: Sequence[FeatureReference], values: NDArray[np.float32]
) -> JointReference | None:
    """Fit the reference for drift of several features together to (rows, features) inputs.

    It shows changes in how numbers vary together, which no feature shows alone. Returns None if
    fewer than two numeric features vary, or there are too few rows.
    """
    columns = [index for index, feature in enumerate(features) if feature.varies]
    if len(columns) < 2 or len(values) < _MIN_ROWS:
        return None
    chosen = [features[column] for column in columns]
    bins = [features[column].bins(values[:, column]) for column in columns]
    scores = [feature.normal_scores[own] for feature, own in zip(chosen, bins, strict=True)]
    bandwidth = _median_bandwidth(np.column_stack(scores))
    table = _angle_table(chosen, _SEED, bandwidth, NUM_FREQUENCIES)
    mean, covariance = _moments(bins, table)
    eigenvalues = np.linalg.eigvalsh(covariance)[::-1]
    return JointReference(
        columns=columns,
        seed=_SEED,
        bandwidth=bandwidth,
        mean=mean.tolist(),
        eigenvalues=eigenvalues[eigenvalues > eigenvalues[0] * 1e-9].tolist(),
        rows=len(values),
    )


def _angle_table(
    features: Sequence[FeatureReference], seed: int, bandwidth: float, num_frequencies: int
) -> list[Float]:
    random = np.random.RandomState(seed)
    frequencies = random.standard_normal((len(features), num_frequencies)) / bandwidth
    phases = random.uniform(0, 2 * np.pi, num_frequencies)
    table = [
        np.outer(feature.normal_scores, own)
        for feature, own in zip(features, frequencies, strict=True)
    ]
    return [table[0] + phases, *table[1:]]


def _random_features(bins: Sequence[Bins], table: Sequence[Float]) -> Iterator[Sums]:
    """Yield rounded random features in blocks of (block rows, frequencies).

    Adds column by column: the last digit of a matrix product may depend on the other rows.
    """
    for start in range(0, len(bins[0]), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        angles = table[0][bins[0][block]]
        for column_table, column in zip(table[1:], bins[1:], strict=True):
            angles += column_table[column[block]]
        yield np.rint(np.cos(angles) * (np.sqrt(2) * FIXED_POINT)).astype(np.int64)


def _moments(bins: Sequence[Bins], table: Sequence[Float]) -> tuple[Float, Float]:
    """Return the (frequencies,) mean and the covariance of the random features."""
    num_rows, size = len(bins[0]), table[0].shape[1]
    total, products = np.zeros(size), np.zeros((size, size))
    for rounded in _random_features(bins, table):
        block = rounded / FIXED_POINT
        total += block.sum(axis=0)
        products += block.T @ block
    mean = total / num_rows
    return mean, (products / num_rows - np.outer(mean, mean)) * num_rows / (num_rows - 1)


def _median_bandwidth(scores: Float) -> float:
    """Return the bandwidth by the median heuristic: median distance of row pairs over sqrt(2)."""
    half = len(scores) // 2
    num_pairs = min(half, _MAX_PAIRS)
    distances = np.linalg.norm(scores[:num_pairs] - scores[half : half + num_pairs], axis=1)
    return max(float(np.median(distances)), 1e-3) / float(np.sqrt(2))
