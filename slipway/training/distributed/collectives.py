"""Collective operations that also work in a single process without a process group."""

from typing import Any

import torch
from torch import distributed


def num_ranks() -> int:
    """Return the number of processes in the process group; 1 without a group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def gather_objects(own: Any) -> list[Any]:
    """Return the objects `own` of all ranks, ordered by rank. Every rank has to call it."""
    if num_ranks() == 1:
        return [own]
    found: list[Any] = [None] * num_ranks()
    distributed.all_gather_object(found, own)
    return found


class MaxReducer:
    """Computes the maximum over all ranks on the CPU, so that no GPU has to synchronize."""

    def __init__(self) -> None:
        self._group: Any = None

    def highest(self, own: int) -> int:
        """Return the maximum of `own` over all ranks. Every rank has to call it."""
        if num_ranks() == 1:
            return own
        if self._group is None and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(backend="gloo")
        highest = torch.tensor([own])
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self._group)
        return int(highest)
