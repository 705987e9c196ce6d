"""What the quality is estimated with where no labels are: how the validation rows fared in each bin of a score.

Classes: bins of the confidence. How often the answer is right there, less the mean confidence, corrects the confidence of the traffic.
Numbers: bins of the outlier score, and the mean squared error in each.
"""

from collections.abc import Sequence
from typing import Any, Literal

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
_FEW = 1000  # rows of a bin, below which its variance may be 0 by chance


class Stratum(Contract):
    """Residuals by the bins of a feature: rows, their mean, and the variance of one row's."""

    counts: list[int]
    residuals: list[float]
    variances: list[float]


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
    strata: list[Stratum]  # of each feature of the input, in order: what is left of the labels when the estimate is taken off

    @property
    def _edges(self) -> Float32:
        return np.array(self.edges, np.float32)

    def bins(self, scores: Float32) -> NDArray[np.intp]:
        """(rows,) the bin of each score; the last for NaN, which no answer has."""
        return bins_of(scores, self._edges)

    @property
    def corrections(self) -> Float64:
        """(bins,) the residuals with the noise of few rows shrunk away; of squared errors the residuals themselves.

        Of a calibrated network every residual is noise, and correcting by it would add the noise to the estimate. The mean of all rows is
        shrunk towards none, then each bin towards that mean, each by how much of it is beyond its own standard error (the positive
        part of James and Stein, Proceedings of the Fourth Berkeley Symposium, 1961; by bins as empirical Bayes does it).
        """
        residuals = np.array(self.residuals)
        if self.metric == "rmse":
            return residuals
        rows = np.array(self.counts, np.float64)
        noise = np.array(self.variances) / np.maximum(rows, 1)
        weights = rows / rows.sum()
        mean = float(weights @ residuals)
        mean *= max(0.0, 1 - float(np.square(weights) @ noise) / max(mean**2, 1e-300))
        spread = max(0.0, float(weights @ (np.square(residuals - mean) - noise)))
        corrections: Float64 = mean + (residuals - mean) * spread / np.maximum(spread + noise, 1e-300)
        return corrections

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


def fit_quality(
    output: OutputContract, outputs: Float32, scores: Float32, targets: Float64, strata: Sequence[tuple[NDArray[np.intp], int]]
) -> QualityReference | None:
    """From validation rows; `strata` are the (rows,) bins of each feature of the input, and how many there are.

    None where the rows are fewer than `LEAST_ROWS`.
    """
    if len(targets) < LEAST_ROWS:
        return None
    if output.kind == "value":
        errors = np.square(outputs[:, 0].astype(np.float64) - targets)
        return _fit("rmse", OUTLIER_SCORE, scores, errors, np.zeros(len(errors)), strata)
    confidence = outputs.max(axis=1)
    return _fit("accuracy", CONFIDENCE, confidence, (outputs.argmax(axis=1) == targets).astype(np.float64), confidence, strata)


def _fit(
    metric: Literal["accuracy", "rmse"],
    feature: str,
    scores: Float32,
    truths: Float64,
    said: NDArray[Any],
    strata: Sequence[tuple[NDArray[np.intp], int]],
) -> QualityReference:
    """`truths`: whether an answer is right, or its squared error; `said`: how much of it the score alone says."""
    edges = equal_edges(scores, _MOST_BINS)
    bins = bins_of(scores, edges)
    own = _stratum(bins, len(edges) + 2, truths, said, metric)
    found = QualityReference(metric=metric, feature=feature, edges=edges.tolist(), strata=[], **own.model_dump())
    estimated = said + found.corrections[bins]
    return found.model_copy(update={"strata": [_stratum(part, num_bins, truths, estimated, metric) for part, num_bins in strata]})


def _stratum(bins: NDArray[np.intp], num_bins: int, truths: Float64, said: NDArray[Any], metric: str) -> Stratum:
    counts = np.bincount(bins, minlength=num_bins)
    residuals = truths - said
    means = np.bincount(bins, residuals, num_bins) / np.maximum(counts, 1)
    variances = np.bincount(bins, np.square(residuals - means[bins]), num_bins) / np.maximum(counts - 1, 1)
    if metric == "accuracy":  # a bin without a wrong answer is not without error: Jeffreys' prior on the share that is right
        share = (np.bincount(bins, truths, num_bins) + 0.5) / (counts + 1)
        variances = np.maximum(variances, share * (1 - share) * (counts < _FEW))
    return Stratum(counts=counts.tolist(), residuals=means.tolist(), variances=variances.tolist())
