"""The loss of each row, in float32 whatever the network computes in."""

from torch import Tensor
from torch.nn import functional as F

from slipway.contract import is_classification
from slipway.params import TrainParams
from slipway.training.batches import Mixing
from slipway.training.networks import Network


class RowLosses:
    """Answers and targets to (B,) float32 losses, as `params` ask."""

    def __init__(self, network: Network, params: TrainParams) -> None:
        self._classes = is_classification(network.spec.task)
        self._target_std = network.spec.target_scale.std if network.spec.target_scale else 1.0
        self._label_smoothing = params.label_smoothing

    def __call__(self, answers: Tensor, targets: Tensor, mixing: Mixing | None = None) -> Tensor:
        """Cross-entropy, or the squared error in standard deviations of the target; of a mixed image, by its two targets' shares.

        From answers (B, K); from (B, submodels, K) the mean of the submodels' losses, so that each learns by itself.
        """
        own = self._unmixed(answers, targets)
        if mixing is None:
            return own
        return mixing.own_shares * own + (1 - mixing.own_shares) * self._unmixed(answers, mixing.targets)

    def _unmixed(self, answers: Tensor, targets: Tensor) -> Tensor:
        if answers.ndim == 3:
            num_submodels = answers.shape[1]
            alone = self._unmixed(answers.flatten(0, 1), targets.repeat_interleave(num_submodels))
            return alone.view(-1, num_submodels).mean(dim=1)
        if self._classes:
            return F.cross_entropy(answers.float(), targets, label_smoothing=self._label_smoothing, reduction="none")
        return ((answers[:, 0].float() - targets) / self._target_std) ** 2
