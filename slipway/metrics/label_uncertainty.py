"""Probabilities of labels, a temperature and a threshold for each, and sets of possible labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Calibration, exact, given_labels, leads
from slipway.metrics.class_uncertainty import fit_temperature

Float = NDArray[np.float64]
_HALF = 0.5


def sigmoid(logits: NDArray[np.floating]) -> Float:
    """(N, K) logits -> probabilities in float64."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


def best_threshold(probabilities: NDArray[np.float32], is_own: NDArray[np.bool_]) -> float:
    """Return the threshold of one label with the largest F1 on these (N,) rows, in float32.

    Of equally good ones, the one nearest to a half. A half if no row has the label, or all have
    it: then every threshold between rows is chosen from nothing.
    """
    if is_own.all() or not is_own.any():
        return _HALF
    order = np.argsort(-probabilities, kind="stable")
    falling = probabilities[order].astype(np.float64)
    hits, given = np.cumsum(is_own[order]), np.arange(1, len(order) + 1)
    scores = 2 * hits / (given + is_own.sum())
    is_end = np.append(falling[1:] < falling[:-1], True)  # rows of equal probability go together
    following = np.append(falling[1:], 0.0)
    middles = ((falling + following) / 2).astype(np.float32).astype(np.float64)
    # Rounding may not move a row to the other side.
    thresholds = np.where((middles > following) & (middles <= falling), middles, falling)
    is_best = is_end & (scores >= scores[is_end].max() - 1e-12)
    found = thresholds[is_best]
    return float(found[np.abs(found - _HALF).argmin()])


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
    def decision(
        probabilities: NDArray[np.float32], targets: NDArray[np.generic]
    ) -> list[float] | None:
        """(K,) the threshold of each label with the largest F1 on these rows."""
        return [
            best_threshold(own, np.asarray(targets[:, label]) > 0)
            for label, own in enumerate(probabilities.T)
        ]

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
