"""Tests of the network for small images: the blocks that training skips at random."""

import torch
from timm.layers.drop import DropPath

from slipway.config.network_arguments import SmallResnetArguments
from slipway.training.networks.image_networks import SmallResnet

ARGUMENTS = {"width": 16, "blocks": [1, 3], "dropout": 0.0, "normalisation": "group"}


def _network(stochastic_depth: float) -> SmallResnet:
    torch.manual_seed(0)
    network = SmallResnet(
        SmallResnetArguments.model_validate({**ARGUMENTS, "stochastic_depth": stochastic_depth}),
        1,
        2,
    )
    for name, parameter in network.named_parameters():
        if name.endswith("norm2.weight"):
            torch.nn.init.ones_(parameter)  # a block begins as the identity, skipped or not
    return network


def test_stochastic_depth_skips_later_blocks_more_often() -> None:
    probabilities = [
        float(skip.drop_prob) for skip in _network(0.4).modules() if isinstance(skip, DropPath)
    ]
    assert torch.allclose(torch.tensor(probabilities), torch.tensor([0.1, 0.2, 0.3, 0.4]))


def test_stochastic_depth_skips_blocks_per_row_and_only_in_training() -> None:
    images, network, plain = (
        torch.randn(1, 1, 8, 8).expand(64, -1, -1, -1),
        _network(0.5),
        _network(0.0),
    )
    assert len(torch.unique(network(images)[:, 0])) > 2
    assert len(torch.unique(plain(images)[:, 0].round(decimals=4))) == 1
    assert torch.equal(network.eval()(images), plain.eval()(images))
