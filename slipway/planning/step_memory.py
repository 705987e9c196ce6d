"""The memory of one training step on one device, found without allocating it.

Forward, loss and backward run on tensors without data, and the storages that live at each moment are added up. What kernels
take for themselves inside one operation, the allocator's slack, the CUDA context and the interpreter are not in it.
"""

import copy
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipway.config.sections import TrainParams
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import is_classification
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses
from slipway.training.recipe.optimizers import optimizer_and_schedule
from slipway.training.recipe.precision import adapt_to_half


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the moment at which most is held."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int  # what backward needs, the batch, and what operations hand to each other

    @property
    def peak(self) -> int:
        """All together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, until they die; notes the most, and the gradients that were among it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._network = network
        self._known: set[int] = set()
        self._live = 0
        self.most, self.gradients_then = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if self._live > self.most:
            self.most, self.gradients_then = self._live, gradient_bytes(self._network)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._live += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live -= num_bytes

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Count what lives already."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())


def trace_step(
    network: Network,
    params: TrainParams,
    rows: int,
    *,
    half: torch.dtype | None = None,
    casts_parameters: bool = False,
    accumulates: bool = False,
) -> StepMemory:
    """The memory of a step of `rows` rows at a time. `network` is not changed.

    `half` is the dtype of autocast, or with `casts_parameters` of the parameters, as DeepSpeed has them: its optimizer is then
    not in the result, since it lives in shards. With `accumulates` gradients live on from one batch to the next.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied = copy.deepcopy(network)
    with fake:
        if half and casts_parameters:
            _cast(copied, half)
        _fill_gradients(copied)
        optimizer = None if casts_parameters else _stepped_optimizer(copied, params)
        state = list(_state_tensors(optimizer)) if optimizer else []
        autocast = (
            torch.autocast("cpu", dtype=half) if half and not casts_parameters else nullcontext()
        )
        with _LiveStorages(copied) as live:
            gradients = [
                parameter.grad for parameter in copied.parameters() if parameter.grad is not None
            ]
            live.start([*copied.parameters(), *copied.buffers(), *gradients, *state])
            del gradients
            _pass(copied, params, rows, autocast, accumulates=accumulates)
        held = {"parameters": _bytes(copied.parameters()), "gradients": live.gradients_then}
        held |= {"optimizer": _bytes(state), "buffers": _bytes(copied.buffers())}
        return StepMemory(**held, activations=live.most - sum(held.values()))


def _cast(network: Network, half: torch.dtype) -> None:
    adapt_to_half(network, half)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(half)


def _fill_gradients(network: Network) -> None:
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def _stepped_optimizer(network: Network, params: TrainParams) -> Optimizer:
    """One that has made its state, which optimizers do in their first step."""
    optimizer = optimizer_and_schedule(network, params, 1)["optimizer"]
    optimizer.step()
    return optimizer


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for value in tree_leaves([dict(state) for state in optimizer.state.values()])
        if isinstance(value, Tensor)
    ]


def _pass(
    network: Network, params: TrainParams, rows: int, autocast: Any, *, accumulates: bool
) -> None:
    """In the order of Lightning: the gradients of the step before are freed only after the forward pass."""
    inputs, targets = _batch(network, rows)
    with autocast:
        loss = RowLosses(network, params)(network(inputs), targets).mean()
    if not accumulates:
        network.zero_grad()
    loss.backward()


def _batch(network: Network, rows: int) -> tuple[Tensor, Tensor]:
    contract = network.spec.input
    dtype = torch.uint8 if isinstance(contract, ImageContract) else torch.float32
    targets = torch.zeros(
        rows, dtype=torch.int64 if is_classification(network.spec.task) else torch.float32
    )
    return torch.zeros((rows, *contract.shape), dtype=dtype), targets


def parameter_counts(network: nn.Module) -> tuple[int, int]:
    """(trainable, frozen) values in parameters."""
    trainable = sum(
        parameter.numel() for parameter in network.parameters() if parameter.requires_grad
    )
    return trainable, sum(parameter.numel() for parameter in network.parameters()) - trainable


def gradient_bytes(network: nn.Module) -> int:
    """Of all gradients that are there."""
    return _bytes(
        parameter.grad for parameter in network.parameters() if parameter.grad is not None
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
