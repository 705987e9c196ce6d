"""The optimizer and its schedule: the learning rate as a function of the step number."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from slipway.config.training import TrainParams
from slipway.training.distributed.placement import Placement
from slipway.training.distributed.shards import by_division
from slipway.training.networks.frozen_parts import num_frozen, parts_of
from slipway.training.networks.networks import Network

# Factor in [0, 1] of the peak learning rate, by optimizer step, counted from 0.
Schedule = Callable[[int], float]
# Updates the weights in one kernel, all in the same few kernels, or one weight after the other.
Update = Literal["fused", "together", "singly"]
# Start and end of one_cycle, the end relative to the start: those of torch's OneCycleLR.
_ONE_CYCLE_START, _ONE_CYCLE_END = 1 / 25, 1e-4


def optimizer_and_schedule(
    network: Network, params: TrainParams, steps_per_epoch: int, *, fused: bool = False
) -> OptimizerLRSchedulerConfig:
    """Return the optimizer and its learning-rate schedule.

    Weight decay skips norms, scales and biases. The learning rate of a frozen part is 0. An
    encoder's `layer_decay` lowers the learning rate from each layer to the one before it. `fused`
    requests torch's fused kernel, as `train.offload` does.
    """
    named = dict(network.named_parameters())
    decay_of_parts = params.network_arguments.get("layer_decay", 1.0)
    are_apart = params.freeze_epochs or decay_of_parts != 1.0
    parts = parts_of(network) if are_apart else [list(named)]
    schedule = learning_rate_schedule(params, steps_per_epoch)
    groups: list[dict[str, Any]] = []
    schedules: list[Schedule] = []
    for index, part in enumerate(parts):
        trained = [name for name in part if named[name].requires_grad]
        scale = decay_of_parts ** (len(parts) - 1 - index)
        for decay in (True, False):
            chosen = [named[name] for name in trained if decays(name, named[name]) is decay]
            if chosen:
                weight_decay = params.weight_decay if decay else 0.0
                groups.append({"params": chosen, "weight_decay": weight_decay})
                schedules.append(
                    _part_schedule(schedule, index, len(parts), params, steps_per_epoch, scale)
                )
    # On the CPU, where offloaded weights are updated too, the fused kernel is ten times as fast.
    optimizer = _optimizer(groups, params, fused=True if fused or params.offload else None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fuses_optimizer(placement: Placement) -> bool:
    """Return True if torch's fused kernel can update the weights of this training.

    It unscales gradients itself, so with a loss scale scaled ones would be clipped. It cannot mix
    divided weights with whole ones. On the GPU torch's default is as fast.
    """
    keeps_whole = placement.strategy in ("single", "ddp")
    return keeps_whole and placement.accelerator == "cpu" and placement.precision != "16-mixed"


def update_of(placement: Placement) -> Update:
    """Return the way in which the optimizer updates the weights."""
    if fuses_optimizer(placement):
        return "fused"
    is_mixed = placement.model_parallel and placement.strategy in ("tensor_parallel", "fsdp")
    return "together" if placement.accelerator == "gpu" and not is_mixed else "singly"


def optimizer_names(optimizer: Any, module: nn.Module) -> list[str]:
    """Return the names of the weights in the order in which the optimizer numbers them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def decays(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay applies to the parameter `name`.

    The name decides as well as the shape, because an ensemble's scales (`r`, `s`) and biases are
    matrices too.
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in ("bias", "r", "s")


def learning_rate_schedule(params: TrainParams, steps_per_epoch: int) -> Schedule:
    """Return the schedule as a function of the step; it is constant after the last step."""
    warmup, total = round(params.warmup_epochs * steps_per_epoch), params.epochs * steps_per_epoch
    if params.schedule == "one_cycle":
        return lambda step: _one_cycle(step, warmup, total)
    if params.schedule == "cosine":
        return lambda step: _warmup(step, warmup) or _cosine(step - warmup, total - warmup)
    if params.schedule == "step":
        every = (params.step_epochs or params.epochs) * steps_per_epoch
        factor = params.step_factor or 1.0
        return lambda step: _warmup(step, warmup) or factor ** (min(step, total - 1) // every)
    return lambda step: _warmup(step, warmup) or 1.0


def _part_schedule(
    schedule: Schedule,
    index: int,
    num_parts: int,
    params: TrainParams,
    steps_per_epoch: int,
    scale: float,
) -> Schedule:
    def factor(step: int) -> float:
        is_frozen = index < num_frozen(step // steps_per_epoch, num_parts, params)
        return 0.0 if is_frozen else scale * schedule(step)

    return factor


def _optimizer(
    groups: list[dict[str, Any]], params: TrainParams, fused: bool | None
) -> torch.optim.Optimizer:
    # The kernels that update many weights at once, torch's default on a GPU, cannot mix weights
    # that are divided differently.
    is_mixed = any(len(by_division(group["params"])) > 1 for group in groups)
    foreach = False if is_mixed else None
    if params.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=params.learning_rate, fused=fused, foreach=foreach)
    return torch.optim.SGD(
        groups,
        lr=params.learning_rate,
        momentum=params.momentum or 0.0,
        nesterov=params.nesterov,
        fused=fused,
        foreach=foreach,
    )


def _warmup(step: int, num_steps: int) -> float:
    """Return the linear warm-up factor in (0, 1] for `step`; 0 from `num_steps` on."""
    return (step + 1) / num_steps if step < num_steps else 0.0


def _cosine(step: int, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step, num_steps - 1) / max(1, num_steps)))


def _one_cycle(step: int, num_rising: int, num_steps: int) -> float:
    """Return a factor that rises and then falls along half cosines, as torch's OneCycleLR does.

    Smith and Topin 2018, "Super-convergence". The momentum is not cycled.
    """
    top = max(1, num_rising - 1)
    if step <= top:
        return _interpolate(_ONE_CYCLE_START, 1.0, step / top)
    progress = min(1.0, (step - top) / max(1, num_steps - 1 - top))
    return _interpolate(1.0, _ONE_CYCLE_START * _ONE_CYCLE_END, progress)


def _interpolate(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))
