"""The strategy `fsdp`: torch's FSDP2 (`fully_shard`), by the blocks of a network.

Each process holds a part of every weight, gradient and optimizer state. A block's weights are
gathered for its forward pass and again for its backward pass: Zhao et al. 2023, arXiv:2304.11277.
With `model_parallel` the processes of a copy share the linear layers of each block, as with
`tensor_parallel`, and a process gathers only its part of these layers.
"""

import logging
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from slipway.training.distributed.divided import DividedStrategy
from slipway.training.distributed.shards import num_parts
from slipway.training.distributed.tensor_parallel import share_layers, shared_weights
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network, example_rows


class FullyShardedStrategy(DividedStrategy):
    """Shards `TrainingModule.network` over all processes.

    Args:
        num_copies: number of processes, or of groups of them, that compute different rows.
        model_parallel: number of processes, with consecutive ranks, that share a copy; None if
            none do.
        half: dtype of the gathered weights and of the computation; None for float32. Parts,
            gradients and the optimizer's state stay float32.
    """

    def __init__(
        self, num_copies: int, model_parallel: int | None, half: torch.dtype | None
    ) -> None:
        super().__init__(num_copies, model_parallel or 1)
        self.model_parallel, self._half = model_parallel, half
        self.compute_dtype: torch.dtype | None = None  # measured in a forward pass

    @property
    def is_divided(self) -> bool:
        """True if weights are divided over the copies, and shared ones over all processes."""
        copies = self.device_mesh["data_parallel"].size()
        shared = shared_weights(self.network) if self.model_parallel else ()
        return all(num_parts(weight) >= copies for weight in self.network.parameters()) and all(
            num_parts(weight) == self.world_size for weight, _ in shared
        )

    def divide(self, network: Network) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self._half, reduce_dtype=torch.float32)
        fused = set[int]()
        if self.model_parallel:
            # Otherwise it warns that a mesh of two dimensions takes two messages.
            logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
            share_layers(network, self.device_mesh["tensor_parallel"], whole_biases=True)
            shared = shared_weights(network)
            fused = {id(weight) for weight, layer in shared if layer.parts > 1}

        def placement(weight: nn.Parameter) -> Shard | None:
            # Rows of fused outputs that torch divides twice are gathered in another order.
            return Shard(1) if id(weight) in fused else None

        for module in (*parallel_blocks(network), network):
            # The root as well: outside a forward pass every weight then is a part.
            fully_shard(
                module,
                mesh=self.device_mesh["data_parallel"],
                reshard_after_forward=True,
                shard_placement_fn=placement,
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
