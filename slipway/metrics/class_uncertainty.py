"""Fits the temperatures of probabilities, thresholds of labels, and conformal prediction sets."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import (
    NEVER,
    Calibration,
    decided_classes,
    exact,
    given_labels,
    leads,
)
from slipway.metrics.decision import abstention, best_threshold, cheapest_threshold

Float = NDArray[np.float64]
_COLDEST, _HOTTEST = 0.01, 100.0  # limits of the temperature; a network beyond them is broken
_BISECTIONS = 60


def fit_temperature(logits: NDArray[np.floating], targets: NDArray[np.float64]) -> float:
    """Return the temperature that minimises the log loss; 1 without rows.

    `logits` are (N, K), `targets` class indices (N,). The method is that of Guo, Pleiss, Sun and
    Weinberger 2017, "On Calibration of Modern Neural Networks". If every row is correct, a lower
    temperature always has a lower loss. So targets are smoothed by 1 / (N + 2) (Platt 1999,
    "Probabilistic Outputs for Support Vector Machines"). The loss is convex in 1 / temperature.
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
    """Return probabilities (N, K) in float64 from logits (N, K)."""
    scores = logits.astype(np.float64)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def least_probability(
    probabilities: NDArray[np.float32], targets: NDArray[np.float64], coverage: float
) -> float:
    """Return the smallest probability with which a label belongs to a prediction set.

    It is the floor((N + 1)(1 - coverage))-th smallest probability of the rows' true labels. If that
    rank is 0, it is 0, and every set holds all labels. `probabilities` are (N, K), `targets` class
    indices (N,).
    """
    own = np.sort(probabilities[np.arange(len(probabilities)), targets.astype(np.int64)])
    place = math.floor((len(own) + 1) * (1 - exact(coverage)))
    return float(own[place - 1]) if place else 0.0


class ClassUncertainty:
    """Calibrates the logits of classes, and fits and applies prediction sets."""

    temperature = staticmethod(fit_temperature)
    threshold = staticmethod(least_probability)

    @staticmethod
    def answers(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
        """Return probabilities (N, K) in float32 from logits; the softmax is in float64."""
        return softmax(logits.astype(np.float64) / temperature).astype(np.float32)

    @staticmethod
    def is_held(
        calibration: Calibration, probabilities: NDArray[np.float32], targets: Float
    ) -> NDArray[np.bool_]:
        """Return (N,) True for rows whose prediction set contains their true label."""
        sets = calibration.prediction_sets(probabilities)
        return np.asarray(sets[np.arange(len(sets)), targets.astype(np.int64)])

    @staticmethod
    def decide(
        calibration: Calibration, probabilities: NDArray[np.float32], targets: Float
    ) -> dict[str, Any]:
        """Choose the threshold of the positive class on these rows; {} if no decision is set."""
        rule = calibration.decision
        if rule is None:
            return {}
        shares, is_own = probabilities[:, rule.place], targets == rule.place
        bounds = None
        if rule.costs is None:
            threshold = best_threshold(shares, is_own)
        else:
            costs = rule.costs.false_positive, rule.costs.false_negative
            threshold = cheapest_threshold(shares, is_own, *costs)
            if rule.costs.abstain is not None:
                bounds = abstention(shares, is_own, *costs, rule.costs.abstain)
            if bounds:
                threshold = min(max(threshold, bounds[0]), bounds[1])
        thresholds = [NEVER, NEVER]
        thresholds[rule.place] = threshold
        chosen = rule.model_copy(update={"abstain_between": bounds, "rows": len(targets)})
        return {"thresholds": thresholds, "decision": chosen}

    @staticmethod
    def certainty(probabilities: NDArray[np.float32], thresholds: Sequence[float] | None) -> Float:
        """Return (N,) float64, the probability of each row's most probable class.

        `thresholds` are for models of several labels, and have no effect here.
        """
        return np.asarray(probabilities.max(axis=1), np.float64)

    @staticmethod
    def reliability(
        probabilities: NDArray[np.float32], targets: Float
    ) -> tuple[Float, NDArray[np.bool_]]:
        """Return (N,) the confidence of each prediction, and (N,) True for correct ones."""
        is_right = probabilities.argmax(axis=1) == targets
        return probabilities.max(axis=1).astype(np.float64), np.asarray(is_right)

    @staticmethod
    def losses(
        probabilities: NDArray[np.float32],
        targets: Float,
        thresholds: Sequence[float] | None = None,
    ) -> Float:
        """Return (N,) 1 for rows with a wrong label, 0 for the others."""
        return np.asarray(decided_classes(probabilities, thresholds) != targets, np.float64)


def sigmoid(logits: NDArray[np.floating]) -> Float:
    """Return probabilities (N, K) in float64 from logits."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


class LabelUncertainty:
    """Calibrates labels, chooses thresholds, and fits sets that contain all labels of a row."""

    @staticmethod
    def temperature(logits: NDArray[np.floating], targets: NDArray[np.generic]) -> list[float]:
        """Return (K,) the temperature of each label, fitted separately; 1 without rows."""
        zeros = np.zeros(len(logits))
        return [
            fit_temperature(np.stack([zeros, logits[:, label]], axis=1), own.astype(np.float64))
            for label, own in enumerate(np.asarray(targets).T)
        ]

    @staticmethod
    def answers(
        logits: NDArray[np.float32], temperature: float | Sequence[float]
    ) -> NDArray[np.float32]:
        """Return probabilities (N, K) in float32 from logits; the sigmoid is in float64."""
        return sigmoid(logits.astype(np.float64) / np.asarray(temperature)).astype(np.float32)

    @staticmethod
    def decide(
        calibration: Calibration,
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
    ) -> dict[str, Any]:
        """Choose for each label the threshold with the largest F1 on these rows."""
        thresholds = [
            best_threshold(own, np.asarray(targets[:, label]) > 0)
            for label, own in enumerate(probabilities.T)
        ]
        return {"thresholds": thresholds}

    @staticmethod
    def threshold(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic], coverage: float
    ) -> float:
        """Return the threshold at which a fraction `coverage` of sets contain all true labels.

        It is the floor((N + 1)(1 - coverage))-th smallest of each row's smallest probability of a
        true label. If that rank is 0, it is 0, and every set holds all labels. A row without
        labels is covered by any set.
        """
        least = np.sort(_least_own(probabilities, targets))
        place = int((len(least) + 1) * (1 - exact(coverage)))
        return float(least[place - 1]) if place else 0.0

    @staticmethod
    def is_held(
        calibration: Calibration,
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
    ) -> NDArray[np.bool_]:
        """Return (N,) True for rows whose prediction set contains all of their true labels."""
        sets = calibration.prediction_sets(probabilities)
        return np.asarray((sets | (np.asarray(targets) == 0)).all(axis=1))

    @staticmethod
    def losses(
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
        thresholds: Sequence[float] | None = None,
    ) -> Float:
        """Return (N,) 1 for rows with a wrongly predicted or missing label, 0 for the others."""
        given = given_labels(probabilities, thresholds)
        return np.asarray((given != (np.asarray(targets) > 0)).any(axis=1), np.float64)

    @staticmethod
    def certainty(probabilities: NDArray[np.float32], thresholds: Sequence[float] | None) -> Float:
        """Return (N,) the distance of each row's least certain label from its threshold."""
        return leads(probabilities, thresholds)

    @staticmethod
    def reliability(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic]
    ) -> tuple[Float, NDArray[np.bool_]]:
        """Return the probability of each label of each row, and True for true labels.

        Both are (N * K,).
        """
        return probabilities.ravel().astype(np.float64), np.asarray(targets).ravel() > 0


def _least_own(
    probabilities: NDArray[np.float32], targets: NDArray[np.generic]
) -> NDArray[np.float32]:
    """Return (N,) the smallest probability of each row's true labels; 1 for a row without any."""
    own = np.where(np.asarray(targets) > 0, probabilities, np.float32(1))
    return np.asarray(own.min(axis=1), np.float32)
