"""Per-row losses in float32, class weights, and the L1 penalty."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.system.errors import ParamsError, TrainingError, UnavailableError, nearest
from slipway.system.user_code import definition_place, failure, import_named, is_user_code
from slipway.training.batches.batches import Mixing
from slipway.training.batches.soft_answers import Distillation
from slipway.training.distributed.shards import whole
from slipway.training.networks.networks import Network
from slipway.training.recipe.optimizers import decays


class RowLosses(nn.Module):
    """Maps outputs and targets to the loss of each row, (B,) float32.

    `class_weights` is (K,) float32.
    """

    def __init__(
        self,
        network: Network,
        params: TrainParams,
        class_weights: Tensor | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        super().__init__()
        spec, self._distillation = network.spec, distillation
        target_std = spec.target_scale.std if spec.target_scale else 1.0
        make_loss = kind_of(spec.task).target.load_part("loss")
        self.of_target = make_loss(params, target_std, class_weights)
        self._of_user = None
        if is_user_code(params.loss):
            self._of_user = UserLoss(params.loss, has_classes=bool(spec.classes))

    def forward(
        self,
        answers: Tensor,
        targets: Tensor,
        mixing: Mixing | None = None,
        soft: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each row, (B,).

        `answers` are the network's outputs (B, K), or (B, submodels, K). Submodels learn
        separately: the loss of a row is the mean of their losses. The loss of a mixed image is the
        sum of the losses for its two targets, weighted by their fractions. With a teacher's outputs
        `soft` (B, K), a fraction of the loss is the distillation loss.
        """
        own = self._unmixed(answers, targets, soft)
        if mixing is None:
            return own
        partner = self._unmixed(answers, mixing.targets, mixing.soft)
        return mixing.own_fractions * own + (1 - mixing.own_fractions) * partner

    def _unmixed(self, answers: Tensor, targets: Tensor, soft: Tensor | None) -> Tensor:
        if answers.ndim == 3:
            num_submodels = answers.shape[1]
            losses = self._unmixed(
                answers.flatten(0, 1),
                targets.repeat_interleave(num_submodels, 0),
                None if soft is None else soft.repeat_interleave(num_submodels, 0),
            )
            return losses.view(-1, num_submodels).mean(dim=1)
        loss = self._of_user or self.of_target
        losses = cast(Tensor, loss(answers, targets))
        if soft is None or self._distillation is None:
            return losses
        fraction, temperature = self._distillation.fraction, self._distillation.temperature
        distilled: Tensor = self.of_target.distilled(answers, soft, temperature)
        return fraction * distilled + (1 - fraction) * losses


class UserLoss:
    """The user's function `train.loss: package.module:function`, which returns a loss for each row.

    It takes logits (B, K) with class indices (B,) or labels (B, K), 0 or 1; or values (B,) with
    numbers (B,) in the target's unit. All are float32 except the indices. Slipway mixes, weights
    and averages the losses.
    """

    def __init__(self, name: str, *, has_classes: bool) -> None:
        self._name, self._has_classes = f"train.loss {name!r}", has_classes
        self._function = import_named(name)
        if not callable(self._function):
            raise UnavailableError(
                f"{self._name} is {type(self._function).__name__}, expected a function of outputs "
                "and targets. Correct the name or the module."
            )

    def __call__(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (B,) float32.

        Raises TrainingError, which names the user's line, if the function fails.
        """
        outputs = answers.float() if self._has_classes else answers[:, 0].float()
        given = (
            f"It gets outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}, and "
            f"returns a loss for each row, {tuple(targets.shape[:1])}"
        )
        try:
            losses = self._function(outputs, targets)
        except Exception as error:
            raise TrainingError(
                f"{self._name} fails: {failure(error, self._function)}. {given}. Correct it."
            ) from error
        if isinstance(losses, Tensor) and losses.shape == targets.shape[:1]:
            return losses.float()
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise TrainingError(
            f"{self._name} returned {found} ({definition_place(self._function)}). {given}. "
            "Return one loss per row, without averaging."
        )


def class_weights(
    requested: Literal["balanced"] | Mapping[str, float] | None,
    classes: Sequence[str],
    targets: NDArray[Any],
) -> Tensor | None:
    """Return class weights (K,) float32 in the order of `classes`; their mean over rows is 1.

    `targets` (N,) are the class indices of the rows. `requested` is a weight by class, or
    "balanced": then each class has the same total weight, however many rows it has. If it is None,
    the result is None. Raises ParamsError if a mapping lacks a class or names an unknown one.

    If `targets` are labels (N, K), a weight applies to rows that have the label, and the mean is
    not 1: with "balanced" the rows with a label weigh as much in total as those without.
    """
    if requested is None:
        return None
    if targets.ndim == 2:
        present = targets.sum(axis=0, dtype=np.float64)
        if isinstance(requested, str):
            return torch.from_numpy((len(targets) - present) / np.maximum(present, 1)).float()
        _check_names(requested, classes)
        return torch.tensor([requested[name] for name in classes])
    counts = np.bincount(targets.astype(np.int64), minlength=len(classes))
    if isinstance(requested, str):
        weights = 1 / np.maximum(counts, 1)
    else:
        _check_names(requested, classes)
        weights = np.array([requested[name] for name in classes])
    return torch.from_numpy(weights * counts.sum() / (weights * counts).sum()).float()


def l1_penalty(network: nn.Module, factor: float) -> Tensor | float:
    """Return `factor` times the sum of the absolute weights, a float32 scalar.

    The weights of norms, scales, biases and frozen weights are excluded.
    """
    if not factor:
        return 0.0
    weights = [
        parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and decays(name, parameter)
    ]
    return factor * torch.stack([whole(weight.float().abs().sum()) for weight in weights]).sum()


def _check_names(requested: Mapping[str, float], classes: Sequence[str]) -> None:
    problems = [f"{name!r} has none" for name in classes if name not in requested]
    for name in requested:
        if name not in classes:
            close = nearest(name, classes)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.append(f"{name!r} is not a class{hint}")
    if problems:
        raise ParamsError(
            "train.class_weights needs a number for each of the classes "
            f"{', '.join(classes)}: {', '.join(problems)}."
        )
