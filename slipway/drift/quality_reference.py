"""What the quality is estimated with where no labels are: how the validation rows fared in each bin of a score.

Classes: bins of the confidence. How often the answer is right there, less the mean confidence, corrects the confidence of the traffic.
Numbers: bins of the outlier score, and the mean squared error in each.
"""

from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipway.bundle import OutputContract
from slipway.contract import Contract
from slipway.drift.features import CONFIDENCE, OUTLIER_SCORE
from slipway.drift.histogram import bins_of, equal_edges
from slipway.drift.laws import chi_square_tail

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_MOST_BINS = 15  # as slipway/reliability.py
LEAST_ROWS = 100  # of validation


class QualityReference(Contract):
    """For each bin of `feature`: rows, the mean of what the labels say beyond the score alone (`residual`), and its variance.

    accuracy: 1 where the answer is right, else 0, less the confidence. rmse: the squared error.
    """

    metric: Literal["accuracy", "rmse"]
    feature: str
    edges: list[float]
    counts: list[int]
    residuals: list[float]
    variances: list[float]  # of one row's residual

    @cached_property
    def _edges(self) -> Float32:
        return np.array(self.edges, np.float32)

    def bins(self, scores: Float32) -> NDArray[np.intp]:
        """(rows,) the bin of each score; the last for NaN, which no answer has."""
        return bins_of(scores, self._edges)

    @property
    def information_p_value(self) -> float:
        """How likely bins without information would have means so different (Welch, Biometrika 38, 1951; its chi-square form)."""
        counts, means, variances = np.array(self.counts), np.array(self.residuals), np.array(self.variances)
        there = (counts > 1) & (variances > 0)
        if there.sum() < 2:
            return 1.0
        weights = counts[there] / variances[there]
        centre = (weights @ means[there]) / weights.sum()
        return float(chi_square_tail(weights @ np.square(means[there] - centre), int(there.sum()) - 1))


def fit_quality(output: OutputContract, outputs: Float32, scores: Float32, targets: Float64) -> QualityReference | None:
    """From validation rows; None where they are fewer than `LEAST_ROWS`."""
    if len(targets) < LEAST_ROWS:
        return None
    if output.kind == "value":
        return _fit("rmse", OUTLIER_SCORE, scores, np.square(outputs[:, 0].astype(np.float64) - targets))
    confidence = outputs.max(axis=1)
    return _fit("accuracy", CONFIDENCE, confidence, (outputs.argmax(axis=1) == targets) - confidence.astype(np.float64))


def _fit(metric: Literal["accuracy", "rmse"], feature: str, scores: Float32, residuals: Float64) -> QualityReference:
    edges = equal_edges(scores, _MOST_BINS)
    bins, num_bins = bins_of(scores, edges), len(edges) + 2
    counts = np.bincount(bins, minlength=num_bins)
    rows = np.maximum(counts, 1)
    means = np.bincount(bins, residuals, num_bins) / rows
    squares = np.bincount(bins, np.square(residuals - means[bins]), num_bins) / np.maximum(counts - 1, 1)
    if metric == "accuracy":  # a bin without a wrong answer is not without error: Jeffreys' prior on the share that is right
        right = np.rint(np.bincount(bins, residuals + scores, num_bins))
        share = (right + 0.5) / (counts + 1)
        squares = np.maximum(squares, share * (1 - share))
    return QualityReference(
        metric=metric, feature=feature, edges=edges.tolist(), counts=counts.tolist(), residuals=means.tolist(), variances=squares.tolist()
    )
