"""Two-sample tests on bin counts: PSI, Kolmogorov-Smirnov and Mann-Whitney.

Each takes (..., bins) counts of windows and (bins,) counts of the reference. Both are samples. A
threshold that treats the reference as the true distribution would alarm on clean traffic, more
often for a smaller reference.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.drift import distributions

Float = NDArray[np.float64]
Statistic = Literal["psi", "kolmogorov_smirnov", "mann_whitney", "mmd"]


@dataclass(frozen=True)
class TwoSampleTest:
    """The results of many two-sample tests at one significance level; arrays of one shape.

    A test compares a window of traffic with the reference. Its value is beyond the threshold if
    the two differ.
    """

    statistic: Statistic
    values: Float
    thresholds: Float
    p_values: Float  # probability, without drift, of a value at least as extreme

    @property
    def exceeded(self) -> NDArray[np.bool_]:
        """(...) True for values that exceed their threshold in absolute value."""
        return np.abs(self.values) > self.thresholds


def sampling_variance(windows: Float, reference: Float) -> Float:
    """Return (...) 1/W + 1/N for W rows in a window and N rows in the reference."""
    variance: Float = 1 / windows.sum(axis=-1) + 1 / reference.sum()
    return variance


def psi(windows: ArrayLike, reference: ArrayLike, level: float) -> TwoSampleTest:
    """Compute the population stability index in its quadratic form; test it by chi-square.

    The index sums (p - q) ln(p / q) over bins. The quadratic form is (p - q)**2 over the fraction
    of both samples together: equal to second order and defined for empty bins. Divided by
    1/W + 1/N it is exactly Pearson's statistic of homogeneity, chi-square distributed with
    bins - 1 degrees of freedom at far smaller counts (bench/results/drift_laws.md).
    """
    counts, expected = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    pooled = counts + expected
    pooled_fractions = np.where(pooled > 0, pooled, 1.0) / pooled.sum(axis=-1, keepdims=True)
    fractions = counts / counts.sum(axis=-1, keepdims=True)
    gaps = fractions - expected / expected.sum()
    values = (np.square(gaps) / pooled_fractions).sum(axis=-1)
    scale = sampling_variance(counts, expected)
    freedom = max(1, counts.shape[-1] - 1)
    thresholds = distributions.chi_square_threshold(level, freedom) * scale
    return TwoSampleTest(
        "psi", values, thresholds, distributions.chi_square_tail(values / scale, freedom)
    )


def kolmogorov_smirnov(windows: ArrayLike, reference: ArrayLike, level: float) -> TwoSampleTest:
    """Compute the largest distance between the distribution functions at the bins' edges.

    On bins the distance exceeds Kolmogorov's threshold less often than the level, so the test is
    conservative.
    """
    counts, expected = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    below = np.cumsum(counts, axis=-1) / counts.sum(axis=-1, keepdims=True)
    values = np.abs(below - np.cumsum(expected) / expected.sum()).max(axis=-1)
    scale = np.sqrt(sampling_variance(counts, expected))
    return TwoSampleTest(
        "kolmogorov_smirnov",
        values,
        distributions.kolmogorov_threshold(level) * scale,
        distributions.kolmogorov_tail(values / scale),
    )


def mann_whitney(windows: ArrayLike, reference: ArrayLike, level: float) -> TwoSampleTest:
    """Compute the probability that a window's row exceeds a reference row, minus one half.

    Positive for a shift up, negative for a shift down. Ties count half. The test is a normal
    approximation with the variance corrected for ties (Lehmann, Nonparametrics, 1975, section 1.4).
    """
    counts, expected = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    num_window, num_reference = counts.sum(axis=-1), expected.sum()
    num_smaller = np.cumsum(expected) - expected / 2  # reference rows below each bin
    values = (counts * num_smaller).sum(axis=-1) / (num_window * num_reference) - 0.5
    pooled, total = counts + expected, num_window + num_reference
    ties = (pooled**3 - pooled).sum(axis=-1) / (total**3 - total)
    variances = (total + 1) / (12 * num_window * num_reference) * (1 - ties)
    deviations = np.sqrt(np.maximum(variances, 1e-300))
    return TwoSampleTest(
        "mann_whitney",
        values,
        distributions.normal_threshold(level) * deviations,
        distributions.normal_tail(values / deviations),
    )
