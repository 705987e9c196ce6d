"""Pretrained networks whose parts are frozen at first: the head learns alone, then the other parts join from the last to the first.

Which parts are frozen is a function of the epoch alone. A frozen part gets no gradient, its learning rate is 0, and its
BatchNorm keeps its running statistics and uses them. Dropout and the like go on.
"""

from typing import Any

import pytorch_lightning as pl
from torch import nn

from slipway.config.sections import TrainParams
from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network

_BACKBONE = "backbone."


def num_frozen(epoch: int, num_parts: int, params: TrainParams) -> int:
    """How many of the parts, from the first on, are frozen in `epoch`, counted from 0. The last part is the head."""
    others, late = num_parts - 1, epoch - params.freeze_epochs
    if late < 0:
        return others
    if late >= params.unfreeze_epochs:
        return 0
    return others - min(others, 1 + late * others // params.unfreeze_epochs)


def parts_of(network: Network) -> list[list[str]]:
    """The names of all parameters in parts, from the input to the head, as timm divides the network into stages."""
    from timm.models import group_parameters  # takes seconds to import, which few need

    backbone: Any = network.backbone
    if not hasattr(backbone, "group_matcher") or not hasattr(backbone, "get_classifier"):
        raise ParamsError(
            f"train.freeze_epochs is set, but timm does not say what the parts of {network.spec.name!r} are. Set it to 0."
        )
    heads = backbone.get_classifier()
    of_head = {
        id(parameter)
        for head in (heads if isinstance(heads, tuple) else (heads,))
        for parameter in head.parameters()
    }
    head = [name for name, parameter in backbone.named_parameters() if id(parameter) in of_head]
    groups = group_parameters(backbone, backbone.group_matcher(coarse=True))
    bodies = [[name for name in groups[index] if name not in head] for index in sorted(groups)]
    return [[_BACKBONE + name for name in part] for part in [*filter(None, bodies), head]]


class Freezing(pl.Callback):
    """Freezes and frees the parts of a network as its epochs begin."""

    def __init__(self, network: Network, params: TrainParams) -> None:
        self._network, self._params = network, params
        self._parts = parts_of(network)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.apply(trainer.current_epoch)  # for a training that is resumed within an epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.apply(trainer.current_epoch)

    def apply(self, epoch: int) -> None:
        """Bring every part into the state that it has in `epoch`, counted from 0."""
        number = num_frozen(epoch, len(self._parts), self._params)
        frozen = {name for part in self._parts[:number] for name in part}
        for name, parameter in self._network.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for name, module in self._network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(f"{name}.weight" not in frozen)
