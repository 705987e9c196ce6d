"""The optimizer and the schedule of its learning rate, a function of the number of the step alone."""

import math
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from slipway.config.sections import TrainParams
from slipway.training.networks.freezing import num_frozen, parts_of
from slipway.training.networks.networks import Network

Share = Callable[
    [int], float
]  # of the learning rate's peak, in [0, 1], for optimizer step `step`, counted from 0
# Where one_cycle begins, and how many times smaller it ends: those of torch's OneCycleLR.
_ONE_CYCLE_START, _ONE_CYCLE_END = 1 / 25, 1e-4


def optimizer_and_schedule(
    network: Network, params: TrainParams, steps_per_epoch: int
) -> OptimizerLRSchedulerConfig:
    """What `params` ask for. Decay leaves norms, scales and biases alone, and the learning rate of a frozen part is 0."""
    parts = (
        parts_of(network)
        if params.freeze_epochs
        else [[name for name, _ in network.named_parameters()]]
    )
    share, named = learning_rate_share(params, steps_per_epoch), dict(network.named_parameters())
    groups: list[dict[str, Any]] = []
    shares: list[Share] = []
    for index, part in enumerate(parts):
        for decay in (True, False):
            chosen = [
                named[name]
                for name in part
                if decays(name, named[name]) is decay and named[name].requires_grad
            ]
            if chosen:
                groups.append(
                    {"params": chosen, "weight_decay": params.weight_decay if decay else 0.0}
                )
                shares.append(_share_of_part(share, index, len(parts), params, steps_per_epoch))
    optimizer = _optimizer(groups, params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shares)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def optimizer_names(optimizer: Any, module: nn.Module) -> list[str]:
    """The names of the weights in the order in which the optimizer counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls a parameter towards 0. Of an ensemble, scales (`r`, `s`) and biases are matrices, too."""
    return parameter.ndim > 1 and name.rpartition(".")[2] not in ("bias", "r", "s")


def learning_rate_share(params: TrainParams, steps_per_epoch: int) -> Share:
    """The schedule that `params` ask for. It has no hard end: past the last step it stays as it is there."""
    warmup, total = round(params.warmup_epochs * steps_per_epoch), params.epochs * steps_per_epoch
    if params.schedule == "one_cycle":
        return lambda step: _one_cycle(step, warmup, total)
    if params.schedule == "cosine":
        return lambda step: _rise(step, warmup) or _cosine(step - warmup, total - warmup)
    if params.schedule == "step":
        every, factor = (
            (params.step_epochs or params.epochs) * steps_per_epoch,
            params.step_factor or 1.0,
        )
        return lambda step: _rise(step, warmup) or factor ** (min(step, total - 1) // every)
    return lambda step: _rise(step, warmup) or 1.0


def _share_of_part(
    share: Share, index: int, num_parts: int, params: TrainParams, steps_per_epoch: int
) -> Share:
    return lambda step: (
        share(step) if index >= num_frozen(step // steps_per_epoch, num_parts, params) else 0.0
    )


def _optimizer(groups: list[dict[str, Any]], params: TrainParams) -> torch.optim.Optimizer:
    # What is offloaded is updated on the CPU, where torch's fused kernel takes a tenth of the time of its plain one.
    fused = True if params.offload else None
    if params.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=params.learning_rate, fused=fused)
    return torch.optim.SGD(
        groups,
        lr=params.learning_rate,
        momentum=params.momentum or 0.0,
        nesterov=params.nesterov,
        fused=fused,
    )


def _rise(step: int, num_steps: int) -> float:
    """In (0, 1], linear; 0 past `num_steps`."""
    return (step + 1) / num_steps if step < num_steps else 0.0


def _cosine(step: int, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step, num_steps - 1) / max(1, num_steps)))


def _one_cycle(step: int, num_rising: int, num_steps: int) -> float:
    """Smith and Topin 2018, "Super-convergence", both ways in half a cosine as torch has it; the momentum is left alone."""
    top = max(1, num_rising - 1)
    if step <= top:
        return _between(_ONE_CYCLE_START, 1.0, step / top)
    return _between(
        1.0, _ONE_CYCLE_START * _ONE_CYCLE_END, min(1.0, (step - top) / max(1, num_steps - 1 - top))
    )


def _between(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))
