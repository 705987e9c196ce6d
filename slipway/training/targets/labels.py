"""Multi-label training: binary cross-entropy or asymmetric loss, and sigmoid."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.training import TrainParams

# Values of Ridnik et al. 2021, "Asymmetric Loss For Multi-Label Classification", for MS-COCO.
_GAMMA_NEGATIVE = 4.0
_MARGIN = 0.05


class LabelLoss(nn.Module):
    """Maps (B, K) logits and (B, K) labels, 0 or 1, to (B,) float32 losses: means over labels.

    The asymmetric loss gives easy negatives little weight: it subtracts a margin from their
    probability, and weights their loss by a power of the result. `class_weights` multiply the loss
    of present labels.
    """

    class_weights: Tensor | None

    def __init__(
        self, params: TrainParams, target_std: float, class_weights: Tensor | None
    ) -> None:
        super().__init__()
        self._label_smoothing = params.label_smoothing
        self._is_asymmetric = params.loss == "asymmetric"
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        answers = logits.float()
        smooth = targets * (1 - self._label_smoothing) + self._label_smoothing / 2
        if not self._is_asymmetric:
            losses = F.binary_cross_entropy_with_logits(
                answers, smooth, pos_weight=self.class_weights, reduction="none"
            )
            return losses.mean(dim=1)
        present = -F.logsigmoid(answers)
        if self.class_weights is not None:
            present = present * self.class_weights
        shifted = (torch.sigmoid(answers) - _MARGIN).clamp(min=0)
        absent = -torch.log1p(-shifted) * shifted**_GAMMA_NEGATIVE
        return (smooth * present + (1 - smooth) * absent).mean(dim=1)

    def distilled(self, logits: Tensor, soft: Tensor, temperature: float) -> Tensor:
        """Return the cross-entropy (B,) with the probabilities of a teacher's logits `soft` (B, K).

        It is the mean over labels, multiplied by the squared temperature as for classes.
        """
        own, other = logits.float() / temperature, torch.sigmoid(soft / temperature)
        losses = F.binary_cross_entropy_with_logits(own, other, reduction="none")
        return losses.mean(dim=1) * temperature**2

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each row whose labels are all right at a threshold of 0.5, else 0: (B,)."""
        return ((logits >= 0) == (targets > 0)).all(dim=1).double()

    def metric(self, mean_score: float) -> float:
        """Return the subset accuracy, which is the mean of `scores`."""
        return mean_score


class LabelHead:
    """Turns logits into a probability for each label."""

    @staticmethod
    def activate(logits: Tensor, temperature: float | Tensor) -> Tensor:
        return torch.sigmoid(logits / temperature)

    @staticmethod
    def mean_of_submodels(logits: Tensor) -> Tensor:
        """Average the submodels' probabilities; map logits (B, submodels, K) to (B, K)."""
        # log(mean sigmoid(z)) - log(mean sigmoid(-z)), which rounds neither near 0 nor near 1.
        scores = logits.to(torch.float32)
        present = torch.logsumexp(F.logsigmoid(scores), dim=1)
        return present - torch.logsumexp(F.logsigmoid(-scores), dim=1)

    @staticmethod
    def weighted_mean(logits: Tensor, weights: Tensor) -> Tensor:
        """Average the members' probabilities by weight; map logits (B, members, K) to (B, K)."""
        scores, log_weights = logits.to(torch.float32), weights.log()[:, None]
        present = torch.logsumexp(F.logsigmoid(scores) + log_weights, dim=1)
        return present - torch.logsumexp(F.logsigmoid(-scores) + log_weights, dim=1)

    @staticmethod
    def vote(logits: Tensor) -> Tensor:
        """Return the fraction of members that vote for each label, as logits (B, K).

        `logits` are (B, members, K). The mean of the probabilities decides a tie.
        """
        scores = logits.to(torch.float32)
        tie = 1 / (scores.shape[1] + 2)  # less than a vote
        votes = (scores >= 0).to(torch.float32).mean(dim=1)
        mixed = (1 - tie) * votes + tie * torch.sigmoid(scores).mean(dim=1)
        bounded = mixed.clamp(1e-6, 1 - 1e-6)
        return bounded.log() - (1 - bounded).log()
