"""The strategy `tensor_parallel`: processes share the linear layers of each block.

The processes of a copy compute the same rows. Each holds its columns of the layers that the network
names (`parallel_layers()`), and everything else whole: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from slipway.training.distributed.divided import SharedCopyStrategy
from slipway.training.distributed.shards import local
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.divided_layers import DividedLayer, parallel_layers
from slipway.training.networks.networks import Network


class TensorParallelStrategy(SharedCopyStrategy):
    """Divides layers of `TrainingModule.network` over the processes that share a copy."""

    @property
    def is_divided(self) -> bool:
        """True if this process holds only its part of the divided layers."""
        return all(
            isinstance(weight, DTensor)
            and weight.device_mesh.size() == self.model_parallel
            and local(weight).numel() * self.model_parallel == weight.numel()
            for weight, _ in shared_weights(self.network)
        )

    def divide(self, network: Network) -> None:
        share_layers(network, self.copy_mesh)
        for weight in network.parameters():
            weight.data = weight.data.clone()  # out of the file, where it is not divided


def shared_weights(network: Network) -> Iterator[tuple[Tensor, DividedLayer]]:
    """Yield the weights, without biases, of all layers that processes share."""
    layers = parallel_layers(network)
    for block in parallel_blocks(network):
        for layer in layers:
            module: Any = block.get_submodule(layer.name)
            yield module.weight, layer


def share_layers(network: Network, mesh: DeviceMesh, *, whole_biases: bool = False) -> None:
    """Reduce the divided layers to this process's part, in place.

    With `whole_biases` the biases of layers with several fused outputs stay whole.
    """
    layers = parallel_layers(network)
    for block in parallel_blocks(network):
        plan = {layer.name: _style(layer, whole_biases=whole_biases) for layer in layers}
        parallelize_module(block, mesh, plan, src_data_rank=None)
        if network.mapped:
            network.mapped.release()


def _style(layer: DividedLayer, *, whole_biases: bool) -> ParallelStyle:
    if layer.by == "inputs":
        return RowwiseParallel()
    if layer.parts == 1:
        return ColwiseParallel()
    return PartwiseParallel(layer.parts, whole_bias=whole_biases)


class PartwiseParallel(ParallelStyle):
    """Divides a linear layer with several fused outputs, such as queries, keys and values.

    Each process gets a part of every output. The whole weight keeps the order of its rows, so
    checkpoints have the same format as from a single process. With `whole_bias` the bias stays
    whole, and each process takes its part in each pass.
    """

    def __init__(self, parts: int, *, whole_bias: bool) -> None:
        self._parts, self._whole_bias = parts, whole_bias

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        names = ["weight"] if self._whole_bias or module.bias is None else ["weight", "bias"]
        for name in names:
            weight = module.get_parameter(name)
            ranges = weight.detach().reshape(self._parts, -1, *weight.shape[1:])
            # The order survives in the placement of the flat tensor.
            divided = distribute_tensor(ranges, device_mesh, [Shard(1)], src_data_rank=None)
            weight = nn.Parameter(divided.flatten(0, 1), requires_grad=weight.requires_grad)
            module.register_parameter(name, weight)
        forward = partial(_forward, module, self._parts, device_mesh)
        module.forward = forward  # type: ignore[method-assign]
        return module


def _forward(module: nn.Linear, parts: int, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
    """Compute the outputs for this process's part of the weight, which DTensor would gather."""
    assert isinstance(module.weight, DTensor)
    weight, bias = module.weight.to_local(), cast(Tensor | None, module.bias)
    if isinstance(bias, DTensor):
        bias = bias.to_local()
    elif bias is not None:
        bias = _used_by_all(bias, mesh).view(parts, mesh.size(), -1)[:, mesh.get_local_rank()]
        bias = bias.flatten()
    return F.linear(_used_by_all(inputs, mesh), weight, bias)


def _used_by_all(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `value`, equal on all processes, whose gradient is the sum of all processes'."""
    shared = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])
