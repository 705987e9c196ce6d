"""Numbers that are far from the others, in robust standard deviations from the median."""

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.scratch import scratch_array

_OVER_MEDIAN = (
    1.4826  # a normal distribution's standard deviation over its median absolute deviation
)
_OVER_MEAN = 1.2533  # and over its mean absolute deviation


def robust_deviations(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The median, and how far each of (N,) finite numbers is from it, in standard deviations estimated robustly (B. Iglewicz and
    D. Hoaglin, How to Detect and Handle Outliers, 1993).

    Where more than half of the numbers are equal their median deviation is 0, and the mean one takes its place.
    """
    if not len(values):
        return 0.0, values
    distances = scratch_array((len(values),), np.float64)
    with np.errstate(over="ignore"):
        median = _median(values)
        np.abs(np.subtract(values, median, out=distances), out=distances)
        scale = _OVER_MEDIAN * _median(distances) or _OVER_MEAN * float(distances.mean())
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
