"""Gradual unfreezing of pretrained networks: the head learns first, then the rest part by part.

Parts unfreeze from the last to the first, as a function of the epoch. A frozen part has no
gradient, its learning rate is 0, and it computes as in evaluation: BatchNorm uses its running
statistics without updating them, and nothing is dropped. So it maps a row to the same numbers in
every epoch, which `frozen_features` computes only once if all parts but the head stay frozen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from slipway.config.training import TrainParams
from slipway.system.errors import ParamsError
from slipway.training.networks.encoders import EncoderBackbone
from slipway.training.networks.initialization import head_tensors
from slipway.training.networks.networks import Network

_BACKBONE = "backbone."
_CLOSE = 1e-5  # difference between numbers that counts as none


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
        self._network.train()
        for module in self._network.modules():
            weights = list(module.parameters())
            if weights and not any(weight.requires_grad for weight in weights):
                module.eval()  # with all layers in it


def freeze_body(network: Network, params: TrainParams) -> None:
    """Freeze all parts but the head before the optimizer is made, if they never join.

    The optimizer then has the weights of the head only, and so have DDP and ZeRO.
    """
    if params.freezes_body:
        head = set(parts_of(network)[-1])
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in head)


def frozen_weights(network: Network) -> dict[str, Tensor]:
    """Return all tensors of the network's state but those of its head, by name."""
    head = set(parts_of(network)[-1])
    return {name: value for name, value in network.state_dict().items() if name not in head}


class FrozenBody(NamedTuple):
    """A frozen body whose outputs can be stored: the name of its head, and their number."""

    head: str
    width: int


def probe_body(network: Network, params: TrainParams) -> FrozenBody | str:
    """Find the head of a network whose body `params` freeze, and run both on drawn rows.

    Returns a reason if the head alone would not be trained as in the whole network: it is not one
    linear layer, or what it gets depends on the draws of dropout.
    """
    weights = parts_of(network)[-1]
    name = weights[0].rpartition(".")[0]
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Linear) or len(weights) != len(list(layer.parameters())):
        return f"the head of {network.spec.name!r} is not one linear layer"
    contract = network.spec.input
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        highest = 256 if np.dtype(contract.dtype) == np.uint8 else 2
        dtype = torch.from_numpy(np.empty(0, contract.dtype)).dtype
        rows = torch.randint(0, highest, (2, *contract.shape)).to(dtype)
        FreezeCallback(network, params).apply(0)
        drawn = [_features(network, name, rows) for _ in range(2)]
        network.eval()
        features, answers = _features(network, name, rows), network(rows)
        is_answer = features.ndim == 2 and torch.allclose(
            answer_to_features(network, name)(features), answers, rtol=_CLOSE, atol=_CLOSE
        )
    network.train()
    if not is_answer:
        return f"the last layer of {network.spec.name!r} does not give its answer"
    if any(not torch.allclose(one, features, rtol=_CLOSE, atol=_CLOSE) for one in drawn):
        return "train.network_arguments drop values at random before the head"
    return FrozenBody(name, features.shape[1])


def answer_to_features(network: Network, head: str) -> Callable[[Tensor], Tensor]:
    """Return the function that maps features (B, D), the inputs of the head, to outputs (B, K)."""
    layer, dropout = network.get_submodule(head), _dropout_of_head(network) or nn.Identity()
    assert isinstance(layer, nn.Linear)
    # DeepSpeed has weights in half precision.
    return lambda features: network.to_target_unit(layer(dropout(features.to(layer.weight.dtype))))


def _dropout_of_head(network: Network) -> nn.Module | None:
    backbone = network.backbone
    return backbone.dropout if isinstance(backbone, EncoderBackbone) else None


def _features(network: Network, head: str, rows: Tensor) -> Tensor:
    """Return what the body gives to the head, (B, D), before the head's own dropout."""
    taken: list[Tensor] = []
    first = _dropout_of_head(network) or network.get_submodule(head)
    with first.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0])):
        network(rows)
    return taken[-1]
