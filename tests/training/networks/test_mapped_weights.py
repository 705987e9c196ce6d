"""Weights that are built in a file have the same bits, need little memory, and leave no file."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipway.system.errors import UnavailableError
from slipway.system.memory import status_bytes
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import Network, build_network
from tests.training.conftest import spec
from tests.training.networks.test_text_networks import network as text_network

pytestmark = pytest.mark.unit


def image_network() -> Network:
    torch.manual_seed(1)
    return build_network(spec())


def transformer() -> Network:
    return text_network("small_transformer")


@pytest.mark.parametrize("build", [image_network, transformer])
def test_weights_mapped_from_a_file_equal_those_in_memory_bit_for_bit(
    tmp_path: Path, build: Any
) -> None:
    with MappedWeights(tmp_path) as mapped:
        found = build()
    expected = build()
    assert all(map(mapped._is_mapped, found.parameters()))
    assert not any(map(mapped._is_mapped, expected.parameters()))
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_released_pages_leave_memory_while_mapped_weights_are_drawn_again(tmp_path: Path) -> None:
    before = status_bytes("VmRSS")
    with MappedWeights(tmp_path):
        weights = nn.ParameterList(torch.empty(4096, 2048) for _ in range(12))
        resident = 0
        for weight in weights:  # 403 MB, as a network does that draws its weights at the end
            weight.detach().fill_(1.0)
            resident = max(resident, status_bytes("VmRSS"))
    assert resident - before < 200e6
    assert all(weight[0, 0].item() == 1.0 for weight in weights)


def test_modules_that_share_a_weight_still_share_it_after_mapping(tmp_path: Path) -> None:
    with MappedWeights(tmp_path):
        first = nn.Linear(4, 4)
        second = nn.Linear(4, 4)
        second.weight = first.weight
    assert second.weight is first.weight


def test_mapping_weights_to_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with (
        pytest.raises(UnavailableError, match=r"initial weights need .* its disk is full"),
        MappedWeights(tmp_path),
    ):
        nn.Linear(4, 4)
