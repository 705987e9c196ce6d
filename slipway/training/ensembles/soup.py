"""Model soups: the mean of the weights of several trainings from one initialisation.

This is the greedy soup of Wortsman et al. (2022, "Model soups"). Members are tried from the best to
the worst; a member is added if the validation loss of the mean does not rise. So the soup is never
worse on the validation rows than its best member, and it is as fast as one model.
"""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn

from slipway.training.networks.networks import Network


def greedy_soup(
    networks: Sequence[Network],
    losses: Sequence[float],
    measure: Callable[[Network], float],
    batches: Iterable[Tensor],
) -> tuple[Network, list[int]]:
    """Return the averaged network, and the indices of the networks in it, the best one first.

    Args:
        losses: validation loss of each network.
        measure: computes the validation loss of a network.
        batches: training rows, used to recompute the statistics of BatchNorm.
    """
    best_first = sorted(range(len(networks)), key=lambda place: losses[place])
    kept = best_first[:1]
    soup, loss = networks[kept[0]], losses[kept[0]]
    for place in best_first[1:]:
        tried = averaged([networks[other] for other in [*kept, place]], batches)
        if (found := measure(tried)) <= loss:
            soup, loss, kept = tried, found, [*kept, place]
    return soup.eval(), kept


def averaged(networks: Sequence[Network], batches: Iterable[Tensor]) -> Network:
    """Return a network whose weights are the mean of those of `networks`, computed in float64.

    `batches` are training rows, used to recompute the statistics of BatchNorm.
    """
    mean = copy.deepcopy(networks[0])
    states = [network.state_dict() for network in networks]
    weights = {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(value.dtype)
        for name, value in states[0].items()
        if value.is_floating_point()
    }
    mean.load_state_dict({**states[0], **weights})
    update_bn(batches, mean)
    return mean.eval()
