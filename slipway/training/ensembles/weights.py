"""Weights of an ensemble's members, chosen on validation rows.

Greedy weights follow the ensemble selection of Caruana et al. (2004, "Ensemble Selection from
Libraries of Models"): repeatedly add the member that lowers the loss most, with replacement. This
overfits if there are few rows, so it is repeated on random halves of the rows, and the weights are
averaged. The other halves estimate the loss of such weights on unseen rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.data.engine.randomness import uniform

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
