"""Base class of the strategies that divide weights over processes as DTensors of torch.

Their checkpoints hold whole tensors in the format of `ddp`, so any strategy can resume from them.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from slipway.training.distributed.shards import divided_like, load_optimizer, local, whole
from slipway.training.networks.networks import Network


class DividedStrategy(ModelParallelStrategy):
    """Divides `TrainingModule.network` over a mesh of processes.

    Args:
        data_parallel_size: number of processes that compute different rows.
        tensor_parallel_size: number of processes that compute the same rows.
    """

    def __init__(self, data_parallel_size: int, tensor_parallel_size: int) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=False,
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def network(self) -> Network:
        """The network that is trained."""
        assert self.lightning_module is not None
        network = self.lightning_module.network
        assert isinstance(network, Network)
        return network

    @property
    @abstractmethod
    def is_divided(self) -> bool:
        """True if the weights are already divided: this process holds only its own parts."""

    @abstractmethod
    def divide(self, network: Network) -> None:
        """Replace the weights by this process's parts, in place.

        The whole weights may be in a memory-mapped file, see `network.mapped`.
        """

    def setup(self, trainer: pl.Trainer) -> None:
        """Divide the network, which may not fit on the device as a whole, before it moves there."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.divide(self.network)
        self.network.mapped = None
        self.model_to_device()
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, still divided over processes, and the buffers."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state in torch's format, still divided over processes."""
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint with whole tensors on rank 0, in the format of torch.save.

        Tensors are gathered one after the other, so no process holds all of them.
        """
        places: list[int] = []
        if self.is_global_zero:
            places = save_without_data(checkpoint, filepath)
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
        """Memory-map the checkpoint file, so that each rank reads only its own parts."""
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
            raise RuntimeError(
                "checkpoint and network have different weights: "
                f"{sorted(saved.keys() ^ current.keys())}"
            )
        for name, value in current.items():
            local(value).copy_(local(divided_like(saved[name], value)))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer(optimizer, saved)


class SharedCopyStrategy(DividedStrategy):
    """Divides each copy of the network over processes, and averages gradients over the copies.

    Args:
        num_copies: number of copies of the network, each of which computes different rows.
        model_parallel: number of processes, with consecutive ranks, that share a copy.
    """

    def __init__(self, num_copies: int, model_parallel: int) -> None:
        super().__init__(data_parallel_size=num_copies, tensor_parallel_size=model_parallel)
        self.num_copies, self.model_parallel = num_copies, model_parallel
        self._is_last_batch = True  # True for the last batch of a step

    @property
    def copy_mesh(self) -> DeviceMesh:
        """The mesh of the processes that share this process's copy of the network."""
        return self.device_mesh["tensor_parallel"]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing, because gradients may accumulate without communication.

        Lightning enters this context for each batch of a step except the last one.
        """
        self._is_last_batch = False
        try:
            yield
        finally:
            self._is_last_batch = True

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._is_last_batch and self.num_copies > 1:
            average_gradients(self.network, self.device_mesh["data_parallel"])


@torch.no_grad()
def average_gradients(network: Network, copies: DeviceMesh) -> None:
    """Replace each gradient by its mean over the processes that hold the same part of a copy.

    A weight without a gradient gets zeros: another copy may have a gradient for it, and would wait
    for this process.
    """
    gradients = []
    for weight in network.parameters():
        if weight.requires_grad and weight.numel():  # otherwise another process holds the weight
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.append(local(weight.grad))
    group = copies.get_group()
    sums = [distributed.all_reduce(each, group=group, async_op=True) for each in gradients]
    for pending in sums:
        pending.wait()
    torch._foreach_div_(gradients, copies.size())


def save_without_data(checkpoint: dict[str, Any], path: Any) -> list[int]:
    """Write `checkpoint` to `path`, with space for its tensors but without their values.

    Returns the byte offset of each tensor in the file.
    """

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # this memory is never used

    with torch.serialization.skip_data():
        torch.save(tree_map_only(Tensor, empty, checkpoint), path)
    with FakeTensorMode():
        saved = torch.load(path, weights_only=True)
    return [
        leaf.untyped_storage()._checkpoint_offset or 0
        for leaf in tree_leaves(saved)
        if isinstance(leaf, Tensor)
    ]
