"""The optimizer and the schedule of its learning rate."""

import math

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from slipway.params import TrainParams


def optimizer_and_schedule(network: nn.Module, params: TrainParams, steps_per_epoch: int) -> OptimizerLRSchedulerConfig:
    """AdamW, whose decay leaves norms, scales and biases alone, under a linear warm-up and a cosine."""
    named = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if decays(name, parameter)], "weight_decay": params.weight_decay},
        {"params": [parameter for name, parameter in named if not decays(name, parameter)], "weight_decay": 0.0},
    ]
    # What is offloaded is updated on the CPU, where torch's fused kernel takes a tenth of the time of its plain one.
    fused = True if params.offload != "none" else None
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=params.learning_rate, fused=fused)
    warmup, total = round(params.warmup_epochs * steps_per_epoch), params.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, warmup, total))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls a parameter towards 0. Of an ensemble, scales (`r`, `s`) and biases are matrices, too."""
    return parameter.ndim > 1 and name.rpartition(".")[2] not in ("bias", "r", "s")


def learning_rate_share(step: int, num_warmup_steps: int, num_steps: int) -> float:
    """The share of the peak in (0, 1] for optimizer step `step`, counted from 0: linear up, then half a cosine down.

    It has no hard end: past `num_steps` it stays at its smallest.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = min(step - num_warmup_steps, num_steps - num_warmup_steps - 1) / max(1, num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
