"""The strategy `tensor_parallel`: processes share the linear layers of each block.

The processes of a copy compute the same rows. Each holds its columns of the layers that the network
names (`parallel_layers()`), and everything else whole: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from functools import partial

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
            for block in parallel_blocks(self.network)
            for layer in parallel_layers(self.network)
            for weight in [block.get_submodule(layer.name).weight]
        )

    def divide(self, network: Network) -> None:
        share_layers(network, self.copy_mesh)


def share_layers(network: Network, mesh: DeviceMesh) -> None:
    """Reduce the divided layers to this process's part, in place."""
    layers = parallel_layers(network)
    for block in parallel_blocks(network):
        plan = {layer.name: _style(layer) for layer in layers}
        parallelize_module(block, mesh, plan, src_data_rank=None)
        if network.mapped:
            network.mapped.release()
    for weight in network.parameters():
        weight.data = weight.data.clone()  # out of the file, where it is not divided


def _style(layer: DividedLayer) -> ParallelStyle:
    if layer.by == "inputs":
        return RowwiseParallel()
    return ColwiseParallel() if layer.parts == 1 else PartwiseParallel(layer.parts)


class PartwiseParallel(ParallelStyle):
    """Divides a linear layer with several fused outputs, such as queries, keys and values.

    Each process gets a part of every output. The whole weight keeps the order of its rows, so
    checkpoints have the same format as from a single process.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        for name, weight in list(module.named_parameters()):
            ranges = weight.detach().reshape(self._parts, -1, *weight.shape[1:])
            # The order survives in the placement of the flat tensor.
            divided = distribute_tensor(ranges, device_mesh, [Shard(1)], src_data_rank=None)
            weight = nn.Parameter(divided.flatten(0, 1), requires_grad=weight.requires_grad)
            module.register_parameter(name, weight)
        module.forward = partial(_forward, module, device_mesh)  # type: ignore[method-assign]
        return module


def _forward(module: nn.Linear, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
    """Compute the outputs for this process's part of the weight, which DTensor would gather."""
    # Backward adds up the gradients of all processes.
    shared = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False)
    own = shared.to_local(grad_placements=[Partial()])
    weight, bias = (
        value.to_local() if isinstance(value, DTensor) else value
        for value in (module.weight, module.bias)
    )
    return F.linear(own, weight, bias)
