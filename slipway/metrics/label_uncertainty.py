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
        """Fit the temperature of each label separately: (K,); 1 without rows."""
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
        """Return the threshold at which `coverage` of the sets contain all labels of their row.

        It is the floor((N + 1)(1 - coverage))-th smallest of the rows' least probable own labels; 0
        (every label) if that rank is 0. Any set contains all labels of a row without labels.
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
        """Return True for each row whose prediction set contains all of its labels, (N,)."""
        sets = calibration.prediction_sets(probabilities)
        return np.asarray((sets | (np.asarray(targets) == 0)).all(axis=1))

    @staticmethod
    def losses(
        probabilities: NDArray[np.float32],
        targets: NDArray[np.generic],
        thresholds: Sequence[float] | None = None,
    ) -> Float:
        """Return 1 for each row with a label wrongly given or missing, else 0: (N,)."""
        given = given_labels(probabilities, thresholds)
        return np.asarray((given != (np.asarray(targets) > 0)).any(axis=1), np.float64)

    @staticmethod
    def certainty(probabilities: NDArray[np.float32], thresholds: Sequence[float] | None) -> Float:
        """Return the distance of each row's least certain label from its threshold, (N,)."""
        return leads(probabilities, thresholds)

    @staticmethod
    def reliability(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic]
    ) -> tuple[Float, NDArray[np.bool_]]:
        """Return the probability of each label of each row, and True for labels that rows have.

        Both are (N * K,).
        """
        return probabilities.ravel().astype(np.float64), np.asarray(targets).ravel() > 0


def _least_own(
    probabilities: NDArray[np.float32], targets: NDArray[np.generic]
) -> NDArray[np.float32]:
    """Return the smallest probability of each row's own labels, (N,); 1 for a row without any."""
    own = np.where(np.asarray(targets) > 0, probabilities, np.float32(1))
    return np.asarray(own.min(axis=1), np.float32)
