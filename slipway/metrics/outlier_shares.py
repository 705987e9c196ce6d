"""Whether another way of running a model still tells strangers from ordinary rows: how many it calls outliers, and in which order.

Rounding adds to every distance. The thresholds of an int8 graph are of its own scores, so that it calls no more rows outliers than
promised; how much of the order of the scores is left says what the flag is still worth.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration
from slipway.metrics.scores import wilson_interval

LEAST_RANK = 0.5  # a guess: below it a row's place among the others is mostly another


def ood_fraction(
    scores: NDArray[np.float32], calibration: Calibration, confidence: float
) -> Metric | None:
    """Share of the rows whose (N,) `scores` are above the threshold, with the interval of Wilson; None without a threshold."""
    if calibration.outlier.threshold is None:
        return None
    found = calibration.is_outlier(scores)
    low, high = wilson_interval(int(found.sum()), len(found), confidence)
    return Metric(
        value=float(found.mean()), low=low, high=high, confidence=confidence, rows=len(found)
    )


def score_rank(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float | None:
    """Spearman's correlation of two (N,) scores of the same rows, in [-1, 1]; None where either are all equal, or not finite."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return None
    places = [_mean_places(scores) for scores in (found, expected)]
    deviations = [ranks - ranks.mean() for ranks in places]
    norms = [float(np.linalg.norm(deviation)) for deviation in deviations]
    return float(deviations[0] @ deviations[1] / (norms[0] * norms[1])) if all(norms) else None


def _mean_places(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """The place of each score among all; equal ones share the mean of theirs."""
    ordered = np.sort(scores)
    below, until = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return np.asarray((below + until - 1) / 2, dtype=np.float64)
