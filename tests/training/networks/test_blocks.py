"""Tests of finding the blocks of a network, and of networks that cannot be divided by blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipway.system.errors import ParamsError
from slipway.training.networks.blocks import check_blocks, parallel_blocks
from slipway.training.networks.image_networks import ImageNetwork
from slipway.training.networks.networks import Network, build_network
from tests.training.conftest import ARGUMENTS, CONTRACT, spec


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.inner(rows)
        return answer


class _Layers(nn.Module):
    """A network of 64 pixels, two layers of one class, and two logits."""

    layers: Any  # mypy sees only modules in a list

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(64, 4)
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.entry(images.flatten(1))
        for layer in self.layers:
            rows = layer(rows)
        answer: Tensor = self.head(rows)
        return answer


class _Named(_Layers):
    def parallel_blocks(self) -> list[nn.Module]:
        return list(self.layers)


class _Uncalled(_Named):
    def forward(self, images: Tensor) -> Tensor:
        rows = self.layers[0](self.entry(images.flatten(1)))
        answer: Tensor = self.head(rows @ self.layers[1].inner.weight)
        return answer


def _network(backbone: nn.Module) -> Network:
    return ImageNetwork(backbone, spec())


def _class_names(network: Network) -> list[str]:
    return [type(block).__name__ for block in parallel_blocks(network)]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("small_resnet", {**ARGUMENTS, "blocks": [2, 1]}, ["_Block"] * 3),
        ("timm/resnet18", {}, ["BasicBlock"] * 8),
        ("timm/test_vit", {}, ["Block"] * 6),
    ],
)
def test_the_blocks_of_a_network_are_the_repeated_layers_that_hold_most_weights(
    name: str, arguments: dict[str, Any], expected: list[str]
) -> None:
    size = {"input": CONTRACT.model_copy(update={"size_px": 160})} if "vit" in name else {}
    network = build_network(spec(name=name, arguments=arguments, **size))
    check_blocks(network, "fsdp")
    assert _class_names(network) == expected


def test_a_network_without_repeated_layers_is_a_single_block() -> None:
    assert parallel_blocks(_network(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))) == []


def test_a_backbone_may_name_its_blocks() -> None:
    backbone = _Named()
    assert parallel_blocks(_network(_Layers())) == []  # they hold less than half of the weights
    assert parallel_blocks(_network(backbone)) == list(backbone.layers)


def _scalar() -> nn.Module:
    backbone = _Layers()
    backbone.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    return backbone


def _shared_by_blocks() -> nn.Module:
    backbone = _Named()
    backbone.layers[1].inner.weight = backbone.layers[0].inner.weight
    return backbone


@pytest.mark.parametrize(
    ("backbone", "text"),
    [
        (_scalar(), r"backbone\.temperature of train\.network 'small_resnet' has none. Give the "),
        (_shared_by_blocks(), r"blocks backbone\.layers\.0 and backbone\.layers\.1 share a weight"),
        (_Uncalled(), r"the forward pass does not call backbone\.layers\.1 in train.network"),
    ],
)
def test_networks_that_cannot_be_divided_by_blocks_are_refused(
    backbone: nn.Module, text: str
) -> None:
    with pytest.raises(ParamsError, match=text):
        check_blocks(_network(backbone), "fsdp")


def test_a_block_that_shares_a_weight_with_the_rest_of_the_network_is_refused() -> None:
    backbone = _Named()
    backbone.entry = nn.Linear(64, 4)
    backbone.tail = nn.Linear(4, 4)
    backbone.tail.weight = backbone.layers[0].inner.weight
    with pytest.raises(ParamsError, match=r"layers\.0 and the module backbone\.tail share a"):
        check_blocks(_network(backbone), "fsdp")
