"""Structured pruning: takes the channels that matter least out of a trained network.

Of a layer whose output only one other layer reads, whatever the network is called. Channels that
meet a shortcut stay. The preflight reads this module: it imports no Lightning, which takes seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network
from slipway.training.pruning.result import Width

BLOCK = 8  # channels that kernels compute together: 13 of them take the time of 16
_ATEN = torch.ops.aten
_LAYERS = (_ATEN.conv2d.default, _ATEN.linear.default)
_GROUPS = 6  # the place of conv2d's argument
# What leaves channel c to be a function of channel c alone, and a channel of zeros without effect on the others.
_EACH_ALONE = {
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
class Chain:
    """Channels that one layer makes and one other layer alone reads. Tensors are named as in the network's state."""

    maker: str  # weight of the first layer
    first: tuple[
        str, ...
    ]  # tensors whose first dimension are these channels: that weight, its bias, those of a BatchNorm
    size: str  # of `first`: tells how large a channel is, the scale of the BatchNorm or else the weight
    reader: str  # weight of the second layer, whose second dimension they are


def find_chains(network: Network) -> list[Chain]:
    """Every chain of the network, found in the graph that torch exports of it."""
    example = torch.from_numpy(np.zeros((2, *network.spec.input.shape), network.spec.input.dtype))
    program = torch.export.export(network.eval(), (example,))
    inputs = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    names = {name: tensor for name, tensor in inputs.items() if tensor in network.state_dict()}
    found = (_chain_from(node, names) for node in program.graph.nodes if _is_layer(node, names))
    return [chain for chain in found if chain]


def prunable_chains(network: Network, share: float) -> list[Chain]:
    """Every chain of the network; ParamsError if `share` takes a channel out of none of them."""
    chains, state = find_chains(network), network.state_dict()
    widths = [len(state[chain.maker]) for chain in chains]
    if all(width_left(width, share) == width for width in widths):
        raise ParamsError(_why_nothing(network.spec.name, share, len(chains)))
    return chains


def prune_channels(network: Network, share: float) -> tuple[dict[str, Tensor], dict[str, Width]]:
    """The weights without `share` of the channels of each chain, and the widths by layer; ParamsError where none can be taken out.

    What is left is a multiple of 8 channels. One is worth its size, |scale| of its BatchNorm (Liu et al. 2017, "Network slimming") or the
    L2 norm of its weights, times the L2 norm of the weights that read it: about what it can add to the next layer.
    """
    before = {name: value.detach().cpu() for name, value in network.state_dict().items()}
    after, widths = dict(before), {}
    for chain in prunable_chains(network, share):
        width = len(before[chain.maker])
        left = width_left(width, share)
        worth = _norms(before[chain.size]) * _norms(before[chain.reader].transpose(0, 1))
        kept = torch.argsort(worth, descending=True, stable=True)[:left].sort().values
        for name in chain.first:
            after[name] = after[name].index_select(0, kept)
        after[chain.reader] = after[chain.reader].index_select(1, kept)
        if left < width:
            widths[chain.maker.removesuffix(".weight")] = Width(before=width, after=left)
    return after, widths


def width_left(width: int, share: float) -> int:
    """Channels of `width` that are left without `share` of them: a multiple of 8, rounded up; never more than there were."""
    wanted = width * (1 - share)
    return min(width, BLOCK * max(1, int(np.ceil(round(wanted / BLOCK, 9)))))


def _is_layer(node: Node, names: Mapping[str, str]) -> bool:
    """A convolution without groups or a linear layer, with a weight of the network's own that nothing else uses."""
    if node.target not in _LAYERS or (len(node.args) > _GROUPS and node.args[_GROUPS] != 1):
        return False
    return all(
        isinstance(used, Node) and used.name in names and len(used.users) == 1
        for used in _tensors(node)
    )


def _chain_from(maker: Node, names: Mapping[str, str]) -> Chain | None:
    weight, *bias = (names[used.name] for used in _tensors(maker))
    first, size, node = [weight, *bias], weight, maker
    while len(node.users) == 1:
        (user,) = node.users
        if user.args[0] is not node:
            return None
        if user.target is maker.target and _is_layer(user, names):
            return Chain(weight, tuple(first), size, names[_tensors(user)[0].name])
        if user.target is _ATEN.batch_norm.default and maker.target is _ATEN.conv2d.default:
            norm = _tensors(user)
            if not all(used.name in names and len(used.users) == 1 for used in norm):
                return None
            first += [names[used.name] for used in norm]
            size = names[norm[0].name] if user.args[1] is not None else size
        elif user.target not in _EACH_ALONE:
            return None
        node = user
    return None


def _tensors(node: Node) -> list[Node]:
    """What a layer or a norm takes beside its input."""
    return [argument for argument in node.args[1:5] if isinstance(argument, Node)]


def _norms(tensor: Tensor) -> Tensor:
    """(C, ...) -> (C,) L2 norms."""
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return norms


def _why_nothing(name: str, share: float, num_chains: int) -> str:
    if num_chains:
        return f"prune.sparsity is {share:g}, which takes no channel out of {name!r}: {BLOCK} at a time are. Raise it."
    return (
        f"prune.kind is 'structured', but no layer of {name!r} is read by one other layer alone through nothing but a BatchNorm and "
        "functions of single values. Use magnitude, or another network."
    )
