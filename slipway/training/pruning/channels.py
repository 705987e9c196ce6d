"""Structured pruning: removes the least important channels of a trained network.

It narrows layers whose output only one other layer reads, in any network. Channels that are added
to a shortcut stay. The preflight imports this module, so this module does not import Lightning,
which takes seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network, example_rows
from slipway.training.pruning.result import Width

BLOCK = 8  # channels that kernels compute together: 13 channels take the time of 16
_ATEN = torch.ops.aten
_LAYERS = (_ATEN.conv2d.default, _ATEN.linear.default)
_GROUPS = 6  # position of conv2d's argument
# Operations that map channel c to channel c only, and zeros to values that no other channel uses.
_CHANNELWISE = {
    _ATEN.relu.default,
    _ATEN.relu_.default,
    _ATEN.gelu.default,
    _ATEN.silu.default,
    _ATEN.silu_.default,
    _ATEN.hardswish.default,
    _ATEN.hardswish_.default,
    _ATEN.hardtanh.default,
    _ATEN.hardtanh_.default,
    _ATEN.leaky_relu.default,
    _ATEN.leaky_relu_.default,
    _ATEN.dropout.default,
}


@dataclass(frozen=True)
class ChannelChain:
    """Channels that one layer outputs and a single other layer reads.

    The fields name tensors as the network's `state_dict` does.
    """

    maker: str  # weight of the first layer
    # Tensors whose first dimension are these channels: that weight, its bias, those of a BatchNorm.
    first: tuple[str, ...]
    size: str  # measures a channel's size: `first`'s BatchNorm scale, else its weight
    reader: str  # weight of the second layer, whose second dimension are these channels


def find_chains(network: Network) -> list[ChannelChain]:
    """Return every `ChannelChain` in the graph of the network, which torch exports."""
    program = torch.export.export(network.eval(), (example_rows(network.spec, 2),))
    inputs = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    names = {name: tensor for name, tensor in inputs.items() if tensor in network.state_dict()}
    found = (_chain_from(node, names) for node in program.graph.nodes if _is_layer(node, names))
    return [chain for chain in found if chain]


def prunable_chains(network: Network, sparsity: float) -> list[ChannelChain]:
    """Return every chain. Raises ParamsError if `sparsity` removes no channel from any of them."""
    chains, state = find_chains(network), network.state_dict()
    widths = [len(state[chain.maker]) for chain in chains]
    if all(width_left(width, sparsity) == width for width in widths):
        raise ParamsError(_describe_refusal(network.spec.name, sparsity, len(chains)))
    return chains


def prune_channels(network: Network, sparsity: float) -> tuple[dict[str, Tensor], dict[str, Width]]:
    """Remove the least important channels of each chain.

    Returns the weights, and the widths before and after by layer. The fraction `sparsity` is
    removed; the remaining number is rounded up to a multiple of 8. A channel's importance estimates
    its contribution to the next layer: its size times the L2 norm of the weights that read it. The
    size is |scale| of its BatchNorm (Liu et al. 2017, "Network slimming") or the L2 norm of its
    weights. Raises ParamsError if no channel can be removed.
    """
    before = {name: value.detach().cpu() for name, value in network.state_dict().items()}
    after, widths = dict(before), {}
    for chain in prunable_chains(network, sparsity):
        width = len(before[chain.maker])
        left = width_left(width, sparsity)
        importance = _norms(before[chain.size]) * _norms(before[chain.reader].transpose(0, 1))
        kept = torch.argsort(importance, descending=True, stable=True)[:left].sort().values
        for name in chain.first:
            after[name] = after[name].index_select(0, kept)
        after[chain.reader] = after[chain.reader].index_select(1, kept)
        if left < width:
            widths[chain.maker.removesuffix(".weight")] = Width(before=width, after=left)
    return after, widths


def width_left(width: int, sparsity: float) -> int:
    """Return the width after removing the fraction `sparsity`, rounded up to a multiple of 8."""
    wanted = width * (1 - sparsity)
    return min(width, BLOCK * max(1, int(np.ceil(round(wanted / BLOCK, 9)))))


def _is_layer(node: Node, names: Mapping[str, str]) -> bool:
    """Return True for a linear layer or an ungrouped convolution whose weight is not shared."""
    if node.target not in _LAYERS or (len(node.args) > _GROUPS and node.args[_GROUPS] != 1):
        return False
    return _are_own(_tensors(node), names)


def _chain_from(maker: Node, names: Mapping[str, str]) -> ChannelChain | None:
    """Follow the output of layer `maker` through channelwise operations to its only reader.

    Returns None if the channels have several readers or cannot be narrowed.
    """
    weight, *bias = (names[used.name] for used in _tensors(maker))
    first, size, node = [weight, *bias], weight, maker
    while len(node.users) == 1:
        (user,) = node.users
        if user.args[0] is not node:
            return None
        if user.target is maker.target and _is_layer(user, names):
            return ChannelChain(weight, tuple(first), size, names[_tensors(user)[0].name])
        if user.target is _ATEN.batch_norm.default and maker.target is _ATEN.conv2d.default:
            norm = _tensors(user)
            if not _are_own(norm, names):
                return None
            first += [names[used.name] for used in norm]
            size = names[norm[0].name] if user.args[1] is not None else size
        elif user.target not in _CHANNELWISE:
            return None
        node = user
    return None


def _are_own(tensors: list[Node], names: Mapping[str, str]) -> bool:
    """Return True if all `tensors` are parameters or buffers that only one operation uses."""
    return all(tensor.name in names and len(tensor.users) == 1 for tensor in tensors)


def _tensors(node: Node) -> list[Node]:
    """Return the parameters and buffers that a layer or a norm reads, without its input."""
    return [argument for argument in node.args[1:5] if isinstance(argument, Node)]


def _norms(tensor: Tensor) -> Tensor:
    """Return the L2 norm (C,) of each slice along the first dimension of a tensor (C, ...)."""
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return norms


def _describe_refusal(name: str, sparsity: float, num_chains: int) -> str:
    if num_chains:
        return (
            f"prune.sparsity is {sparsity:g}, which removes no channel of {name!r}, because they "
            f"are removed {BLOCK} at a time. Raise it."
        )
    return (
        f"prune.kind is 'structured', but no layer of {name!r} has only one reader, through "
        "nothing but a BatchNorm and elementwise functions. Use magnitude, or another network."
    )
