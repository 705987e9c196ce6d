"""Weights of an ensemble's members, chosen on validation rows.

Greedy weights follow the ensemble selection of Caruana et al. (2004, "Ensemble Selection from
Libraries of Models"): repeatedly add the member that lowers the loss most, with replacement. This
overfits if there are few rows, so it is repeated on random halves of the rows, and the weights are
averaged. The other halves estimate the loss of such weights on unseen rows. Losses are those of a
training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.config.training import TrainParams
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import PackedSplit
from slipway.kinds.registry import kind_of
from slipway.training.networks.networks import NetworkSpec

_BAGS = 20
_STEPS = 25  # members added in each selection
_LEAST = 0.005  # a member with a smaller weight is dropped
# Maps weights (members,) float32 and a mask (N,) to the mean loss of the masked rows.
Loss = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class ChosenWeights:
    """The weights of an ensemble's members, and their expected loss on unseen rows."""

    weights: list[float]  # 0 or more, with the sum 1; of a stack any number
    expected_loss: float | None = None
    bias: list[float] = field(default_factory=list)  # (K,) for a stack, in the unit of the outputs


def equal_weights(num_members: int) -> ChosenWeights:
    """Return equal weights, 1 / `num_members` for each member."""
    return ChosenWeights([1 / num_members] * num_members)


def greedy_weights(
    num_members: int, keys: NDArray[np.uint64], seed: int, loss: Loss
) -> ChosenWeights:
    """Choose weights by ensemble selection on random halves of the validation rows.

    The halves are drawn from the rows' `keys` and the `seed`. `loss` maps weights and a mask of
    rows to a mean loss.
    """
    halves = [
        torch.from_numpy(uniform(seed, bag, keys, "ensemble bag") < 0.5) for bag in range(_BAGS)
    ]
    found = [_selected(num_members, loss, half) for half in halves]
    mean = np.mean(found, axis=0)
    mean = np.where(mean < _LEAST, 0.0, mean)
    mean /= mean.sum()
    # On the same rows, those that a half did not see: its own weights, and those of all rows.
    optimism = [
        loss(_tensor(weights), ~half) - loss(_tensor(mean), ~half)
        for weights, half in zip(found, halves, strict=True)
    ]
    every = torch.ones(len(keys), dtype=torch.bool)
    expected = loss(_tensor(mean), every) + max(0.0, float(np.mean(optimism)))
    return ChosenWeights(mean.tolist(), expected)


def _selected(num_members: int, loss: Loss, mask: Tensor) -> NDArray[np.float64]:
    """Select members greedily by the loss on the rows of `mask`.

    Returns the weights (members,), which add up to 1, of the best selection of any size.
    """
    counts, best, best_loss = np.zeros(num_members), np.ones(num_members), np.inf
    for step in range(1, _STEPS + 1):
        tried = counts + np.eye(num_members)
        losses = [loss(_tensor(each / step), mask) for each in tried]
        counts = tried[int(np.argmin(losses))]
        if min(losses) < best_loss:
            best, best_loss = counts, min(losses)
    shares: NDArray[np.float64] = best / best.sum()
    return shares


def _tensor(weights: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(weights).to(torch.float32)


class ValidationMeasure:
    """Evaluates outputs by the loss of the task, without class weights and label smoothing."""

    def __init__(self, train: TrainParams, spec: NetworkSpec, rows: PackedSplit) -> None:
        target, scale = kind_of(spec.task).target, spec.target_scale
        usual = {"loss": "auto", "huber_delta": None, "label_smoothing": 0.0}
        make = target.load_part("loss")
        self._loss = make(train.model_copy(update=usual), scale.std if scale else 1.0, None)
        self._targets = torch.from_numpy(rows.targets.astype(target.dtype))
        self.headline = target.headline

    def losses(self, answers: Tensor) -> Tensor:
        """Return the loss of each row, (N,), given outputs (N, K)."""
        found: Tensor = self._loss(answers, self._targets)
        return found

    def loss(self, answers: Tensor, mask: Tensor | None = None) -> float:
        """Return the mean loss of outputs (B, K) over the rows in `mask` (N,), or over all."""
        targets = self._targets if mask is None else self._targets[mask]
        return float(self._loss(answers, targets).double().mean())

    def metrics(self, answers: Tensor) -> dict[str, float]:
        """Return the mean loss and the headline metric of outputs (N, K), keyed by metric name."""
        score = float(self._loss.scores(answers, self._targets).mean())
        return {
            "val/loss": self.loss(answers),
            f"val/{self.headline}": self._loss.metric(score),
        }
