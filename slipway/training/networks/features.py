"""What a network makes of a row: the numbers that tell ordinary rows from strangers.

For images what the last layer takes, which any network of torch has, whoever wrote it; a layer is a module with a weight matrix of its own.
For tables the columns themselves: a network cuts numbers off at the range of the training rows, so that behind its encoding what is far
outside looks like the edge (bench/results/outlier_scores.md).
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from slipway.training.networks.tabm import RowEncoding

_MATRIX = 2  # dimensions of a weight, at least; the weights of a normalisation have one


def last_layer(network: nn.Module, example: Tensor) -> str:
    """The dotted name of the layer that is called last on `example` (1, ...); "" for the network itself where it has none inside."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
        for name, module in network.named_modules()
        if name and any(weight.ndim >= _MATRIX for weight in module.parameters(recurse=False))
    ]
    with torch.no_grad():
        network(example)
    for hook in hooks:
        hook.remove()
    return called[-1] if called else ""


def telling_layer(network: nn.Module, example: Tensor) -> str:
    """The dotted name of the module whose input tells strangers: the encoding of a table's rows, else the last layer."""
    encodings = [
        name for name, module in network.named_modules() if isinstance(module, RowEncoding)
    ]
    return encodings[0] if encodings else last_layer(network, example)


def answer_and_features(network: nn.Module, layer: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, ...) -> what the network answers, and (B, D) float32 what `layer` took, as the mean over places or submodels.

    Of a table's encoding: the numbers as they are, and a slot for each category.
    """
    taken: list[Tensor] = []
    module = network.get_submodule(layer)
    if isinstance(module, RowEncoding):
        return network(rows), torch.cat(
            [torch.index_select(rows, 1, module.embedded), module(rows)[2]], dim=1
        )
    with module.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0])):
        answer: Tensor = network(rows)
    found = taken[-1].to(torch.float32)
    if isinstance(module, _ConvNd):
        return answer, found.flatten(2).mean(dim=2)  # (B, C, H, W) -> (B, C)
    return answer, found.flatten(1, -2).mean(
        dim=1
    ) if found.ndim > _MATRIX else found  # (B, ..., D) -> (B, D)
