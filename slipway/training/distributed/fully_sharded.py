"""The strategy `fsdp`: torch's FSDP2 (`fully_shard`), by the blocks of a network.

Each process holds a part of every weight, gradient and optimizer state. A block's weights are
gathered for its forward pass and again for its backward pass: Zhao et al. 2023, arXiv:2304.11277.
"""

from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipway.training.distributed.divided import DividedStrategy
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network, example_rows


class FullyShardedStrategy(DividedStrategy):
    """Shards `TrainingModule.network` over all processes.

    Args:
        half: dtype of the gathered weights and of the computation; None for float32. Parts,
            gradients and the optimizer's state stay float32.
    """

    def __init__(self, world_size: int, half: torch.dtype | None) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)
        self._half = half
        self.compute_dtype: torch.dtype | None = None  # measured in a forward pass

    @property
    def is_divided(self) -> bool:
        """True if every weight is divided over all processes."""
        return all(
            isinstance(weight, DTensor) and weight.device_mesh.size() == self.world_size
            for weight in self.network.parameters()
        )

    def divide(self, network: Network) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self._half, reduce_dtype=torch.float32)
        for module in (*parallel_blocks(network), network):
            # The root as well: outside a forward pass every weight then is a part.
            fully_shard(
                module,
                mesh=self.device_mesh["data_parallel"],
                reshard_after_forward=True,
                mp_policy=policy,
            )
            if network.mapped:
                network.mapped.release()

    def model_to_device(self) -> None:
        super().model_to_device()
        self.compute_dtype = _compute_dtype(self.network, self.root_device)


class ShardedPrecision(Precision):
    """Leaves casting to FSDP2, which gathers weights in half precision."""


def _compute_dtype(network: Network, device: torch.device) -> torch.dtype:
    """Return the dtype that the network's weights have during a forward pass.

    Runs a forward pass of one row, so every rank has to call it.
    """
    found: list[torch.dtype] = []

    def note(module: nn.Module, *_: Any) -> None:
        found.extend(weight.dtype for weight in module.parameters(recurse=False))

    hooks = [module.register_forward_pre_hook(note) for module in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(example_rows(network.spec).to(device))
    finally:
        network.train()
        for hook in hooks:
            hook.remove()
    dtypes = set(found)
    if len(dtypes) != 1:
        raise RuntimeError(f"the weights compute in {sorted(map(str, dtypes))}, expected one dtype")
    return dtypes.pop()
