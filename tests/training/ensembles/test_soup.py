"""Tests of model soups: means of weights that are never worse than the best member."""

import torch
from torch import Tensor, nn

from slipway.training.ensembles.soup import averaged, greedy_soup
from slipway.training.networks.networks import Network, build_network
from tests.training.conftest import spec

BATCHES = [torch.randint(0, 255, (16, 8, 8, 1), dtype=torch.uint8)]


def network(seed: int) -> Network:
    torch.manual_seed(seed)
    return build_network(spec()).eval()


def weight(found: Network) -> Tensor:
    """Return a single weight of the network."""
    return next(found.parameters()).detach()


def test_the_weights_of_a_soup_are_the_mean_over_its_members() -> None:
    first, second = network(0), network(1)
    mean = averaged([first, second], BATCHES)
    assert torch.allclose(weight(mean), (weight(first) + weight(second)) / 2)
    assert not torch.equal(weight(mean), weight(first))


def test_a_soup_of_equal_members_has_exactly_their_weights() -> None:
    assert torch.equal(weight(averaged([network(0)] * 3, BATCHES)), weight(network(0)))


def test_a_soup_recomputes_the_statistics_of_batch_norm() -> None:
    mean = averaged([network(0), network(1)], BATCHES)
    layer = next(module for module in mean.modules() if isinstance(module, nn.BatchNorm2d))
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    with torch.inference_mode():
        mean(BATCHES[0])
    assert layer.running_mean is not None
    assert torch.allclose(layer.running_mean, seen[0].mean(dim=(0, 2, 3)), atol=1e-4)


def test_a_soup_leaves_out_a_member_that_raises_its_validation_loss() -> None:
    members = [network(seed) for seed in range(3)]
    soup, kept = greedy_soup(members, [0.3, 0.1, 0.2], lambda found: 0.5, BATCHES)
    assert kept == [1]
    assert soup is members[1]


def test_a_soup_includes_members_that_do_not_raise_its_validation_loss() -> None:
    members = [network(seed) for seed in range(3)]
    soup, kept = greedy_soup(members, [0.3, 0.1, 0.2], lambda found: 0.1, BATCHES)
    assert kept == [1, 2, 0]
    expected = torch.stack([weight(member) for member in members]).mean(dim=0)
    assert torch.allclose(weight(soup), expected, atol=1e-6)
