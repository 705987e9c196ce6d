"""The strategy `fsdp`: torch's FSDP2 (`fully_shard`), by the blocks of a network.

Each process holds a part of every weight, gradient and optimizer state. A block's weights are
gathered for its forward pass and again for its backward pass: Zhao et al. 2023, arXiv:2304.11277.
Checkpoints hold whole tensors in the format of `ddp`, so that any strategy resumes them.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from slipway.training.distributed.shards import divided_like, load_optimizer, local, whole
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network, example_rows


class FullyShardedStrategy(ModelParallelStrategy):
    """Shards `TrainingModule.network` over all processes.

    Args:
        half: dtype of the gathered weights and of the computation; None for float32. Parts,
            gradients and the optimizer's state stay float32.
    """

    def __init__(self, world_size: int, half: torch.dtype | None) -> None:
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )
        self._half = half
        self.compute_dtype: torch.dtype | None = None  # measured in a forward pass

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def is_sharded(self) -> bool:
        """Return True if every weight is divided over all processes."""
        assert self.lightning_module is not None
        return all(
            isinstance(weight, DTensor) and weight.device_mesh.size() == self.world_size
            for weight in self.lightning_module.parameters()
        )

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the network before it moves to the device, where it may not fit whole."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        network = self.lightning_module.network
        assert isinstance(network, Network)
        blocks = parallel_blocks(network)
        policy = MixedPrecisionPolicy(param_dtype=self._half, reduce_dtype=torch.float32)
        for module in (*blocks, network):
            # The root as well: outside a forward pass every weight then is a part.
            fully_shard(
                module,
                mesh=self.device_mesh["data_parallel"],
                reshard_after_forward=True,
                mp_policy=policy,
            )
            if network.mapped:
                network.mapped.release()
        network.mapped = None
        self.model_to_device()
        self.compute_dtype = _compute_dtype(network, self.root_device)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, still divided, and the buffers."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state in torch's own format, still divided."""
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the file of torch.save on rank 0, with whole tensors.

        They are gathered one after the other, so that no process holds all of them.
        """
        places: list[int] = []
        if self.is_global_zero:
            places = _save_without_data(checkpoint, filepath)
        tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)]
        with open(filepath, "r+b") if self.is_global_zero else nullcontext() as file:
            for index, tensor in enumerate(tensors):
                value = whole(tensor.detach())
                if file is not None:
                    file.seek(places[index])
                    file.write(value.cpu().reshape(-1).view(torch.uint8).numpy().data)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Map the file, of which each rank then reads its parts."""
        saved: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=True
        )
        return saved

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        saved = checkpoint["state_dict"]
        current = self.lightning_module.state_dict()
        if saved.keys() != current.keys():
            raise RuntimeError(f"other weights: {sorted(saved.keys() ^ current.keys())}")
        for name, value in current.items():
            local(value).copy_(local(divided_like(saved[name], value)))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer(optimizer, saved)


class ShardedPrecision(Precision):
    """Leaves casting to FSDP2, which gathers weights in half precision."""


def _save_without_data(checkpoint: dict[str, Any], path: Any) -> list[int]:
    """Write `checkpoint` with room for its tensors; return where the bytes of each one begin."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # of memory that is never used

    with torch.serialization.skip_data():
        torch.save(tree_map_only(Tensor, empty, checkpoint), path)
    with FakeTensorMode():
        saved = torch.load(path, weights_only=True)
    return [
        leaf.untyped_storage()._checkpoint_offset or 0
        for leaf in tree_leaves(saved)
        if isinstance(leaf, Tensor)
    ]


def _compute_dtype(network: Network, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights in a forward pass of one row. Every rank has to call it."""
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
