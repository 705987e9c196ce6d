"""Weights that ZeRO-3 has divided are merged when they are read, a few at a time."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipway.system.errors import TrainingError
from slipway.training.checkpoints.consolidation import load_weights
from slipway.training.networks.networks import build_network
from tests.training.conftest import spec


@dataclass
class _DividedWeight:
    """A weight in two parts, which `contiguous` merges; counts those that exist at a time."""

    whole: Tensor
    merged: "weakref.WeakSet[Tensor]"
    counts: list[int]

    def contiguous(self) -> Tensor:
        value = torch.cat(self.whole.reshape(-1).tensor_split(2)).view(self.whole.shape)
        self.merged.add(value)
        self.counts.append(len(self.merged))
        return value


def test_a_network_loads_divided_weights_a_few_at_a_time() -> None:
    saved, network = build_network(spec()).state_dict(), build_network(spec())
    merged: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts: list[int] = []
    divided = {name: _DividedWeight(value, merged, counts) for name, value in saved.items()}
    load_weights(network, divided)
    loaded = network.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert max(counts) <= 8 < len(counts) == len(saved)


def test_weights_of_another_network_are_refused_by_name() -> None:
    network = build_network(spec())
    weights = dict(network.state_dict())
    del weights[next(iter(weights))]
    with pytest.raises(TrainingError, match="only in the network: backbone"):
        load_weights(network, weights)
