"""Measures how far numbers lie from the median, in robust standard deviations.

Source: B. Iglewicz and D. Hoaglin, How to Detect and Handle Outliers, 1993.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch import scratch_array

_OVER_MEDIAN = 1.4826  # standard deviation of a normal distribution over its median deviation


def robust_deviations(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the median of (N,) finite numbers, and the distance of each number from it, (N,).

    Distances are in standard deviations, estimated robustly from the median deviation. If more than
    half of the numbers are equal, as in most counts of rare events, the median deviation is 0. The
    other numbers are then measured by the median and the deviation among themselves.
    """
    median, distances = _distances(values)
    if not distances.any() and len(values):
        is_other = values != median
        if is_other.any():
            median, distances[is_other] = _distances(values[is_other])
    return median, distances


def _distances(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the median and the distances from it; all distances are 0 if their median is 0."""
    if not len(values):
        return 0.0, values
    distances = scratch_array((len(values),), np.float64)
    with np.errstate(over="ignore"):
        median = _median(values)
        np.abs(np.subtract(values, median, out=distances), out=distances)
        scale = _OVER_MEDIAN * _median(distances)
    if not np.isfinite(scale) or scale == 0:
        distances[:] = 0
    else:
        distances /= scale
    return median, distances


def _median(values: NDArray[np.float64]) -> float:
    """Return `np.median(values)` without copying the values into memory."""
    rising = scratch_array((len(values),), np.float64)
    rising[:] = values
    rising.sort()
    return float(rising[(len(rising) - 1) // 2 : len(rising) // 2 + 1].mean())
