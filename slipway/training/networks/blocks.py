"""Finds the blocks of a network: the repeated layers that strategies divide over processes.

A backbone may define a method `parallel_blocks()` that returns them in the order of the forward
pass. Otherwise they are the modules of one class in lists or sequences (`nn.ModuleList`,
`nn.Sequential`): the most numerous class that holds at least half of all parameters.

`pipeline` also needs the way to the first block and from the last one: `before_blocks(rows)`,
`after_blocks(values, rows)`, `after_modules()`, and `block_arguments(rows)` if blocks take more
than values.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network, example_rows

STAGE_METHODS = ("before_blocks", "after_blocks", "after_modules")  # which `pipeline` calls
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


def block_arguments(backbone: Any, rows: Tensor, num_blocks: int) -> list[tuple[Any, ...]]:
    """Return the arguments of each block besides the values, for the backbone's inputs `rows`."""
    if not hasattr(backbone, "block_arguments"):
        return [()] * num_blocks
    return [tuple(arguments) for arguments in backbone.block_arguments(rows)]


def forward_by_blocks(backbone: Any, rows: Tensor) -> Tensor:
    """Run the forward pass of a backbone that names its blocks; return its outputs (B, K)."""
    values, blocks = backbone.before_blocks(rows), backbone.parallel_blocks()
    further = block_arguments(backbone, rows, len(blocks))
    for block, arguments in zip(blocks, further, strict=True):
        values = block(values, *arguments)
    outputs: Tensor = backbone.after_blocks(values, rows)
    return outputs


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


def stage_problem(network: Network) -> str:
    """Return a text on stages that `pipeline` cannot train; "" if it can train all of them.

    Runs the methods of the backbone on two rows of zeros.
    """
    backbone: Any = network.backbone
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                f"the statistics of {name} would be those of a micro-batch, and stay in its "
                "process; expected nn.GroupNorm or nn.LayerNorm"
            )
    blocks = parallel_blocks(network)
    if problem := _shared_weight(network, blocks):
        return problem
    rows = example_rows(network.spec, 2)
    network.eval()
    try:
        with torch.enable_grad():
            return _problem_on_the_way(network, backbone, blocks, rows)
    finally:
        network.train()


def _problem_on_the_way(
    network: Network, backbone: Any, blocks: list[nn.Module], rows: Tensor
) -> str:
    """Return a text on the first stage method that breaks its contract; "" if none does."""
    inputs = network.backbone_inputs(rows)
    values = backbone.before_blocks(inputs)
    if not _is_like(values, values, len(rows)):
        return (
            f"before_blocks() returns {_kind(values)}, expected one tensor of floating-point "
            "numbers whose first dimension is the rows"
        )
    after = {id(weight) for module in backbone.after_modules() for weight in module.parameters()}
    if _used_weights(network, values) & after:
        return "before_blocks() uses weights of after_modules(); expected other weights"
    further = block_arguments(backbone, inputs, len(blocks))
    if len(further) != len(blocks):
        return f"block_arguments() returns {len(further)} items, expected {len(blocks)}"
    if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(further)):
        return "block_arguments() uses weights, which other processes lack; expected none"
    values = values.detach()
    for name, block, arguments in zip(_names(network, blocks), blocks, further, strict=True):
        passed_on = block(values, *arguments)
        if not _is_like(passed_on, values, len(rows)):
            return (
                f"the block {name} returns {_kind(passed_on)} for {_kind(values)}; expected the "
                "same shape and dtype from every block"
            )
        if _used_weights(network, passed_on) - {id(weight) for weight in block.parameters()}:
            return f"the block {name} uses weights outside it; expected only its own"
        values = passed_on.detach()
    outputs = backbone.after_blocks(values, inputs)
    if _used_weights(network, outputs) - after:
        return "after_blocks() uses weights that are not in after_modules(). Return their modules"
    if not torch.allclose(network.to_target_unit(outputs), network(rows), rtol=1e-4, atol=1e-5):
        return "forward() returns other outputs than before_blocks(), blocks and after_blocks()"
    return ""


def _is_like(values: Any, expected: Tensor, num_rows: int) -> bool:
    return (
        isinstance(values, Tensor)
        and values.is_floating_point()
        and (values.shape, values.dtype) == (expected.shape, expected.dtype)
        and values.shape[:1] == (num_rows,)
    )


def _kind(values: Any) -> str:
    """Describe a value for a message: dtype and shape of a tensor, or the name of its class."""
    is_tensor = isinstance(values, Tensor)
    return f"{values.dtype} {tuple(values.shape)}" if is_tensor else type(values).__name__


def _used_weights(network: Network, values: Tensor) -> set[int]:
    """Return the ids of the weights that learn from a gradient of `values`."""
    if not values.requires_grad:
        return set()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    found = torch.autograd.grad(values.sum(), weights, retain_graph=True, allow_unused=True)
    return {id(weight) for weight, grad in zip(weights, found, strict=True) if grad is not None}


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
