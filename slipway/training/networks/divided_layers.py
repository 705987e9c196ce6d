"""The linear layers that the strategy `tensor_parallel` divides over processes.

One layer is divided by its outputs and the next by its inputs, so a block needs only two sums over
the processes: Shoeybi et al. 2019, arXiv:1909.08053. A backbone names these layers in a method
`parallel_layers()`.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from slipway.system.errors import ParamsError
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network, example_rows

_MOST_PROCESSES = 64  # most processes that a message proposes


@dataclass(frozen=True)
class DividedLayer:
    """A linear layer, present in each block, that is divided over processes."""

    name: str  # name within a block
    by: Literal["outputs", "inputs"]
    groups: int  # number of heads, or of columns, which are never divided themselves
    unit: Literal["heads", "columns"] = "columns"
    parts: int = 1  # fused outputs, each of which is divided: 3 for q, k, v


def parallel_layers(network: Network) -> list[DividedLayer]:
    """Return the layers that the backbone names for division, or an empty list."""
    named = getattr(network.backbone, "parallel_layers", None)
    return list(named()) if callable(named) else []


def check_layers(network: Network, num_processes: int, num_copies: int | None = None) -> None:
    """Raise a ParamsError if the layers cannot be divided over `num_processes` processes.

    `num_copies` is the number of copies over which `fsdp` divides each part; None without it.
    """
    found = _problem(network, num_processes)
    if not found and num_copies:
        found = _uneven_columns(network, num_copies)
    if found:
        what, remedy = found
        setting, other = "strategy is 'tensor_parallel'", "'fsdp', which"
        if num_copies:
            setting, other = f"model_parallel is {num_processes}", "model_parallel: null, which"
        raise ParamsError(
            f"train.{setting}, but {what} in train.network {network.spec.name!r}. {remedy}, or "
            f"use {other} works with any network."
        )


def can_share(network: Network, num_processes: int) -> bool:
    """Return True if the layers of `network` can be divided over `num_processes` processes."""
    return _problem(network, num_processes) is None


def _problem(network: Network, num_processes: int) -> tuple[str, str] | None:
    """Return the reason why the layers cannot be divided, and the remedy; None if they can be."""
    return (
        _unnamed_layer(network)
        or _uneven_layer(network, num_processes)
        or _unusable_share(network, num_processes)
    )


def _unnamed_layer(network: Network) -> tuple[str, str] | None:
    """Return a text on a missing or unnamed layer, and the remedy; None if there is none."""
    layers, blocks = parallel_layers(network), parallel_blocks(network)
    if not layers or not blocks:
        return (
            "no method parallel_layers() names layers that processes can share",
            "Expected 'small_transformer', 'encoder', or a network of your own with that method "
            "(docs/how-to/own_network.md). Use one of these",
        )
    for block in blocks:
        modules = dict(block.named_modules())
        for layer in layers:
            module: Any = modules.get(layer.name)
            if isinstance(module, nn.Linear):
                size = module.out_features if layer.by == "outputs" else module.in_features
                if size % (layer.groups * layer.parts) == 0:
                    continue
            return (
                f"a {type(block).__name__} has no nn.Linear {layer.name!r} with {layer.parts} x "
                f"{layer.groups} equal groups of {layer.by}",
                "Correct parallel_layers()",
            )
    return None


def _uneven_layer(network: Network, num_processes: int) -> tuple[str, str] | None:
    """Return a text on a layer that cannot be divided equally, and the remedy, or None."""
    layers = parallel_layers(network)
    for layer in layers:
        if layer.groups % num_processes:
            common = math.gcd(*(each.groups for each in layers))
            fitting = [
                str(number)
                for number in range(2, min(common, _MOST_PROCESSES) + 1)
                if common % number == 0
            ]
            use = f"{' or '.join(fitting)} processes" if fitting else "other network_arguments"
            return (
                f"{num_processes} processes cannot equally share the {layer.groups} {layer.unit} "
                f"of {layer.name!r}",
                f"Use {use}",
            )
    return None


def _uneven_columns(network: Network, num_copies: int) -> tuple[str, str] | None:
    """Return a text on fused outputs that `fsdp` cannot divide equally, and the remedy, or None."""
    block: Any = parallel_blocks(network)[0]
    for layer in parallel_layers(network):
        size = block.get_submodule(layer.name).in_features
        if layer.parts > 1 and size % num_copies:
            return (
                f"{num_copies} copies cannot equally divide the {size} inputs of {layer.name!r}, "
                f"which has {layer.parts} fused outputs",
                f"Use a number of copies that divides {size}",
            )
    return None


def _unusable_share(network: Network, num_processes: int) -> tuple[str, str] | None:
    """Return the reason why a divided block fails, and the remedy; None if it works."""
    share = narrowed(network, num_processes)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            share.eval()(example_rows(network.spec))
    except (RuntimeError, AssertionError, ValueError) as error:
        return (
            f"a block cannot compute with its share of the layers ({error})",
            "Take the numbers of heads and columns from the tensors' shapes",
        )
    return None


def narrowed(network: Network, num_processes: int) -> Network:
    """Return a copy of `network` with one process's part of the layers, and without data."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        share = copy.deepcopy(network)
    with fake:
        narrow(share, num_processes)
    return share


def narrow(network: Network, num_processes: int) -> None:
    """Shrink the layers to the size of one process's part, with undefined values."""
    layers = parallel_layers(network)
    for block in parallel_blocks(network):
        for layer in layers:
            module: Any = block.get_submodule(layer.name)
            inputs, outputs = module.in_features, module.out_features
            if layer.by == "outputs":
                outputs //= num_processes
            else:
                inputs //= num_processes
            module.weight = _empty_like(module.weight, (outputs, inputs))
            if module.bias is not None:
                module.bias = _empty_like(module.bias, (outputs,))


def _empty_like(weight: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(weight.detach().new_empty(shape), requires_grad=weight.requires_grad)
