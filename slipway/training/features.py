"""What the last layer of a network takes: the numbers that tell ordinary rows from strangers.

Any network of torch has them, whoever wrote it; none has to offer a method. A layer is a module with a weight matrix of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

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


def answer_and_features(network: nn.Module, layer: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, ...) -> what the network answers, and (B, D) float32 what `layer` took, as the mean over places or submodels."""
    taken: list[Tensor] = []
    module = network.get_submodule(layer)
    with module.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0])):
        answer: Tensor = network(rows)
    found = taken[-1].to(torch.float32)
    if isinstance(module, _ConvNd):
        return answer, found.flatten(2).mean(dim=2)  # (B, C, H, W) -> (B, C)
    return answer, found.flatten(1, -2).mean(dim=1) if found.ndim > _MATRIX else found  # (B, ..., D) -> (B, D)
