"""Gradual unfreezing of pretrained networks: the head learns first, then the rest part by part.

Parts unfreeze from the last to the first, as a function of the epoch. A frozen part has no
gradient, its learning rate is 0, and its BatchNorm uses its running statistics without updating
them. Dropout and similar layers stay active.
"""

from typing import Any

import pytorch_lightning as pl
from torch import nn

from slipway.config.training import TrainParams
from slipway.system.errors import ParamsError
from slipway.training.networks.encoders import EncoderBackbone
from slipway.training.networks.initialization import head_tensors
from slipway.training.networks.networks import Network

_BACKBONE = "backbone."


def num_frozen(epoch: int, num_parts: int, params: TrainParams) -> int:
    """Return the number of parts that are frozen in `epoch` (from 0). The head is the last part."""
    body_parts, unfreezing_epoch = num_parts - 1, epoch - params.freeze_epochs
    if unfreezing_epoch < 0:
        return body_parts
    if unfreezing_epoch >= params.unfreeze_epochs:
        return 0
    unfrozen = 1 + unfreezing_epoch * body_parts // params.unfreeze_epochs
    return body_parts - min(body_parts, unfrozen)


def parts_of(network: Network) -> list[list[str]]:
    """Return the names of all parameters, divided into parts from the input to the head.

    The parts are timm's stages or an encoder's layers. Raises ParamsError if timm defines no
    stages.
    """
    if isinstance(network.backbone, EncoderBackbone):
        return [[_BACKBONE + name for name in part] for part in network.backbone.named_parts()]
    from timm.models import group_parameters  # takes seconds to import, and few need it

    backbone: Any = network.backbone
    if not hasattr(backbone, "group_matcher") or not hasattr(backbone, "get_classifier"):
        raise ParamsError(
            "train.freeze_epochs is set, but timm does not define the parts of "
            f"{network.spec.name!r}. Set it to 0."
        )
    in_head = head_tensors(backbone)
    head = [name for name, parameter in backbone.named_parameters() if id(parameter) in in_head]
    groups = group_parameters(backbone, backbone.group_matcher(coarse=True))
    bodies = [[name for name in groups[index] if name not in head] for index in sorted(groups)]
    return [[_BACKBONE + name for name in part] for part in [*filter(None, bodies), head]]


class FreezeCallback(pl.Callback):
    """Freezes and unfreezes the parts of a network at the start of each epoch."""

    def __init__(self, network: Network, params: TrainParams) -> None:
        self._network, self._params = network, params
        self._parts = parts_of(network)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.apply(trainer.current_epoch)  # needed if a training resumes within an epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.apply(trainer.current_epoch)

    def apply(self, epoch: int) -> None:
        """Freeze and unfreeze the parts as `epoch` (from 0) requires."""
        number = num_frozen(epoch, len(self._parts), self._params)
        frozen = {name for part in self._parts[:number] for name in part}
        for name, parameter in self._network.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for name, module in self._network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(f"{name}.weight" not in frozen)
