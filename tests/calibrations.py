"""Calibrations without fitting, for tests of what comes after it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slipway.artifacts.uncertainty import Calibration, Conformal, OODThreshold
from slipway.training.networks.features import answer_and_features, feature_layer
from slipway.training.targets.classes import ClassHead
from slipway.training.targets.numbers import NumberHead
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.ood_score import fit_ood_score

CALIBRATION = Calibration(
    temperature=1.0,
    conformal=Conformal(coverage=0.9, threshold=0.25, rows=50),
    ood=OODThreshold(
        fraction=0.05, threshold=0.75, rows=50, layer="head", statistics_sha256="0" * 64
    ),
)


def calibrated(
    network: nn.Module, rows: NDArray[Any], temperature: float | None = 1.0
) -> CalibratedNetwork:
    """Return the network with an OOD score that is fitted on `rows` (N, ...)."""
    taken = torch.from_numpy(np.array(rows))
    layer = feature_layer(network.eval(), taken[:1])
    with torch.inference_mode():
        features = answer_and_features(network, layer, taken)[1].numpy()
    head = NumberHead if temperature is None else ClassHead
    return CalibratedNetwork(
        network, head, temperature or 1.0, fit_ood_score(layer, features)
    ).eval()


def described(
    answer: dict[str, Any], score: float = 0.5, calibration: Calibration = CALIBRATION
) -> dict[str, Any]:
    """Return the service's answer for a label with probabilities, or for a value."""
    strangeness = {
        "ood_score": score,
        "is_ood": bool(calibration.is_ood(np.float32(score))),
    }
    if "value" in answer:
        interval = calibration.interval(answer["value"])
        return answer | {"interval": interval and list(interval)} | strangeness
    least, ordered = (
        calibration.conformal.threshold or 0.0,
        sorted(answer["probabilities"].items(), key=lambda item: -item[1]),
    )
    return (
        answer
        | {
            "prediction_set": [
                name for name, share in ordered if share >= least or share == ordered[0][1]
            ]
        }
        | strangeness
    )
