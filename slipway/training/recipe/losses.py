"""Per-row losses in float32, class weights, and the L1 penalty."""

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
    """Maps answers and targets to (B,) float32 losses. `class_weights` is (K,) float32."""

    class_weights: Tensor | None

    def __init__(
        self, network: Network, params: TrainParams, class_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self._is_classification = is_classification(network.spec.task)
        self._target_std = network.spec.target_scale.std if network.spec.target_scale else 1.0
        self._label_smoothing, self._huber_delta = params.label_smoothing, params.huber_delta
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, answers: Tensor, targets: Tensor, mixing: Mixing | None = None) -> Tensor:
        """Cross-entropy, or the squared error or Huber loss of a numeric target.

        A mixed image has the losses of its two targets, weighted by their fractions. Errors are in
        standard deviations of the target. Huber's loss (Huber 1964, "Robust estimation of a
        location parameter") is half of the squared error up to `huber_delta`, and linear beyond.
        `answers` are (B, K), or (B, submodels, K): the mean of the submodels' losses, so that each
        submodel learns by itself.
        """
        own = self._unmixed(answers, targets)
        if mixing is None:
            return own
        partner = self._unmixed(answers, mixing.targets)
        return mixing.own_shares * own + (1 - mixing.own_shares) * partner

    def _unmixed(self, answers: Tensor, targets: Tensor) -> Tensor:
        if answers.ndim == 3:
            num_submodels = answers.shape[1]
            losses = self._unmixed(answers.flatten(0, 1), targets.repeat_interleave(num_submodels))
            return losses.view(-1, num_submodels).mean(dim=1)
        if self._is_classification:
            return F.cross_entropy(
                answers.float(),
                targets,
                self.class_weights,
                label_smoothing=self._label_smoothing,
                reduction="none",
            )
        errors = (answers[:, 0].float() - targets) / self._target_std
        if self._huber_delta is None:
            return errors**2
        return F.huber_loss(
            errors, torch.zeros_like(errors), delta=self._huber_delta, reduction="none"
        )


def class_weights(
    requested: Literal["balanced"] | Mapping[str, float] | None,
    classes: Sequence[str],
    targets: NDArray[np.float64],
) -> Tensor | None:
    """Return (K,) float32 weights in the order of `classes`, whose mean over the rows is 1.

    `targets` (N,) are the rows' positions in `classes`. "balanced" lets each class count the same,
    however many rows it has. Returns None for None. Raises ParamsError if a mapping does not
    name exactly the classes.
    """
    if requested is None:
        return None
    counts = np.bincount(targets.astype(np.int64), minlength=len(classes))
    if isinstance(requested, str):
        weights = 1 / np.maximum(counts, 1)
    else:
        _check_names(requested, classes)
        weights = np.array([requested[name] for name in classes])
    return torch.from_numpy(weights * counts.sum() / (weights * counts).sum()).float()


def l1_penalty(network: nn.Module, factor: float) -> Tensor | float:
    """Return `factor` times the sum of the absolute weights, () float32.

    Norms, scales, biases and frozen weights do not count.
    """
    if not factor:
        return 0.0
    weights = [
        parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and decays(name, parameter)
    ]
    return factor * torch.stack([weight.float().abs().sum() for weight in weights]).sum()


def _check_names(requested: Mapping[str, float], classes: Sequence[str]) -> None:
    problems = [f"{name!r} has none" for name in classes if name not in requested]
    for name in requested:
        if name not in classes:
            close = difflib.get_close_matches(name, classes, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.append(f"{name!r} is no class{hint}")
    if problems:
        raise ParamsError(
            "train.class_weights needs a number for each of the classes "
            f"{', '.join(classes)}: {', '.join(problems)}."
        )
