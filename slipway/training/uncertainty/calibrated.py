"""A trained network with everything that turns its logits into an answer: what is measured, exported and compared with.

Temperature, softmax and the outlier score are inside the exported graph, so no service can forget one of them.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Calibration
from slipway.kinds.registry import is_classification
from slipway.training.networks.features import answer_and_features
from slipway.training.networks.networks import Network
from slipway.training.uncertainty.outlier_score import OutlierScore, load_outlier_score


class CalibratedNetwork(nn.Module):
    """(rows, ...) as the network takes them to (rows, labels) probabilities or (rows, 1) values, and (rows,) outlier scores, float32.

    `temperature` is None for a network whose answers are values.
    """

    def __init__(self, network: nn.Module, temperature: float | None, score: OutlierScore) -> None:
        super().__init__()
        self.network = network
        self.temperature = temperature
        self.score = score

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(B, ...) -> (B, K), (B,)"""
        answer, features = answer_and_features(self.network, self.score.layer, rows)
        if self.temperature is not None:
            answer = torch.softmax(answer / self.temperature, dim=1)
        return answer, self.score(features)


def calibrated(network: Network, calibration: Calibration, statistics: Path) -> CalibratedNetwork:
    """The network as `calibration` says, in evaluation mode on the CPU; `statistics` is the file of the outlier score.

    SchemaError if that file is missing or of another form, IntegrityError if it is not the one that was fitted.
    """
    temperature = calibration.temperature if is_classification(network.spec.task) else None
    return (
        CalibratedNetwork(network, temperature, load_outlier_score(statistics, calibration.outlier))
        .cpu()
        .eval()
    )
