"""Threads of a training process on a CPU: how many it takes, and if a given number can be had."""

import os
import sys

from slipway.system.cores import num_cores
from slipway.training.distributed.strategies import Placement


def own_threads(placement: Placement) -> int | None:
    """The cores that this process may use, shared with the others of this node; None on a GPU."""
    if placement.accelerator != "cpu":
        return None
    return min(_limit(), max(1, num_cores() // placement.devices))


def can_have(threads: int) -> bool:
    """Tell if OpenMP gives this process that many threads. It may have fewer cores, which only makes it slower."""
    return threads <= _limit()


def _limit() -> int:
    """`OMP_THREAD_LIMIT`, which OpenMP obeys and torch does not report."""
    text = os.environ.get("OMP_THREAD_LIMIT", "")
    return int(text) if text.isdecimal() and int(text) > 0 else sys.maxsize
