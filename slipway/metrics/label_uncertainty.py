"""Probabilities of labels, a temperature and a threshold for each, and sets of possible labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Calibration, exact, given_labels, leads
from slipway.metrics.class_uncertainty import fit_temperature
from slipway.metrics.decision import best_threshold

Float = NDArray[np.float64]


def sigmoid(logits: NDArray[np.floating]) -> Float:
    """(N, K) logits -> probabilities in float64."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


class LabelUncertainty:
    """Calibrates each label, chooses its threshold, and fits sets that hold all labels of a row."""

    @staticmethod
    def temperature(logits: NDArray[np.floating], targets: NDArray[np.generic]) -> list[float]:
        """(K,) the temperature of each label, fitted by itself; 1 without rows."""
        zeros = np.zeros(len(logits))
        return [
            fit_temperature(np.stack([zeros, logits[:, label]], axis=1), own.astype(np.float64))
            for label, own in enumerate(np.asarray(targets).T)
        ]

    @staticmethod
    def answers(
        logits: NDArray[np.float32], temperature: float | Sequence[float]
    ) -> NDArray[np.float32]:
        """(N, K) logits -> probabilities; the sigmoid is in float64."""
        return sigmoid(logits.astype(np.float64) / np.asarray(temperature)).astype(np.float32)

    @staticmethod
    def decide(
        calibration: Calibration,
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
    ) -> dict[str, Any]:
        """Choose the threshold of each label with the largest F1 on these rows."""
        thresholds = [
            best_threshold(own, np.asarray(targets[:, label]) > 0)
            for label, own in enumerate(probabilities.T)
        ]
        return {"thresholds": thresholds}

    @staticmethod
    def threshold(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic], coverage: float
    ) -> float:
        """Threshold of prediction sets that hold all labels of a row in `coverage` of the rows.

        The floor((N + 1)(1 - coverage))-th smallest of the rows' least probable own labels; 0
        (every label) if that rank is 0. A row without labels is held by any set.
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
        """(N,) True if the row's set contains all of its labels."""
        sets = calibration.prediction_sets(probabilities)
        return np.asarray((sets | (np.asarray(targets) == 0)).all(axis=1))

    @staticmethod
    def losses(
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
        thresholds: Sequence[float] | None = None,
    ) -> Float:
        """(N,) 1 if any label is wrongly given or missing, else 0."""
        given = given_labels(probabilities, thresholds)
        return np.asarray((given != (np.asarray(targets) > 0)).any(axis=1), np.float64)

    @staticmethod
    def certainty(probabilities: NDArray[np.float32], thresholds: Sequence[float] | None) -> Float:
        """(N,) distance of the least certain label from its threshold."""
        return leads(probabilities, thresholds)

    @staticmethod
    def reliability(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic]
    ) -> tuple[Float, NDArray[np.bool_]]:
        """(N K,) the probability of each label of each row, and True for labels that rows have."""
        return probabilities.ravel().astype(np.float64), np.asarray(targets).ravel() > 0


def _least_own(
    probabilities: NDArray[np.float32], targets: NDArray[np.generic]
) -> NDArray[np.float32]:
    """(N,) the smallest probability of a row's own labels; 1 for a row without labels."""
    own = np.where(np.asarray(targets) > 0, probabilities, np.float32(1))
    return np.asarray(own.min(axis=1), np.float32)
