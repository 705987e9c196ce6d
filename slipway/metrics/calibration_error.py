"""Whether the network is right as often as it says: calibration error and its bins, on numpy alone.

The bins have equal numbers of rows: nearly all rows of a good network have a confidence near 1, which bins of equal
width would put into one; and the error is less biased (Roelofs, Cain, Shlens and Mozer, Mitigating bias in calibration
error estimation, AISTATS 2022). Noise in a bin counts as error, so that the error of few rows is too large.
"""

import numpy as np
from numpy.typing import NDArray

from slipway.system.contract import Contract

Float = NDArray[np.float64]

NUM_BINS = (
    15  # as Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks, ICML 2017
)


class ReliabilityBin(Contract):
    """Rows of about equal confidence; a confidence is the probability of the label that was answered."""

    rows: int
    low: float  # the smallest and the largest confidence
    high: float
    confidence: float  # the mean
    accuracy: float  # share of the rows whose label is right


def equal_bins(numbers: Float, num_bins: int) -> NDArray[np.int64]:
    """(N,) the bin of each number, from 0: `num_bins` times the share of smaller numbers, rounded down.

    Bins have equal numbers of rows where all numbers differ. Equal numbers share a bin, so some may be empty.
    """
    bins: NDArray[np.int64] = (
        num_bins * np.searchsorted(np.sort(numbers), numbers, side="left") // len(numbers)
    )
    return bins


def reliability_bins(confidences: Float, hits: NDArray[np.bool_]) -> list[ReliabilityBin]:
    """The bins that have rows, by rising confidence: `confidences` (N,) in [0, 1], `hits` (N,) whether the label is right."""
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
    """(S,) the expected calibration error in [0, 1]; `counts` (S, N) is how often each row is there, the bins are of all rows.

    The mean over the rows of the gap in their bin: between the mean confidence and the accuracy (Naeini, Cooper and
    Hauskrecht, AAAI 2015).
    """
    errors: Float = _errors_of_gaps(confidences, counts * (confidences - hits)) / counts.sum(axis=1)
    return errors


def errors_by_chance(confidences: Float, uniform: Float) -> Float:
    """(S,) calibration errors of rows that are right exactly as often as their `confidences` (N,) say, drawn by `uniform` (S, N) in [0, 1).

    Consistency resampling (Bröcker and Smith, Increasing the reliability of reliability diagrams, Weather and
    Forecasting 22, 2007): what noise alone makes.
    """
    return _errors_of_gaps(confidences, confidences - (uniform < confidences)) / len(confidences)


def _errors_of_gaps(confidences: Float, gaps: Float) -> Float:
    """(S, N) gaps of rows -> (S,) the sum over the bins of the absolute sums in them."""
    bins = equal_bins(confidences, NUM_BINS)
    order = np.argsort(bins, kind="stable")
    starts = np.unique(bins[order], return_index=True)[1]
    errors: Float = np.abs(np.add.reduceat(gaps.take(order, axis=1), starts, axis=1)).sum(axis=1)
    return errors
