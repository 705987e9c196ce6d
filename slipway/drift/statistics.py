"""Two-sample statistics of counts in bins, each with its law. All take (..., bins) counts of windows and (bins,) of the reference.

Every statistic is of both samples: a reference is a sample as well, and a threshold that takes it for the truth alarms on clean traffic as
often as it is small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.drift import laws

Float = NDArray[np.float64]
Statistic = Literal["psi", "kolmogorov_smirnov", "mann_whitney", "mmd"]


@dataclass(frozen=True)
class Comparison:
    """Values of a statistic (...), and what their size may be at most at the level."""

    statistic: Statistic
    values: Float
    thresholds: Float
    tail: Callable[[], Float]

    @property
    def p_values(self) -> Float:
        """(...) how likely values as large are without drift."""
        return self.tail()

    @property
    def exceeded(self) -> NDArray[np.bool_]:
        """(...) whether a value is beyond its threshold."""
        return np.abs(self.values) > self.thresholds


def noise(windows: ArrayLike, reference: ArrayLike) -> Float:
    """(...) 1/W + 1/N of the rows in a window and in the reference."""
    of_both: Float = (
        1 / np.asarray(windows, np.float64).sum(axis=-1)
        + 1 / np.asarray(reference, np.float64).sum()
    )
    return of_both


def psi(windows: ArrayLike, reference: ArrayLike, level: float) -> Comparison:
    """The population stability index in its quadratic form, and Pearson's chi-square of homogeneity as its law.

    The index is the sum over bins of (p - q) ln(p / q), which is (p - q)**2 over the logarithmic mean of p and q. Here it is over the share
    of both samples together: equal to second order, defined where a bin is empty, and, divided by 1/W + 1/N, exactly Pearson's
    statistic, which has the law of chi-square with bins - 1 degrees of freedom at far smaller counts (bench/results/drift_laws.md).
    """
    counts, own = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    both = counts + own
    size = both.sum(axis=-1, keepdims=True)
    shares = counts / counts.sum(axis=-1, keepdims=True)
    of_both = np.where(both > 0, both, 1.0) / size
    values = (np.square(shares - own / own.sum()) / of_both).sum(axis=-1)
    scale, freedom = noise(counts, own), max(1, counts.shape[-1] - 1)
    thresholds = laws.chi_square_threshold(level, freedom) * scale
    return Comparison(
        "psi", values, thresholds, lambda: laws.chi_square_tail(values / scale, freedom)
    )


def kolmogorov_smirnov(windows: ArrayLike, reference: ArrayLike, level: float) -> Comparison:
    """The largest distance between the distribution functions at the bins' edges, whose law on bins is milder than Kolmogorov's: safe."""
    counts, own = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    below = np.cumsum(counts, axis=-1) / counts.sum(axis=-1, keepdims=True)
    values = np.abs(below - np.cumsum(own) / own.sum()).max(axis=-1)
    scale = np.sqrt(noise(counts, own))
    return Comparison(
        "kolmogorov_smirnov",
        values,
        laws.kolmogorov_threshold(level) * scale,
        lambda: laws.kolmogorov_tail(values / scale),
    )


def mann_whitney(windows: ArrayLike, reference: ArrayLike, level: float) -> Comparison:
    """The probability that a row of the window is larger than one of the reference, less one half: a shift up or down.

    Ties count half. The normal law with the variance corrected for ties (Lehmann, Nonparametrics, 1975, section 1.4).
    """
    counts, own = np.asarray(windows, np.float64), np.asarray(reference, np.float64)
    num, num_own = counts.sum(axis=-1), own.sum()
    smaller = np.cumsum(own) - own / 2  # of the reference than each bin, ties by half
    values = (counts * smaller).sum(axis=-1) / (num * num_own) - 0.5
    both, size = counts + own, num + num_own
    ties = (both**3 - both).sum(axis=-1) / (size**3 - size)
    deviations = np.sqrt(np.maximum((size + 1) / (12 * num * num_own) * (1 - ties), 1e-300))
    return Comparison(
        "mann_whitney",
        values,
        laws.normal_threshold(level) * deviations,
        lambda: laws.normal_tail(values / deviations),
    )
