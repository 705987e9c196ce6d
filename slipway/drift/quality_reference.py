"""The validation residuals from which the quality of live traffic is estimated without labels.

The residual of a class answer is 1 (right) or 0 (wrong) minus its confidence; the residual of a
numeric answer is its squared error. The residuals are summarised by bins of a score: the confidence
for classes, the OOD score for numbers. The bins show whether the score is informative, and the
variance of a single row.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import decided_classes, given_labels
from slipway.drift.distributions import chi_square_tail
from slipway.drift.feature_reference import FeatureReference
from slipway.drift.features import CONFIDENCE, OOD_SCORE, confidence_of_labels
from slipway.drift.histogram import bins_of, equal_edges
from slipway.drift.residual_model import ResidualModel, fit_residual_model
from slipway.system.contract import Contract

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bins = NDArray[np.intp]
QualityMetric = Literal["accuracy", "subset_accuracy", "rmse"]

MIN_ROWS = 100  # fewest validation rows to fit on
_MAX_BINS = 15  # as in slipway/metrics/calibration_error.py
_MANY_ROWS = 1000  # the variance of a bin with fewer rows may be 0 by chance


class Stratum(Contract):
    """Summary of residuals by bin: number of rows, mean residual, variance of one residual."""

    counts: list[int]
    residuals: list[float]
    variances: list[float]


class QualityReference(Contract):
    """Residuals by bin of the score `feature`, and a model that predicts them from all features."""

    metric: QualityMetric
    feature: str
    edges: list[float]
    counts: list[int]
    residuals: list[float]
    variances: list[float]
    adjustment: ResidualModel
    strata: list[Stratum]  # for each input feature: residuals that the model does not explain

    def bins(self, scores: Float32) -> Bins:
        """Return (rows,) the bin index of each score; the last bin is for NaN."""
        return bins_of(scores, np.array(self.edges, np.float32))

    @property
    def information_p_value(self) -> float:
        """P-value of the hypothesis that all bins have equal means (Welch, Biometrika 38, 1951)."""
        counts, means = np.array(self.counts), np.array(self.residuals)
        variances = np.array(self.variances)
        is_used = (counts > 1) & (variances > 0)
        if is_used.sum() < 2:
            return 1.0
        weights = counts[is_used] / variances[is_used]
        centre = (weights @ means[is_used]) / weights.sum()
        statistic = weights @ np.square(means[is_used] - centre)
        return float(chi_square_tail(statistic, int(is_used.sum()) - 1))


def fit_quality(
    output: OutputContract,
    outputs: Float32,
    scores: Float32,
    targets: NDArray[Any],
    features: Sequence[FeatureReference],
    bins: Sequence[Bins],
    thresholds: Sequence[float] | None = None,
) -> QualityReference | None:
    """Fit the reference on validation rows; None with fewer than MIN_ROWS.

    Args:
        outputs: (rows, labels) probabilities or (rows, 1) values.
        scores: (rows,) OOD scores.
        targets: (rows,) class indices or numbers, or (rows, labels) 0 or 1.
        features: input features, then output features.
        bins: for each feature the (rows,) bin indices.
        thresholds: decision thresholds; None for the most probable class, or 1/2 for labels.
    """
    if len(targets) < MIN_ROWS:
        return None
    metric, feature, score, quality, claimed = _row_quality(
        output, outputs, scores, targets, thresholds
    )
    edges = equal_edges(score, _MAX_BINS)
    by_score = _stratum(bins_of(score, edges), len(edges) + 2, quality, claimed, metric)
    noise = float(np.array(by_score.counts) @ np.array(by_score.variances)) / len(targets)
    model, fitted = fit_residual_model(
        features,
        bins,
        quality - claimed,
        max(noise, 1e-300),
        shrink_level=metric != "rmse",
    )
    strata = [
        _stratum(own, len(feature.counts), quality, claimed + fitted, metric)
        for feature, own in zip(features, bins, strict=True)
        if feature.origin == "input"
    ]
    return QualityReference(
        metric=metric,
        feature=feature,
        edges=edges.tolist(),
        adjustment=model,
        strata=strata,
        **by_score.model_dump(),
    )


class _RowQuality(NamedTuple):
    """The quality of each row, the quality that the model claims, and the score that sorts rows."""

    metric: QualityMetric
    feature: str  # name of the score
    score: Float32
    quality: NDArray[np.float64]
    claimed: NDArray[Any]


def _row_quality(
    output: OutputContract,
    outputs: Float32,
    scores: Float32,
    targets: NDArray[Any],
    thresholds: Sequence[float] | None,
) -> _RowQuality:
    if output.kind == "value":
        errors = np.square(outputs[:, 0].astype(np.float64) - targets)
        return _RowQuality("rmse", OOD_SCORE, scores, errors, np.zeros(len(targets)))
    if output.kind == "label_probabilities":
        score = confidence_of_labels(outputs)
        is_right = (given_labels(outputs, thresholds) == (targets > 0)).all(axis=1)
        quality, claimed = np.asarray(is_right, np.float64), score.astype(np.float64)
        return _RowQuality("subset_accuracy", CONFIDENCE, score, quality, claimed)
    if output.kind == "probabilities":
        score = outputs.max(axis=1)
        quality = np.asarray(decided_classes(outputs, thresholds) == targets, np.float64)
        return _RowQuality("accuracy", CONFIDENCE, score, quality, score)
    assert_never(output.kind)


def _stratum(
    bins: Bins,
    num_bins: int,
    quality: Float64,
    claimed: Float32 | Float64,
    metric: QualityMetric,
) -> Stratum:
    """Summarise by bin the residuals: `quality` by the label minus that `claimed` by the score."""
    counts = np.bincount(bins, minlength=num_bins)
    residuals = quality - claimed
    means = np.bincount(bins, residuals, num_bins) / np.maximum(counts, 1)
    squares = np.bincount(bins, np.square(residuals - means[bins]), num_bins)
    variances = squares / np.maximum(counts - 1, 1)
    if metric != "rmse":
        # A small bin without errors would have variance 0: use Jeffreys' prior on its accuracy.
        accuracy = (np.bincount(bins, quality, num_bins) + 0.5) / (counts + 1)
        prior_variances = accuracy * (1 - accuracy) * (counts < _MANY_ROWS)
        variances = np.maximum(variances, prior_variances)
    return Stratum(counts=counts.tolist(), residuals=means.tolist(), variances=variances.tolist())
