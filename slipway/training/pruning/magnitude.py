"""Magnitude pruning: sets the smallest weights of all layers to zero.

Nothing that runs a dense graph is faster for it; the file compresses better.
"""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from slipway.training.networks.networks import Network
from slipway.training.recipe.optimizers import decays


def smallest_masked(network: Network, share: float) -> dict[str, Tensor]:
    """By weight, bool of its shape: False for `share` of all weights of layers, those nearest to zero.

    After Han et al. 2015, "Learning both weights and connections", with one bound for all layers.
    """
    weights = {
        name: value.detach().cpu()
        for name, value in network.named_parameters()
        if decays(name, value)
    }
    sizes = torch.cat([value.abs().flatten() for value in weights.values()])
    mask = torch.ones(len(sizes), dtype=torch.bool)
    mask[torch.argsort(sizes, stable=True)[: round(share * len(sizes))]] = False
    parts = torch.split(mask, [value.numel() for value in weights.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(weights.items(), parts, strict=True)
    }


class KeepZeros(pl.Callback):
    """Sets the masked weights to zero, before the first step and after each."""

    def __init__(self, network: nn.Module, masks: Mapping[str, Tensor]) -> None:
        self._weights = {name: value for name, value in network.named_parameters() if name in masks}
        self._masks = dict(masks)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._masks = {
            name: mask.to(self._weights[name].device) for name, mask in self._masks.items()
        }
        self.apply()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Now."""
        for name, mask in self._masks.items():
            self._weights[name].mul_(mask)
