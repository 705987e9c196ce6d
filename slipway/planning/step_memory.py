"""Memory of one training step on one device, found without allocating it.

Forward, loss and backward run on tensors without data, and the storages that live at each moment
are added up. Memory that kernels take within an operation, the allocator's slack, the CUDA context
and the interpreter are not included.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from slipway.config.sections import TrainParams
from slipway.kinds.registry import kind_of
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses
from slipway.training.recipe.optimizers import optimizer_and_schedule
from slipway.training.recipe.precision import adapt_to_half


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the peak."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int  # inputs of backward, the batch, and results between operations

    @property
    def peak(self) -> int:
        return sum(astuple(self))


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up live storages; records the peak, and the gradients in it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._network = network
        self._known: set[int] = set()
        self._live = 0
        self.peak, self.gradients_at_peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if self._live > self.peak:
            self.peak, self.gradients_at_peak = self._live, _bytes(_gradients(self._network))
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
        """Count tensors that exist already."""
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
    part: Callable[[Network], None] | None = None,
    num_forward: int = 0,
) -> StepMemory:
    """Trace a step of `rows` rows at a time, on a copy of `network`.

    Args:
        half: dtype of autocast, or of the parameters with `casts_parameters`.
        casts_parameters: as DeepSpeed does; its optimizer is sharded and not included.
        accumulates: gradients stay from one batch to the next.
        part: leaves in a copy of the network only what one process computes.
        num_forward: micro-batches of `rows` rows that a pipeline keeps; its old gradients are
            freed before the first one.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied = copy.deepcopy(network)
    with fake:
        if part:
            part(copied)
        if half and casts_parameters:
            _cast(copied, half)
        _fill_gradients(copied)
        optimizer = None if casts_parameters else _stepped_optimizer(copied, params)
        state = list(_state_tensors(optimizer)) if optimizer else []
        autocast = (
            torch.autocast("cpu", dtype=half) if half and not casts_parameters else nullcontext()
        )
        with _LiveStorages(copied) as live:
            live.start([*copied.parameters(), *copied.buffers(), *_gradients(copied), *state])
            _forward_backward(
                copied, params, rows, autocast, accumulates=accumulates, num_forward=num_forward
            )
        held = {
            "parameters": _bytes(copied.parameters()),
            "gradients": live.gradients_at_peak,
            "optimizer": _bytes(state),
            "buffers": _bytes(copied.buffers()),
        }
        return StepMemory(**held, activations=live.peak - sum(held.values()))


def step_flop(
    network: Network,
    params: TrainParams,
    rows: int,
    part: Callable[[Network], None] | None = None,
) -> int:
    """Count the floating-point operations of forward and backward of `rows` rows.

    `part` leaves in a copy of the network only what one process computes.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied = copy.deepcopy(network)
    with fake:
        if part:
            part(copied)
        with FlopCounterMode(display=False) as counter:
            _forward_backward(copied, params, rows, nullcontext(), accumulates=False)
    return int(counter.get_total_flops())


def _cast(network: Network, half: torch.dtype) -> None:
    adapt_to_half(network, half)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(half)


def _fill_gradients(network: Network) -> None:
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def _stepped_optimizer(network: Network, params: TrainParams) -> Optimizer:
    """Make an optimizer with its state, which it creates in its first step."""
    optimizer = optimizer_and_schedule(network, params, 1)["optimizer"]
    optimizer.step()
    return optimizer


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for value in tree_leaves([dict(state) for state in optimizer.state.values()])
        if isinstance(value, Tensor)
    ]


def _forward_backward(
    network: Network,
    params: TrainParams,
    rows: int,
    autocast: Any,
    *,
    accumulates: bool,
    num_forward: int = 0,
) -> None:
    """Run one batch; old gradients are freed after the forward pass, as Lightning does."""
    losses = []
    if num_forward and not accumulates:
        network.zero_grad()
    for _ in range(num_forward or 1):
        inputs, targets = _batch(network, rows)
        with autocast:
            losses.append(RowLosses(network, params)(network(inputs), targets).mean())
    if not accumulates:
        network.zero_grad()
    losses.pop(0).backward()


def _batch(network: Network, rows: int) -> tuple[Tensor, Tensor]:
    contract = network.spec.input
    target_dtype = getattr(torch, kind_of(network.spec.task).target.dtype)
    targets = torch.zeros(rows, dtype=target_dtype)
    dtype = torch.from_numpy(np.empty(0, contract.dtype)).dtype
    return torch.zeros((rows, *contract.shape), dtype=dtype), targets


def parameter_counts(network: nn.Module) -> tuple[int, int]:
    """Count (trainable, frozen) parameters."""
    counts = {True: 0, False: 0}
    for parameter in network.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return counts[True], counts[False]


def _gradients(network: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
