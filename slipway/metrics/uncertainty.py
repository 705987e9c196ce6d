"""Fits temperature and thresholds on validation rows, and compares OOD scores of two models.

Thresholds are order statistics with the finite-sample correction: over draws of validation and new
rows together the coverage holds exactly for any network (Vovk, Gammerman and Shafer 2005;
Angelopoulos and Bates 2021, "A Gentle Introduction to Conformal Prediction"). They need rows on
which nothing was fitted: neither training rows nor those behind the temperature.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Answers, Calibration, exact
from slipway.metrics.scores import wilson_interval

Float = NDArray[np.float64]
_COLDEST, _HOTTEST = 0.01, 100.0  # beyond these a network is broken, not miscalibrated
MIN_SCORE_RANK = 0.5  # guess: below it most rows change their order
_BISECTIONS = 60


def fit_temperature(logits: NDArray[np.floating], targets: NDArray[np.float64]) -> float:
    """Minimise the log loss of (N, K) logits and (N,) class indices; 1 without rows.

    Guo, Pleiss, Sun and Weinberger 2017, "On Calibration of Modern Neural Networks". If every row
    is correct, a lower temperature is always better, so targets are smoothed by 1 / (N + 2), as one
    more row of unknown label would (Platt 1999, "Probabilistic Outputs for Support Vector
    Machines"). The loss is convex in 1 / temperature.
    """
    if not len(logits):
        return 1.0
    scores = logits.astype(np.float64)
    smoothing = 1 / (len(scores) + 2)
    own = scores[np.arange(len(scores)), targets.astype(np.int64)]
    wanted = float(((1 - smoothing) * own + smoothing * scores.mean(axis=1)).mean())
    coldest, hottest = math.log(_COLDEST), math.log(_HOTTEST)
    for _ in range(_BISECTIONS):
        middle = (coldest + hottest) / 2
        expected = float((softmax(scores / math.exp(middle)) * scores).sum(axis=1).mean())
        # The derivative of the loss by 1 / temperature is expected - wanted.
        coldest, hottest = (middle, hottest) if expected > wanted else (coldest, middle)
    return math.exp((coldest + hottest) / 2)


def softmax(logits: NDArray[np.floating]) -> Float:
    """(N, K) logits -> probabilities in float64."""
    scores = logits.astype(np.float64)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: Float = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def least_probability(
    probabilities: NDArray[np.float32], targets: NDArray[np.float64], coverage: float
) -> float:
    """Threshold of prediction sets from (N, K) probabilities and (N,) class indices.

    The floor((N + 1)(1 - coverage))-th smallest probability of a row's own label; 0 (every label)
    if that rank is 0.
    """
    own = np.sort(probabilities[np.arange(len(probabilities)), targets.astype(np.int64)])
    place = math.floor((len(own) + 1) * (1 - exact(coverage)))
    return float(own[place - 1]) if place else 0.0


def with_thresholds(
    calibration: Calibration, answers: Answers, targets: NDArray[np.float64], *, of_classes: bool
) -> Calibration:
    """Set the thresholds from answers to rows on which nothing was fitted.

    They hold only for the model that gave these answers.
    """
    conformal, outlier = calibration.conformal, calibration.outlier
    if of_classes:
        half: float | None = least_probability(answers.outputs, targets, conformal.coverage)
    else:
        half = upper_quantile(
            np.abs(answers.outputs[:, 0].astype(np.float64) - targets), conformal.coverage
        )
    most = upper_quantile(answers.scores, 1 - exact(outlier.share))
    thresholds = {
        "conformal": conformal.model_copy(update={"threshold": half, "rows": len(targets)}),
        "outlier": outlier.model_copy(update={"threshold": most, "rows": len(targets)}),
    }
    return calibration.model_copy(update=thresholds)


def upper_quantile(values: NDArray[np.floating], fraction: float | Fraction) -> float | None:
    """Return the ceil((N + 1) fraction)-th smallest of (N,) values; None with too few values.

    A new value is above it in at most 1 - `fraction` of all draws.
    """
    place = math.ceil((len(values) + 1) * exact(fraction))
    return float(np.sort(values)[place - 1]) if place <= len(values) else None


def ood_fraction(
    scores: NDArray[np.float32], calibration: Calibration, confidence: float
) -> Metric | None:
    """Return the fraction of (N,) `scores` above the threshold; None without a threshold."""
    if calibration.outlier.threshold is None:
        return None
    found = calibration.is_outlier(scores)
    low, high = wilson_interval(int(found.sum()), len(found), confidence)
    return Metric(
        value=float(found.mean()), low=low, high=high, confidence=confidence, rows=len(found)
    )


def score_rank(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float | None:
    """Spearman correlation of two (N,) scores; None if either are all equal or not finite."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return None
    ranks = [_mean_ranks(scores) for scores in (found, expected)]
    deviations = [rank - rank.mean() for rank in ranks]
    norms = [float(np.linalg.norm(deviation)) for deviation in deviations]
    return float(deviations[0] @ deviations[1] / (norms[0] * norms[1])) if all(norms) else None


def _mean_ranks(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rank of each score; equal scores share their mean rank."""
    ordered = np.sort(scores)
    below, until = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return np.asarray((below + until - 1) / 2, dtype=np.float64)
