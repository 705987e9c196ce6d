"""The loss of each row, in float32 whatever the network computes in, and what is added to it for the size of the weights."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.sections import TrainParams
from slipway.kinds.registry import is_classification
from slipway.system.errors import ParamsError
from slipway.training.batches.batches import Mixing
from slipway.training.networks.networks import Network
from slipway.training.recipe.optimizers import decays


class RowLosses(nn.Module):
    """Answers and targets to (B,) float32 losses, as `params` ask; `class_weights` (K,) float32 are those of `class_weights`."""

    class_weights: Tensor | None

    def __init__(
        self, network: Network, params: TrainParams, class_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self._classes = is_classification(network.spec.task)
        self._target_std = network.spec.target_scale.std if network.spec.target_scale else 1.0
        self._label_smoothing, self._huber_delta = params.label_smoothing, params.huber_delta
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, answers: Tensor, targets: Tensor, mixing: Mixing | None = None) -> Tensor:
        """Cross-entropy, or a numeric target's squared error or Huber loss; of a mixed image, by its two targets' shares.

        Errors are in standard deviations of the target. Huber's loss (Huber 1964, "Robust estimation of a location parameter") is half
        of the squared error up to `huber_delta`, and linear beyond. From answers (B, K); from (B, submodels, K) the mean of the
        submodels' losses, so that each learns by itself.
        """
        own = self._unmixed(answers, targets)
        if mixing is None:
            return own
        return mixing.own_shares * own + (1 - mixing.own_shares) * self._unmixed(
            answers, mixing.targets
        )

    def _unmixed(self, answers: Tensor, targets: Tensor) -> Tensor:
        if answers.ndim == 3:
            num_submodels = answers.shape[1]
            alone = self._unmixed(answers.flatten(0, 1), targets.repeat_interleave(num_submodels))
            return alone.view(-1, num_submodels).mean(dim=1)
        if self._classes:
            smoothing = self._label_smoothing
            return F.cross_entropy(
                answers.float(),
                targets,
                self.class_weights,
                label_smoothing=smoothing,
                reduction="none",
            )
        errors = (answers[:, 0].float() - targets) / self._target_std
        if self._huber_delta is None:
            return errors**2
        return F.huber_loss(
            errors, torch.zeros_like(errors), delta=self._huber_delta, reduction="none"
        )


def class_weights(
    asked: Literal["balanced"] | Mapping[str, float] | None,
    classes: Sequence[str],
    targets: NDArray[np.float64],
) -> Tensor | None:
    """(K,) float32 in the order of `classes`, or None where none are asked for. Their mean over the training rows is 1.

    `targets` (N,) are the rows' positions in `classes`. balanced: each class counts as much as any other,
    whatever its rows are. ParamsError where a mapping is not of the classes.
    """
    if asked is None:
        return None
    counts = np.bincount(targets.astype(np.int64), minlength=len(classes))
    if isinstance(asked, str):
        weights = 1 / np.maximum(counts, 1)
    else:
        _check_names(asked, classes)
        weights = np.array([asked[name] for name in classes])
    return torch.from_numpy(weights * counts.sum() / (weights * counts).sum()).float()


def l1_penalty(network: nn.Module, factor: float) -> Tensor | float:
    """`factor` times the sum of the magnitudes of the weights, () float32; norms, scales, biases and what is frozen are left out."""
    if not factor:
        return 0.0
    weights = [
        parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and decays(name, parameter)
    ]
    return factor * torch.stack([weight.float().abs().sum() for weight in weights]).sum()


def _check_names(asked: Mapping[str, float], classes: Sequence[str]) -> None:
    problems = [f"{name!r} has none" for name in classes if name not in asked]
    for name in asked:
        if name not in classes:
            close = difflib.get_close_matches(name, classes, n=1, cutoff=0.5)
            problems.append(
                f"{name!r} is no class" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    if problems:
        raise ParamsError(
            f"train.class_weights needs a number for each of the classes {', '.join(classes)}: {', '.join(problems)}."
        )
