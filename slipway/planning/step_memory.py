"""Memory of one training step on one device, found without allocating it.

Forward, loss and backward run on fake tensors, which hold no data, and the storages that are alive
at each moment are added up. Not included are workspaces of kernels, the allocator's slack, the CUDA
context and the interpreter.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.training.networks.networks import Network
from slipway.training.recipe.losses import RowLosses
from slipway.training.recipe.optimizers import Update, optimizer_and_schedule
from slipway.training.recipe.precision import adapt_to_half


@dataclass(frozen=True)
class StepMemory:
    """Bytes of each kind at the moment when a step takes the most memory."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int  # the batch, temporary results, and values for the backward pass
    update: int = 0  # all gradients and temporary results while the optimizer updates the weights

    @property
    def peak(self) -> int:
        in_step = max(self.gradients + self.activations, self.update)
        return self.parameters + self.optimizer + self.buffers + in_step


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of live storages; records the peak, and the gradients' part of it."""

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
        """Count tensors that exist before the step."""
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
    update: Update = "singly",
) -> StepMemory:
    """Trace a step on batches of `rows` rows; `network` itself is not changed.

    Args:
        half: dtype of autocast, or of the parameters if `casts_parameters` is True.
        casts_parameters: casts the parameters to `half` as DeepSpeed does, and leaves out the
            optimizer, which DeepSpeed shards.
        accumulates: gradients are kept from one batch to the next.
        part: function that removes from a copy of the network what other processes compute.
        num_forward: number of micro-batches whose forward passes a pipeline runs before the first
            backward pass; old gradients are freed before them. 0 without a pipeline.
        update: the way in which the optimizer updates the weights.
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
        update_bytes = _update_bytes(copied, optimizer, state, update) if optimizer else 0
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
        activations = live.peak - sum(held.values())
        return StepMemory(**held, activations=activations, update=update_bytes)


def step_flop(
    network: Network,
    params: TrainParams,
    rows: int,
    part: Callable[[Network], None] | None = None,
    length: int | None = None,
) -> int:
    """Count the floating-point operations of forward and backward on `rows` rows.

    Args:
        part: removes from a copy of the network what other processes compute.
        length: of a row of tokens; None for the longest that the network reads.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied = copy.deepcopy(network)
    with fake:
        if part:
            part(copied)
        with FlopCounterMode(display=False) as counter:
            _forward_backward(copied, params, rows, nullcontext(), accumulates=False, length=length)
    return int(counter.get_total_flops())


def _cast(network: Network, half: torch.dtype) -> None:
    adapt_to_half(network, half)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(half)


def _fill_gradients(network: Network) -> None:
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def _stepped_optimizer(network: Network, params: TrainParams) -> Optimizer:
    """Return an optimizer after one step, because the first step allocates its state."""
    optimizer = optimizer_and_schedule(network, params, 1)["optimizer"]
    optimizer.step()
    return optimizer


def _update_bytes(
    network: Network, optimizer: Optimizer, state: list[Tensor], update: Update
) -> int:
    """Return the bytes of gradients and temporary results in a step of the optimizer."""
    held = [*network.parameters(), *state]
    if update == "fused":
        return _bytes(_gradients(network))
    for group in optimizer.param_groups:
        group["foreach"] = update == "together"
    with _LiveStorages(network) as live:
        live.start([*held, *_gradients(network)])
        optimizer.step()
    return int(live.peak) - _bytes(held)


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
    length: int | None = None,
) -> None:
    """Run forward and backward; without accumulation the old gradients are freed in between.

    With `num_forward` micro-batches of a pipeline they are freed before the first one.
    """
    losses = []
    if num_forward and not accumulates:
        network.zero_grad()
    for _ in range(num_forward or 1):
        inputs, targets = _batch(network, rows, length)
        with autocast:
            losses.append(RowLosses(network, params)(network(inputs), targets).mean())
    if not accumulates:
        network.zero_grad()
    while losses:  # further micro-batches add to the gradients of the first
        losses.pop(0).backward()


def _batch(network: Network, rows: int, length: int | None) -> tuple[Tensor, Tensor]:
    contract = network.spec.input
    target_dtype = getattr(torch, kind_of(network.spec.task).target.dtype)
    targets = torch.zeros(rows, dtype=target_dtype)
    dtype = torch.from_numpy(np.empty(0, contract.dtype)).dtype
    shape = contract.shape if length is None else (length,)
    return torch.zeros((rows, *shape), dtype=dtype), targets


def parameter_counts(network: nn.Module) -> tuple[int, int]:
    """Return the numbers of (trainable, frozen) parameters."""
    counts = {True: 0, False: 0}
    for parameter in network.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return counts[True], counts[False]


def _gradients(network: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
