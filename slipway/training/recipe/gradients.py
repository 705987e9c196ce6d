"""Gradients and weights of a running trainer, also where DeepSpeed has cut them into shards.

Between backward and optimizer step fp16 losses are unscaled already, but for DeepSpeed, whose engine does so later and tells the norm
of the gradient afterwards; elsewhere the guard knows it.
"""

from collections.abc import Iterator

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn


def engine_norm(trainer: pl.Trainer) -> float | None:
    """Before clipping, of the last step that DeepSpeed made; None without DeepSpeed, and where it skipped the step."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return None
    norm = trainer.strategy.deepspeed_engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def loss_scale(trainer: pl.Trainer) -> float | None:
    """What an fp16 loss is multiplied with; None in other precisions."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        engine = trainer.strategy.deepspeed_engine
        return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None
    plugin = trainer.strategy.precision_plugin
    return (
        float(plugin.scaler.get_scale())
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None
        else None
    )


def whole_tensors(
    trainer: pl.Trainer, network: nn.Module
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, weight, gradient) of each parameter between backward and optimizer step, on all ranks together."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        yield from (
            (name, parameter.detach(), parameter.grad)
            for name, parameter in network.named_parameters()
        )
        return
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    scale = loss_scale(trainer) or 1.0
    for name, parameter in network.named_parameters():
        gradient = safe_get_full_grad(parameter)
        yield (
            name,
            safe_get_full_fp32_param(parameter),
            None if gradient is None else torch.as_tensor(gradient).float() / scale,
        )
