"""Fits the uncertainty of a trained network: temperature, conformal thresholds and OOD score.

The OOD score is fitted to training rows, the temperature to one half of the validation rows, and
the thresholds to the other half, because their guarantee needs rows on which nothing else was
fitted. Test rows are never used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import (
    Answers,
    Calibration,
    Conformal,
    Decision,
    DecisionCosts,
    OODThreshold,
)
from slipway.config.sections import MeasuringParams
from slipway.data.engine.randomness import drawn_order, uniform
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.kinds.registry import kind_of
from slipway.metrics.uncertainty import with_thresholds
from slipway.system import files
from slipway.system.errors import ParamsError
from slipway.training.batches.row_selection import select
from slipway.training.networks.features import feature_layer
from slipway.training.networks.networks import Network, example_rows
from slipway.training.uncertainty.ood_score import OODScore, fit_ood_score, serialize_ood_score
from slipway.training.uncertainty.prediction import predict_raw

_MOST_SHOWN = 5
_MAX_TRAINING_ROWS = 4096  # most rows for the OOD score; more take time and change little


@dataclass(frozen=True)
class FittedCalibration:
    """The fitted calibration of a network, and its OOD score."""

    calibration: Calibration
    score: OODScore

    def apply(self, network: Network, raw: Answers) -> Answers:
        """Convert raw outputs as the exported graph does: logits (N, K) to probabilities (N, K)."""
        uncertainty = kind_of(network.spec.task).target.load_part("uncertainty")
        return raw._replace(outputs=uncertainty.answers(raw.outputs, self.calibration.temperature))


class Calibrator:
    """Fits and applies the calibration of one network on one device."""

    def __init__(self, network: Network, params: MeasuringParams, seed: int, device: str) -> None:
        self._layer = feature_layer(network.eval().cpu(), example_rows(network.spec))
        self._network, self._params, self._seed, self._device = network, params, seed, device

    def predict(self, inputs: Inputs, score: OODScore | None) -> Answers:
        """Return logits (N, K) or values (N, 1), and OOD scores (N,).

        Without `score`, returns the features (N, D) instead of the scores.
        """
        return predict_raw(
            self._network, self._layer, inputs, self._params.batch_size, self._device, score
        )

    def fit(self, train: PackedSplit, val: PackedSplit) -> FittedCalibration:
        """Fit the OOD score to training rows, and everything else to validation rows."""
        features = self.predict(self._training_rows(train), None).scores
        score = fit_ood_score(self._layer, features)
        raw, is_fitted = self.predict(val.inputs, score), fitting_half(val.keys, self._seed)
        temperature: float | list[float] = 1.0
        if self._params.calibration == "temperature":
            uncertainty = kind_of(self._network.spec.task).target.load_part("uncertainty")
            temperature = uncertainty.temperature(raw.outputs[is_fitted], val.targets[is_fitted])
        held_out = Answers(raw.outputs[~is_fitted], raw.scores[~is_fitted])
        return self._with_thresholds(temperature, score, held_out, val.targets[~is_fitted])

    def _with_thresholds(
        self,
        temperature: float | list[float],
        score: OODScore,
        held_out: Answers,
        targets: NDArray[Any],
    ) -> FittedCalibration:
        params, rows = self._params, len(targets)
        without_thresholds = Calibration(
            temperature=temperature,
            decision=_decision(params, self._network.spec.classes),
            conformal=Conformal(coverage=params.coverage, threshold=None, rows=rows),
            ood=OODThreshold(
                fraction=params.ood_fraction,
                threshold=None,
                rows=rows,
                layer=self._layer,
                statistics_sha256=files.sha256_bytes(serialize_ood_score(score)),
            ),
        )
        answers = FittedCalibration(without_thresholds, score).apply(self._network, held_out)
        task = self._network.spec.task
        calibration = with_thresholds(task, without_thresholds, answers, targets)
        return FittedCalibration(calibration, score)

    def _training_rows(self, train: PackedSplit) -> Inputs:
        """Select the training rows to which the OOD score is fitted, from seed and row ids."""
        # Another name of the stream would select other rows.
        order = drawn_order(self._seed, 0, train.keys, "outlier score")
        chosen = np.sort(order[:_MAX_TRAINING_ROWS])
        return select([train], chosen, self._network.spec.input.shape).inputs


def _decision(params: MeasuringParams, classes: Sequence[str]) -> Decision | None:
    """Return the decision rule of `params`. Raises ParamsError if it does not fit the classes."""
    wanted = params.decision
    if wanted is None:
        return None
    if len(classes) != 2 or wanted.positive not in classes:
        raise ParamsError(
            f"evaluate.decision.positive is {wanted.positive!r}, but the data has "
            f"{len(classes)} classes: {', '.join(classes[:_MOST_SHOWN])}; expected one of two "
            "classes. Name one of them, or set evaluate.decision to null."
        )
    costs = None if wanted.costs is None else DecisionCosts(**wanted.costs.model_dump())
    return Decision(
        positive=wanted.positive, place=list(classes).index(wanted.positive), costs=costs
    )


def fitting_half(keys: NDArray[np.uint64], seed: int) -> NDArray[np.bool_]:
    """Return a mask (N,) of the validation rows that fit the temperature.

    The other validation rows fit the thresholds. The mask depends only on the row ids and the seed.
    """
    return uniform(seed, 0, keys, "calibration half") < 0.5
