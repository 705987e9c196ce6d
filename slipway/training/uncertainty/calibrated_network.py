"""A trained network with its calibration and OOD score, in the form in which it is exported.

The exported graph contains temperature, softmax and OOD score, so no service can omit them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Calibration
from slipway.kinds.registry import kind_of
from slipway.training.networks.features import answer_and_features
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.ood_score import OODScore, load_ood_score


class CalibratedNetwork(nn.Module):
    """Maps (rows, ...) inputs to (rows, labels) probabilities and (rows,) OOD scores, float32.

    For a numeric target the first output is (rows, 1) values. `head` is the target kind's head.
    """

    temperatures: Tensor  # (labels,), only if each label has its own

    def __init__(
        self,
        network: nn.Module,
        head: Any,
        temperature: float | Sequence[float],
        score: OODScore,
    ) -> None:
        super().__init__()
        self.network = network
        self._head, self._temperature = head, temperature
        if not isinstance(temperature, float):
            factors = torch.tensor(temperature, dtype=torch.float32)
            self.register_buffer("temperatures", factors, persistent=False)
        self.score = score

    @property
    def _scale(self) -> float | Tensor:
        return self._temperature if isinstance(self._temperature, float) else self.temperatures

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Map inputs (B, ...) to probabilities or values (B, K) and OOD scores (B,)."""
        answer, features = answer_and_features(self.network, self.score.layer, rows)
        return self._head.activate(answer, self._scale), self.score(features)


def calibrated(network: Network, calibration: Calibration, statistics: Path) -> CalibratedNetwork:
    """Return the network with `calibration` applied, in evaluation mode on the CPU.

    `statistics` is the file of the OOD score. Raises SchemaError if it is missing or has another
    format, IntegrityError if it is not the fitted file.
    """
    head = kind_of(network.spec.task).target.load_part("head")
    score = load_ood_score(statistics, calibration.ood)
    return CalibratedNetwork(network, head, calibration.temperature, score).cpu().eval()
