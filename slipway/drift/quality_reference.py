"""What the quality is estimated with where no labels are: what the validation labels say beyond the score, by the features of a row.

Classes: how often the answer is right, less the confidence. Numbers: the squared error. In the bins of the confidence, or of the outlier
score, it tells whether the score is worth anything, and how much a single row varies.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.drift.adjustment import Adjustment, fit_adjustment
from slipway.drift.feature_reference import FeatureReference
from slipway.drift.features import CONFIDENCE, OUTLIER_SCORE
from slipway.drift.histogram import bins_of, equal_edges
from slipway.drift.laws import chi_square_tail
from slipway.system.contract import Contract

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_MOST_BINS = 15  # as slipway/metrics/calibration_error.py
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
    adjustment: Adjustment  # of the score's claim, by all features
    strata: list[
        Stratum
    ]  # of each feature of the input, in order: what is left of the labels when the estimate is taken off

    @property
    def _edges(self) -> Float32:
        return np.array(self.edges, np.float32)

    def bins(self, scores: Float32) -> NDArray[np.intp]:
        """(rows,) the bin of each score; the last for NaN, which no answer has."""
        return bins_of(scores, self._edges)

    @property
    def information_p_value(self) -> float:
        """How likely bins without information would have means so different (Welch, Biometrika 38, 1951; its chi-square form)."""
        counts, means, variances = (
            np.array(self.counts),
            np.array(self.residuals),
            np.array(self.variances),
        )
        there = (counts > 1) & (variances > 0)
        if there.sum() < 2:
            return 1.0
        weights = counts[there] / variances[there]
        centre = (weights @ means[there]) / weights.sum()
        return float(
            chi_square_tail(weights @ np.square(means[there] - centre), int(there.sum()) - 1)
        )


def fit_quality(
    output: OutputContract,
    outputs: Float32,
    scores: Float32,
    targets: Float64,
    features: Sequence[FeatureReference],
    bins: Sequence[NDArray[np.intp]],
) -> QualityReference | None:
    """From validation rows; `features` are those of the input and of the answer, `bins` the (rows,) bin of each row in each.

    None where the rows are fewer than `LEAST_ROWS`.
    """
    if len(targets) < LEAST_ROWS:
        return None
    if output.kind == "value":
        errors = np.square(outputs[:, 0].astype(np.float64) - targets)
        return _fit("rmse", OUTLIER_SCORE, scores, errors, np.zeros(len(errors)), features, bins)
    confidence = outputs.max(axis=1)
    return _fit(
        "accuracy",
        CONFIDENCE,
        confidence,
        (outputs.argmax(axis=1) == targets).astype(np.float64),
        confidence,
        features,
        bins,
    )


def _fit(
    metric: Literal["accuracy", "rmse"],
    feature: str,
    scores: Float32,
    truths: Float64,
    said: NDArray[Any],
    features: Sequence[FeatureReference],
    bins: Sequence[NDArray[np.intp]],
) -> QualityReference:
    """`truths`: whether an answer is right, or its squared error; `said`: how much of it the score alone says."""
    edges = equal_edges(scores, _MOST_BINS)
    own = _stratum(bins_of(scores, edges), len(edges) + 2, truths, said, metric)
    noise = max(float(np.array(own.counts) @ np.array(own.variances)) / len(truths), 1e-300)
    adjustment, residuals = fit_adjustment(
        features, bins, truths - said, noise, towards_none=metric == "accuracy"
    )
    strata = [
        _stratum(part, len(described.counts), truths, said + residuals, metric)
        for described, part in zip(features, bins, strict=True)
        if described.origin == "input"
    ]
    return QualityReference(
        metric=metric,
        feature=feature,
        edges=edges.tolist(),
        adjustment=adjustment,
        strata=strata,
        **own.model_dump(),
    )


def _stratum(
    bins: NDArray[np.intp], num_bins: int, truths: Float64, said: NDArray[Any], metric: str
) -> Stratum:
    counts = np.bincount(bins, minlength=num_bins)
    residuals = truths - said
    means = np.bincount(bins, residuals, num_bins) / np.maximum(counts, 1)
    variances = np.bincount(bins, np.square(residuals - means[bins]), num_bins) / np.maximum(
        counts - 1, 1
    )
    if (
        metric == "accuracy"
    ):  # a bin without a wrong answer is not without error: Jeffreys' prior on the share that is right
        share = (np.bincount(bins, truths, num_bins) + 0.5) / (counts + 1)
        variances = np.maximum(variances, share * (1 - share) * (counts < _FEW))
    return Stratum(counts=counts.tolist(), residuals=means.tolist(), variances=variances.tolist())
