"""Multi-label calibration: a temperature and threshold for each label, and prediction sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Calibration, exact, given_labels, leads
from slipway.metrics.class_uncertainty import fit_temperature
from slipway.metrics.decision import best_threshold

Float = NDArray[np.float64]


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
