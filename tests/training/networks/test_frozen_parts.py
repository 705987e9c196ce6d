"""Tests of the parts of a network, and of the epochs in which they are frozen."""

from typing import Any

import pytest
import torch
from torch import nn

from slipway.system.errors import ParamsError
from slipway.training.networks.frozen_parts import FreezeCallback, num_frozen, parts_of
from slipway.training.networks.networks import Network, build_network
from slipway.training.recipe.optimizers import optimizer_and_schedule
from tests.project_params import PROJECT
from tests.training.conftest import CONTRACT, spec

SETTINGS = PROJECT.train.model_copy(
    update={
        "freeze_epochs": 2,
        "unfreeze_epochs": 2,
        "warmup_epochs": 0.0,
        "schedule": "constant",
        "epochs": 10,
    }
)
NETWORK = "timm/resnet10t"


def _network(name: str = NETWORK, **arguments: Any) -> Network:
    torch.manual_seed(0)
    return build_network(
        spec(name=name, arguments=arguments, input=CONTRACT.model_copy(update={"size_px": 32}))
    )


def _stages(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize(
    ("freeze", "unfreeze", "expected"),
    [
        (0, 0, [0, 0, 0, 0]),
        (2, 0, [4, 4, 0, 0]),
        (1, 2, [4, 3, 1, 0, 0]),
        (1, 4, [4, 3, 2, 1, 0, 0]),
        (4, 0, [4, 4, 4, 4]),
    ],
)
def test_parts_of_a_network_unfreeze_from_the_last_to_the_first(
    freeze: int, unfreeze: int, expected: list[int]
) -> None:
    params = SETTINGS.model_copy(update={"freeze_epochs": freeze, "unfreeze_epochs": unfreeze})
    assert [num_frozen(epoch, 5, params) for epoch in range(len(expected))] == expected


def test_the_parts_of_a_timm_network_are_its_stages_and_its_head() -> None:
    network = _network()
    parts = parts_of(network)
    assert [_stages(part) for part in parts] == [
        {"conv1", "bn1"},
        {"layer1"},
        {"layer2"},
        {"layer3"},
        {"layer4"},
        {"fc"},
    ]
    assert sorted(name for part in parts for name in part) == sorted(
        name for name, _ in network.named_parameters()
    )


def test_a_network_without_known_parts_cannot_be_frozen() -> None:
    with pytest.raises(ParamsError, match="does not define the parts of 'small_resnet'"):
        parts_of(build_network(spec()))


@pytest.mark.process
def test_frozen_parts_keep_weights_and_statistics_and_unfrozen_parts_learn() -> None:
    network = _network()
    freezing, images = (
        FreezeCallback(network, SETTINGS),
        torch.randint(0, 256, (8, 32, 32, 1), dtype=torch.uint8),
    )
    schedule: Any = optimizer_and_schedule(network, SETTINGS, steps_per_epoch=3)
    changed = []
    for epoch in range(5):
        network.train()
        freezing.apply(epoch)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        for _ in range(3):
            schedule["optimizer"].zero_grad()
            network(images).square().sum().backward()
            schedule["optimizer"].step()
            schedule["lr_scheduler"]["scheduler"].step()
        changed.append(
            _stages(
                [
                    name
                    for name, value in network.state_dict().items()
                    if not torch.equal(value, before[name])
                ]
            )
        )
    assert changed[0] == changed[1] == {"fc"}
    assert changed[2] == {"fc", "layer4"}
    assert changed[3] == {"fc", "layer4", "layer3", "layer2"}
    assert changed[4] == {"fc", "layer4", "layer3", "layer2", "layer1", "conv1", "bn1"}


def test_frozen_parts_compute_as_in_evaluation_and_unfrozen_parts_as_in_training() -> None:
    network = _network(drop_path_rate=0.5, zero_init_last=False)
    freezing = FreezeCallback(network, SETTINGS)
    freezing.apply(0)
    assert not network.get_submodule("backbone.layer4").training
    assert network.training
    images = torch.randint(0, 256, (8, 32, 32, 1), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(network(images), network(images))
        freezing.apply(4)
        assert not torch.equal(network(images), network(images))
    assert all(module.training for module in network.modules())


def test_a_training_resumed_within_an_epoch_freezes_the_same_parts() -> None:
    through, resumed = _network(), _network()
    freezing = FreezeCallback(through, SETTINGS)
    for epoch in range(3):
        freezing.apply(epoch)
    FreezeCallback(resumed, SETTINGS).apply(2)
    for one, other in zip(through.modules(), resumed.modules(), strict=True):
        assert not isinstance(one, nn.BatchNorm2d) or one.training == other.training
    assert [value.requires_grad for value in through.parameters()] == [
        value.requires_grad for value in resumed.parameters()
    ]


def test_the_parts_of_a_vision_transformer_are_its_blocks() -> None:
    parts = parts_of(_network("timm/vit_tiny_patch16_224", img_size=32, depth=3))
    assert len(parts) == 5
    assert _stages(parts[-1]) == {"head"}
