"""Temperature and thresholds from validation rows, in numpy alone.

The thresholds are order statistics with the correction for finitely many rows: over draws of validation and new rows
together the promise holds exactly, whatever the network is like (Vovk, Gammerman and Shafer 2005; Angelopoulos and Bates
2021, "A Gentle Introduction to Conformal Prediction"). It takes rows that nothing was fitted on: not the training
rows, and not those behind the temperature.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers, Calibration, exact

Float = NDArray[np.float64]
_COLDEST, _HOTTEST = 0.01, 100.0  # beyond them a network is not badly calibrated but broken
_BISECTIONS = 60


def fit_temperature(logits: NDArray[np.floating], targets: NDArray[np.float64]) -> float:
    """The temperature with the least log loss on (N, K) logits and (N,) class indices; 1 without rows.

    Guo, Pleiss, Sun and Weinberger 2017, "On Calibration of Modern Neural Networks". Where every row is right, colder would
    always be better; so the targets are smoothed by 1 / (N + 2), as one row of an unknown label among them would
    (Platt 1999, "Probabilistic Outputs for Support Vector Machines"). The loss is convex in 1 / temperature.
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
        # The derivative of the loss by 1 / temperature is expected - wanted: above 0, it has to become hotter.
        coldest, hottest = (middle, hottest) if expected > wanted else (coldest, middle)
    return math.exp((coldest + hottest) / 2)


def softmax(logits: NDArray[np.floating]) -> Float:
    """(N, K) logits to probabilities in float64."""
    scores = logits.astype(np.float64)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Float = exponentials / exponentials.sum(axis=1, keepdims=True)
    return shares


def least_probability(
    probabilities: NDArray[np.float32], targets: NDArray[np.float64], coverage: float
) -> float:
    """The threshold of a prediction set, from (N, K) probabilities and (N,) class indices.

    The floor((N + 1)(1 - coverage))-th smallest probability of a row's own label; 0, every label, where that is none.
    """
    own = np.sort(probabilities[np.arange(len(probabilities)), targets.astype(np.int64)])
    place = math.floor((len(own) + 1) * (1 - exact(coverage)))
    return float(own[place - 1]) if place else 0.0


def with_thresholds(
    calibration: Calibration, answers: Answers, targets: NDArray[np.float64], *, of_classes: bool
) -> Calibration:
    """`calibration` with thresholds from answers to rows that nothing was fitted on, and their (N,) `targets`.

    They promise something for the very model that answered, and for no other.
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


def upper_quantile(values: NDArray[np.floating], share: float | Fraction) -> float | None:
    """The ceil((N + 1) share)-th smallest of (N,) values: a new one is above it in at most 1 - `share` of all draws.

    None where that takes more than N rows.
    """
    place = math.ceil((len(values) + 1) * exact(share))
    return float(np.sort(values)[place - 1]) if place <= len(values) else None
