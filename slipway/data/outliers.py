"""Numbers that are far from the others, in robust standard deviations from the median."""

import numpy as np
from numpy.typing import NDArray

_OVER_MEDIAN = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_OVER_MEAN = 1.2533  # and over its mean absolute deviation


def robust_deviations(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The median, and how far each of (N,) finite numbers is from it, in standard deviations estimated robustly (B. Iglewicz and
    D. Hoaglin, How to Detect and Handle Outliers, 1993).

    Where more than half of the numbers are equal their median deviation is 0, and the mean one takes its place.
    """
    if not len(values):
        return 0.0, values
    with np.errstate(over="ignore"):
        median = float(np.median(values))
        distances = np.abs(values - median)
        scale = _OVER_MEDIAN * float(np.median(distances)) or _OVER_MEAN * float(distances.mean())
    if not np.isfinite(scale) or scale == 0:
        return median, np.zeros(len(values))
    return median, distances / scale
