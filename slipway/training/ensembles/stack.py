"""Stacking (Wolpert 1992): a linear model of the members' outputs, fitted out of fold.

Each member's output for a row comes from a training without the row's fold. If it came from a
training with the row, the member that memorises most would get the largest weight.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import TargetScale
from slipway.system.errors import TrainingError
from slipway.training.ensembles.weights import ChosenWeights

_PULL = 1e-3  # strength of the pull towards equal weights
_STEPS = 200
_LARGEST_Z = 5.0  # standard errors by which a loss out of fold may be below that of other rows


def stack_folds(keys: NDArray[np.uint64], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row, (N,) in [0, num_folds), drawn from the row's key and `seed`."""
    return (uniform(seed, 0, keys, "stack fold") * num_folds).astype(np.int64)


def stacked_weights(
    answers: Tensor, losses: Callable[[Tensor], Tensor], scale: TargetScale | None
) -> ChosenWeights:
    """Fit the weights and the bias of a stack to members' outputs (N, members, K).

    Args:
        losses: maps combined outputs (N, K) to losses (N,), whose mean is minimised.
        scale: mean and deviation of a numeric target; None for classes.
    """
    mean, std = (scale.mean, scale.std) if scale else (0.0, 1.0)
    inputs = (answers.double() - mean) / std
    num_members = inputs.shape[1]
    weights = torch.full((num_members,), 1 / num_members, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(inputs.shape[2], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=_STEPS, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        combined = (inputs * weights[:, None]).sum(dim=1) + bias
        distance = ((weights - 1 / num_members) ** 2).sum()
        loss = losses(combined * std + mean).double().mean() + _PULL * distance
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    found, constant = weights.detach(), bias.detach() * std + mean * (1 - weights.detach().sum())
    return ChosenWeights(found.tolist(), bias=constant.tolist())


def refuse_leak(name: str, out_of_fold: Tensor, unseen: Tensor) -> None:
    """Raise TrainingError if the out-of-fold losses are far below those of unseen rows.

    The held-out rows were then not unseen: other folds hold copies of them, or rows of the same
    group. `out_of_fold` is (N,), `unseen` (M,).
    """
    samples = [losses.double() for losses in (out_of_fold, unseen)]
    error = sum(float(losses.var()) / len(losses) for losses in samples) ** 0.5
    known, new = (float(losses.mean()) for losses in samples)
    if new - known > _LARGEST_Z * max(error, 1e-12):
        raise TrainingError(
            f"the member {name} has the loss {known:.4g} out of fold, far below {new:.4g} on the "
            "validation rows, expected about the same: rows of one fold are known to the others, "
            "as copies or as parts of one group. Refuse near duplicates in clean.rules, or set "
            "ensemble.method to greedy."
        )
