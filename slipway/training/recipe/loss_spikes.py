"""Loss spikes: steps whose loss lies far above the recent ones.

A step is a spike if its mean loss over the rows of all processes exceeds the mean of the last 128
losses by more than 6 of their standard deviations. Steps that were skipped are not among the 128.
Before there are 128, no step is a spike.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed

from slipway.training.distributed.collectives import num_ranks

WINDOW, DEVIATIONS = 128, 6.0


class LossWindow:
    """The losses of the last 128 applied steps of a training."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    def values(self) -> list[float]:
        """Return the losses, the oldest first, for a checkpoint."""
        return list(self._losses)

    def describe_spike(self, loss: float) -> str | None:
        """Return a text on how far `loss` lies above recent losses; None if it is not a spike."""
        if len(self._losses) < WINDOW or not math.isfinite(loss):
            return None
        mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
        if loss <= mean + DEVIATIONS * deviation:
            return None
        return f"more than {DEVIATIONS:g} standard deviations above the mean {mean:.4g} of the last"


def mean_over_ranks(batches: Sequence[Tensor]) -> float:
    """Return the mean loss of a step over its batches (B,) on all ranks; equal on every rank."""
    own = torch.stack([losses.double().mean() for losses in batches]).mean()
    if num_ranks() == 1:
        return float(own)
    # Added in the order of the ranks: an all-reduce may round differently on each of them.
    parts = [torch.empty_like(own) for _ in range(num_ranks())]
    distributed.all_gather(parts, own)
    return float(torch.stack(parts).mean())
