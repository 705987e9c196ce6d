"""The running means and variances of BatchNorm, which each process gathers from its own rows."""

from torch import distributed, nn


def average_running_statistics(network: nn.Module) -> None:
    """Give the running means and variances of BatchNorm the same value on every rank: their mean. What is equal already keeps every bit."""
    if (
        not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_world_size() == 1
    ):
        return
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            for statistics in (module.running_mean, module.running_var):
                assert statistics is not None
                total = statistics.double()
                distributed.all_reduce(total)
                statistics.copy_(total / distributed.get_world_size())
