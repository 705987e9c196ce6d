"""Fits conformal and OOD thresholds on validation rows, and compares OOD scores of two models.

Thresholds are order statistics with the finite-sample correction. Their coverage holds for any
network, on average over draws of validation and new rows (Vovk, Gammerman and Shafer 2005;
Angelopoulos and Bates 2021, "A Gentle Introduction to Conformal Prediction"). It holds only if
nothing was fitted on the rows before: neither the network nor the temperature.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Answers, Calibration, exact
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import fraction_of

MIN_SCORE_RANK = 0.5  # a guess: with a lower correlation most rows change their order


def with_thresholds(
    task: Task, calibration: Calibration, answers: Answers, targets: NDArray[np.float64]
) -> Calibration:
    """Return `calibration` with thresholds fitted on N answers and their targets (N,).

    Nothing may have been fitted on these rows before. The thresholds hold only for the model that
    gave the answers.
    """
    conformal, ood = calibration.conformal, calibration.ood
    uncertainty = kind_of(task).target.load_part("uncertainty")
    half = uncertainty.threshold(answers.outputs, targets, conformal.coverage)
    most = upper_quantile(answers.scores, 1 - exact(ood.fraction))
    thresholds = {
        "conformal": conformal.model_copy(update={"threshold": half, "rows": len(targets)}),
        "ood": ood.model_copy(update={"threshold": most, "rows": len(targets)}),
    }
    decided = uncertainty.decide(calibration, answers.outputs, targets)
    return calibration.model_copy(update={**thresholds, **decided})


def upper_quantile(values: NDArray[np.floating], fraction: float | Fraction) -> float | None:
    """Return the ceil((N + 1) * fraction)-th smallest of (N,) values; None with too few values.

    A new value exceeds it with probability at most 1 - `fraction`.
    """
    place = math.ceil((len(values) + 1) * exact(fraction))
    return float(np.sort(values)[place - 1]) if place <= len(values) else None


def ood_fraction(
    scores: NDArray[np.float32], calibration: Calibration, confidence: float
) -> Metric | None:
    """Return the fraction of (N,) `scores` above the threshold; None without a threshold."""
    if calibration.ood.threshold is None:
        return None
    return fraction_of(calibration.is_ood(scores), confidence)


def score_rank(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float | None:
    """Return the Spearman correlation of two (N,) scores; None if one is constant or not finite."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return None
    ranks = [_mean_ranks(scores) for scores in (found, expected)]
    deviations = [rank - rank.mean() for rank in ranks]
    norms = [float(np.linalg.norm(deviation)) for deviation in deviations]
    return float(deviations[0] @ deviations[1] / (norms[0] * norms[1])) if all(norms) else None


def _mean_ranks(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the rank of each score; equal scores share their mean rank."""
    ordered = np.sort(scores)
    below, until = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return np.asarray((below + until - 1) / 2, dtype=np.float64)
