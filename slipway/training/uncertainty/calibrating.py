"""From a trained network to one whose answers say what they are worth: temperature, thresholds and outlier score.

Nothing is fitted on test rows. Training rows are for the outlier score alone, one half of the validation rows is
for the temperature, the other for the thresholds: their promise takes rows that nothing else was fitted on.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers, Calibration, Conformal, Outlier
from slipway.config.sections import MeasuringParams
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.kinds.registry import is_classification
from slipway.metrics.uncertainty import fit_temperature, softmax, with_thresholds
from slipway.training.batches.row_selection import select
from slipway.training.networks.features import telling_layer
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.outlier_score import OutlierScore, digest, fit_outlier_score
from slipway.training.uncertainty.prediction import predict_raw

_MOST_TRAINING_ROWS = 4096  # behind the outlier score; more cost time and change little


@dataclass(frozen=True)
class FittedCalibration:
    """What was fitted, and the score it is used with."""

    calibration: Calibration
    score: OutlierScore

    def apply(self, network: Network, raw: Answers) -> Answers:
        """Logits (N, K) to probabilities, softmax in float64; values (N, 1) as they are; what the exported graph answers."""
        if not is_classification(network.spec.task):
            return raw
        return raw._replace(
            outputs=softmax(raw.outputs.astype(np.float64) / self.calibration.temperature).astype(
                np.float32
            )
        )


class Calibrator:
    """Fits and applies the calibration of one network, on one device."""

    def __init__(self, network: Network, params: MeasuringParams, seed: int, device: str) -> None:
        example = torch.from_numpy(
            np.zeros((1, *network.spec.input.shape), network.spec.input.dtype)
        )
        self._layer = telling_layer(network.eval().cpu(), example)
        self._network, self._params, self._seed, self._device = network, params, seed, device

    def predict(self, inputs: Inputs, score: OutlierScore) -> Answers:
        """Logits (N, K) or values (N, 1), and outlier scores (N,)."""
        return Answers(
            *predict_raw(
                self._network, self._layer, inputs, self._params.batch_size, self._device, score
            )
        )

    def fit(self, train: PackedSplit, val: PackedSplit) -> FittedCalibration:
        """From training rows for the score, and validation rows for everything else."""
        known = predict_raw(
            self._network,
            self._layer,
            self._training_rows(train),
            self._params.batch_size,
            self._device,
        )
        score = fit_outlier_score(self._layer, known.features)
        raw, is_fitted = self.predict(val.inputs, score), fitting_half(val.keys, self._seed)
        temperature = 1.0
        if is_classification(self._network.spec.task) and self._params.calibration == "temperature":
            temperature = fit_temperature(raw.outputs[is_fitted], val.targets[is_fitted])
        held_out = Answers(raw.outputs[~is_fitted], raw.scores[~is_fitted])
        return self._with_thresholds(temperature, score, held_out, val.targets[~is_fitted])

    def _with_thresholds(
        self,
        temperature: float,
        score: OutlierScore,
        held_out: Answers,
        targets: NDArray[np.float64],
    ) -> FittedCalibration:
        params, rows = self._params, len(targets)
        conformal = Conformal(coverage=params.coverage, threshold=None, rows=rows)
        outlier = Outlier(
            share=params.ood_fraction,
            threshold=None,
            rows=rows,
            layer=self._layer,
            statistics_sha256=digest(score),
        )
        fitted = FittedCalibration(
            Calibration(temperature=temperature, conformal=conformal, outlier=outlier), score
        )
        answers, of_classes = (
            fitted.apply(self._network, held_out),
            is_classification(self._network.spec.task),
        )
        return FittedCalibration(
            with_thresholds(fitted.calibration, answers, targets, of_classes=of_classes), score
        )

    def _training_rows(self, train: PackedSplit) -> Inputs:
        """Which ones depends on seed and ids alone."""
        draw = uniform(self._seed, 0, train.keys, "outlier score")
        chosen = np.sort(np.lexsort((train.keys, draw))[:_MOST_TRAINING_ROWS])
        return select([train], chosen, self._network.spec.input.shape).inputs


def fitting_half(keys: NDArray[np.uint64], seed: int) -> NDArray[np.bool_]:
    """(N,) which validation rows the temperature is fitted on; the thresholds take the others. By id and seed alone."""
    return uniform(seed, 0, keys, "calibration half") < 0.5
