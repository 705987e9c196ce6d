"""Expected calibration error and reliability bins.

Bins have equal numbers of rows. With bins of equal width, nearly all rows of a good network would
be in the bin next to confidence 1, and the error would be more biased (Roelofs, Cain, Shlens and
Mozer, Mitigating bias in calibration error estimation, AISTATS 2022). Noise in a bin counts as
error, so the error of few rows is too large.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.system.contract import Contract

Float = NDArray[np.float64]

NUM_BINS = 15  # Guo, Pleiss, Sun and Weinberger, On calibration of modern networks, ICML 2017


class ReliabilityBin(Contract):
    """A bin of rows with similar confidence, the probability of the predicted label."""

    rows: int
    low: float  # smallest and largest confidence in the bin
    high: float
    confidence: float  # mean confidence
    accuracy: float  # fraction of correct rows


def equal_bins(numbers: Float, num_bins: int) -> NDArray[np.int64]:
    """Return (N,) the bin of each number, from 0: floor(`num_bins` * fraction of smaller numbers).

    Bins have equal numbers of rows if all numbers differ. Equal numbers share a bin, so some bins
    may be empty.
    """
    ranks = np.searchsorted(np.sort(numbers), numbers, side="left")
    return np.asarray(num_bins * ranks // len(numbers))


def reliability_bins(confidences: Float, hits: NDArray[np.bool_]) -> list[ReliabilityBin]:
    """Return the non-empty bins of N rows, by rising confidence; both arguments are (N,)."""
    bins = equal_bins(confidences, NUM_BINS)
    parts = ((confidences[bins == index], hits[bins == index]) for index in np.unique(bins))
    return [
        ReliabilityBin(
            rows=len(own),
            low=own.min(),
            high=own.max(),
            confidence=own.mean(),
            accuracy=right.mean(),
        )
        for own, right in parts
    ]


def calibration_errors(confidences: Float, hits: NDArray[np.bool_], counts: Float) -> Float:
    """Return the expected calibration error of each resample, (S,).

    `counts` (S, N) is how often each resample contains each row. The error is the mean over rows of
    the gap between the mean confidence and the accuracy of the row's bin (Naeini, Cooper and
    Hauskrecht, AAAI 2015). All resamples share the bins of the original rows.
    """
    return np.asarray(
        _errors_of_gaps(confidences, counts * (confidences - hits)) / counts.sum(axis=1)
    )


def errors_by_chance(confidences: Float, uniform: Float) -> Float:
    """Return (S,) calibration errors of perfectly calibrated rows, which noise alone causes.

    This is consistency resampling (Bröcker and Smith, Increasing the reliability of reliability
    diagrams, Weather and Forecasting 22, 2007) from (N,) `confidences` and (S, N) `uniform` draws.
    """
    return _errors_of_gaps(confidences, confidences - (uniform < confidences)) / len(confidences)


def _errors_of_gaps(confidences: Float, gaps: Float) -> Float:
    """Return (S,) the sum over bins of each bin's absolute sum of `gaps` (S, N)."""
    bins = equal_bins(confidences, NUM_BINS)
    order = np.argsort(bins, kind="stable")
    starts = np.unique(bins[order], return_index=True)[1]
    return np.asarray(np.abs(np.add.reduceat(gaps.take(order, axis=1), starts, axis=1)).sum(axis=1))
