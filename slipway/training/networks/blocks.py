"""Finds the blocks of a network: the repeated layers that strategies divide over processes.

A backbone may define a method `parallel_blocks()` that returns them in the order of the forward
pass. Otherwise they are the modules of one class in lists or sequences (`nn.ModuleList`,
`nn.Sequential`): the most numerous class that holds at least half of all parameters.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network, example_rows

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def parallel_blocks(network: Network) -> list[nn.Module]:
    """Return the network's blocks in order; an empty list if the network is a single block."""
    backbone = network.backbone
    named = getattr(backbone, "parallel_blocks", None)
    if callable(named):
        return list(named())
    by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in _layers_in_containers(backbone):
        by_class[type(module)].append(module)
    half = _num_elements([backbone]) / 2
    large = [blocks for blocks in by_class.values() if _num_elements(blocks) >= half]
    return max(large, key=len, default=[])


def check_blocks(network: Network, strategy: str) -> None:
    """Raise a ParamsError if `strategy` cannot divide `network` by its blocks."""
    scalars = [name for name, value in network.named_parameters() if value.ndim == 0]
    if scalars:
        raise ParamsError(
            f"train.strategy is {strategy!r}, which divides weights along their first dimension, "
            f"but {', '.join(scalars)} of train.network {network.spec.name!r} "
            f"{'has' if len(scalars) == 1 else 'have'} none. Give the shape (1,), or use 'ddp'."
        )
    blocks = parallel_blocks(network)
    for problem in (_shared_weight(network, blocks), _uncalled_block(network, blocks)):
        if problem:
            raise ParamsError(
                f"train.strategy is {strategy!r}, but {problem} in train.network "
                f"{network.spec.name!r}. Let its method parallel_blocks() return other modules "
                "(an empty list: the whole network is one block), or use 'ddp'."
            )


def _layers_in_containers(backbone: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules directly inside lists and sequences that have submodules themselves."""
    for container in backbone.modules():
        if isinstance(container, _CONTAINERS):
            for module in container:
                is_layer = not isinstance(module, _CONTAINERS) and any(module.children())
                if is_layer and _num_elements([module]):
                    yield module


def _num_elements(modules: list[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def _names(network: Network, blocks: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in network.named_modules()}
    return [names.get(id(block), f"a {type(block).__name__} outside it") for block in blocks]


def _shared_weight(network: Network, blocks: list[nn.Module]) -> str:
    """Return a text on a weight that a block shares with another module; "" if there is none."""
    owners: dict[int, str] = {}
    for name, block in zip(_names(network, blocks), blocks, strict=True):
        for weight in block.parameters():
            if id(weight) in owners:
                return f"the blocks {owners[id(weight)]} and {name} share a weight"
            owners[id(weight)] = name
    inside = {id(module) for block in blocks for module in block.modules()}
    for name, module in network.named_modules():
        if id(module) in inside:
            continue
        for weight in module.parameters(recurse=False):
            if id(weight) in owners:
                return f"the block {owners[id(weight)]} and the module {name} share a weight"
    return ""


def _uncalled_block(network: Network, blocks: list[nn.Module]) -> str:
    """Return a text on blocks that a forward pass does not call; "" if it calls all of them."""
    called: set[int] = set()
    hooks = [
        block.register_forward_pre_hook(lambda module, _: called.add(id(module)))
        for block in blocks
    ]
    try:
        with torch.no_grad():
            network.eval()(example_rows(network.spec))
    finally:
        network.train()
        for hook in hooks:
            hook.remove()
    names = [
        name
        for name, block in zip(_names(network, blocks), blocks, strict=True)
        if id(block) not in called
    ]
    return f"the forward pass does not call {', '.join(names)}" if names else ""
