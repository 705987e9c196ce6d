"""Conversions between whole tensors and tensors divided over processes (torch's DTensor).

Tensors that are not divided pass through unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm


def whole(tensor: Tensor) -> Tensor:
    """Gather the whole tensor from all ranks. Every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares its memory with `tensor`."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def divided_like(value: Tensor, like: Tensor) -> Tensor:
    """Divide the whole tensor `value` over the processes in the same way as `like`.

    Every rank passes the same whole value and takes its part from it, without communication.
    """
    if not isinstance(like, DTensor):
        # Strategy `pipeline` keeps an empty tensor in place of a weight of another process.
        return value if like.numel() else torch.empty_like(like)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


@torch.no_grad()
def divided_from(part: Tensor, like: Tensor) -> Tensor:
    """Return a divided tensor that has this rank's `part`, divided and shaped as `like`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def num_parts(tensor: Tensor) -> int:
    """Return the number of parts into which processes divide `tensor`."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def by_division(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the processes that divide them; torch cannot mix groups in one operation.

    Whole tensors are a group as well.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all elements of all tensors, (). Every rank has to call it."""
    norms = [whole(get_total_norm(group)) for group in by_division(tensors)]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state with whole tensors into an optimizer whose weights may be divided.

    A tensor is merged by its method `contiguous` before it is divided, one after the other.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        index: {
            key: _state_like(value.contiguous(), weights[index])
            if getattr(value, "shape", ())
            else value
            for key, value in values.items()
        }
        for index, values in saved["state"].items()
        if weights[index].numel()  # otherwise another process holds the weight
    }
    optimizer.load_state_dict({**saved, "state": state})


@torch.no_grad()
def _state_like(value: Tensor, weight: Tensor) -> Tensor:
    """Divide the whole tensor `value` as `weight`, in the memory layout of `weight`."""
    # torch's fused kernels on the CPU read weights and states in the order of memory. Weights in
    # `channels_last` have an order of their own, which not all strategies save.
    state = torch.empty_like(weight, dtype=value.dtype, requires_grad=False)
    local(state).copy_(local(divided_like(value, weight)))
    return state


def zero_part(value: Tensor, weight: Any) -> Tensor:
    """Return this rank's flat part of the whole tensor `value`, as ZeRO-3 has divided `weight`.

    Zeros pad the part of the last rank. A `value` that is a part already is returned.
    """
    size, rank = weight.ds_tensor.ds_numel, distributed.get_rank()
    if value.shape == (size,) != weight.ds_shape:
        return value
    flat = value.new_zeros(size * distributed.get_world_size())
    flat[: value.numel()] = value.flatten()
    return flat[rank * size : (rank + 1) * size].clone()
