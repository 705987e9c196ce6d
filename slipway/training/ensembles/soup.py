"""Model soups: the mean of the weights of several trainings from one initialisation.

It is the greedy soup of Wortsman et al. (2022, "Model soups"): members are tried from the best to
the worst, and one stays if the mean is then no worse on the validation rows. So the soup is never
worse there than its best member, and costs no more than one model.
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
    """Return the soup, and the places of its members, from the best on.

    Args:
        losses: of the networks on the validation rows.
        measure: returns this loss of another network.
        batches: training rows, over which the statistics of BatchNorm are taken again.
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
    """Return a network with the mean of the weights, computed in float64."""
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
