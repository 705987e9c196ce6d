"""Features of a row, from which the OOD score is computed.

For images, features are the inputs of the last layer with a weight matrix, which any network has.
For tables, they are the columns themselves: the encoding clips numbers to the range of the training
rows, so after it a far outlier looks like the edge of the range (bench/results/ood_scores.md).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

_MATRIX = 2  # dimensions of a weight, at least; the weights of a normalisation have one


class FeatureEncoding(nn.Module, ABC):
    """Base class of row encodings that compute the features of their rows themselves."""

    @abstractmethod
    def features(self, rows: Tensor) -> Tensor:
        """Map rows (B, ...) to features (B, D) float32."""


def last_layer(network: nn.Module, example: Tensor) -> str:
    """Return the dotted name of the last layer that a forward pass of `example` (1, ...) calls.

    Returns "", which stands for the network itself, if it has no layers.
    """
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


def feature_layer(network: nn.Module, example: Tensor) -> str:
    """Return the name of the module that yields the features: an encoding, else the last layer."""
    modules = network.named_modules()
    encodings = [name for name, module in modules if isinstance(module, FeatureEncoding)]
    return encodings[0] if encodings else last_layer(network, example)


def answer_and_features(network: nn.Module, layer: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs (B, K) and features (B, D) float32 of a forward pass of rows (B, ...).

    Features are averaged over positions. Those of a table are its numbers and one-hot categories.
    """
    module = network.get_submodule(layer)
    if isinstance(module, FeatureEncoding):
        return network(rows), module.features(rows)
    inputs: list[Tensor] = []
    with module.register_forward_pre_hook(lambda _module, taken: inputs.append(taken[0])):
        answer: Tensor = network(rows)
    features = inputs[-1].to(torch.float32)
    if isinstance(module, _ConvNd):
        features = features.flatten(2).mean(dim=2)  # (B, C, H, W) -> (B, C)
    elif features.ndim > _MATRIX:
        features = features.flatten(1, -2).mean(dim=1)  # (B, ..., D) -> (B, D)
    return answer, features
