"""Training for classes: cross-entropy, accuracy and softmax."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.training import TrainParams
from slipway.data.store.packed import TargetScale


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

    def distilled(self, logits: Tensor, soft: Tensor, temperature: float) -> Tensor:
        """Return the KL divergence (B,) from the teacher's logits `soft` (B, K).

        It is multiplied by the squared temperature, which preserves the size of the gradient.
        """
        own = F.log_softmax(logits.float() / temperature, dim=1)
        other = F.log_softmax(soft / temperature, dim=1)
        divergence = F.kl_div(own, other, reduction="none", log_target=True)
        return divergence.sum(dim=1) * temperature**2

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each correct row and 0 for the others, (B,) float64."""
        return (logits.argmax(dim=1) == targets).double()

    def metric(self, mean_score: float) -> float:
        """Return the accuracy, which is the mean of `scores`."""
        return mean_score


class ClassHead:
    """Turns logits into probabilities."""

    @staticmethod
    def activate(logits: Tensor, temperature: float) -> Tensor:
        return torch.softmax(logits / temperature, dim=1)

    @staticmethod
    def mean_of_submodels(logits: Tensor) -> Tensor:
        """Average the submodels' probabilities; map logits (B, submodels, K) to (B, K)."""
        # Without dividing by the number of submodels, a constant that softmax removes.
        return torch.logsumexp(torch.log_softmax(logits.to(torch.float32), dim=2), dim=1)

    @staticmethod
    def weighted_mean(logits: Tensor, weights: Tensor) -> Tensor:
        """Average the members' probabilities by weight; map logits (B, members, K) to (B, K)."""
        scores = torch.log_softmax(logits.to(torch.float32), dim=2)
        return torch.logsumexp(scores + weights.log()[:, None], dim=1)

    @staticmethod
    def vote(logits: Tensor) -> Tensor:
        """Return the fraction of members that vote for each class, as logits (B, K).

        `logits` are (B, members, K). The mean of the probabilities decides a tie.
        """
        scores = logits.to(torch.float32)
        votes = (scores == scores.amax(dim=2, keepdim=True)).to(torch.float32).mean(dim=1)
        tie = 1 / (scores.shape[1] + 2)  # less than a vote
        mixed = (1 - tie) * votes + tie * torch.softmax(scores, dim=2).mean(dim=1)
        return mixed.clamp_min(1e-12).log()


class ClassTrees:
    """Boosted trees for classes: each round adds one tree for two classes, else one per class."""

    @staticmethod
    def objective(params: TrainParams, num_classes: int) -> dict[str, Any]:
        """Return LightGBM's settings of the objective for `num_classes` classes."""
        if num_classes == 2:
            return {"objective": "binary"}
        return {"objective": "multiclass", "num_class": num_classes}

    @staticmethod
    def num_sums(num_classes: int) -> int:
        """Return the number of raw scores per row: 1 for two classes, else one for each class."""
        return 1 if num_classes == 2 else num_classes

    @staticmethod
    def labels(targets: NDArray[np.float64], scale: TargetScale | None) -> NDArray[np.float64]:
        """Return the targets in the form in which LightGBM learns them."""
        return targets

    @staticmethod
    def sums(predictions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert LightGBM's probabilities, (N,) or (N, K), back to raw scores, (N, sums)."""
        smallest = np.finfo(np.float64).tiny
        if predictions.ndim == 1:
            inverse = np.log1p(-np.minimum(predictions, 1 - np.finfo(np.float64).epsneg))
            return (np.log(np.maximum(predictions, smallest)) - inverse)[:, np.newaxis]
        return np.log(np.maximum(predictions, smallest))

    @staticmethod
    def answers(sums: Tensor) -> Tensor:
        """Convert raw scores (B, sums) to the network's logits (B, K)."""
        return torch.cat([torch.zeros_like(sums), sums], dim=1) if sums.shape[1] == 1 else sums
