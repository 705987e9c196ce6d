"""Training for classes: cross-entropy, accuracy and softmax."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.sections import TrainParams


class ClassLoss(nn.Module):
    """Maps (B, K) logits and (B,) class indices to (B,) float32 losses."""

    class_weights: Tensor | None

    def __init__(
        self, params: TrainParams, target_std: float, class_weights: Tensor | None
    ) -> None:
        super().__init__()
        self._label_smoothing = params.label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.float(),
            targets,
            self.class_weights,
            label_smoothing=self._label_smoothing,
            reduction="none",
        )

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B,) float64: 1 for a correct row, else 0."""
        return (logits.argmax(dim=1) == targets).double()

    def metric(self, mean_score: float) -> float:
        """Return the accuracy."""
        return mean_score


class ClassHead:
    """Turns logits into probabilities."""

    @staticmethod
    def activate(logits: Tensor, temperature: float) -> Tensor:
        return torch.softmax(logits / temperature, dim=1)

    @staticmethod
    def mean_of_submodels(logits: Tensor) -> Tensor:
        """(B, submodels, K) -> (B, K), the mean of the submodels' probabilities as logits."""
        # Without dividing by the number of submodels, a constant that softmax removes.
        return torch.logsumexp(torch.log_softmax(logits.to(torch.float32), dim=2), dim=1)
