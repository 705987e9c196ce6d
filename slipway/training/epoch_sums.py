"""Metrics of an epoch as sums over its rows, so that they do not depend on how rows were cut over processes."""

import torch
from torch import Tensor, distributed


class EpochSums:
    """Sums over rows on the device, reduced over ranks when their means are asked for."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}  # () float64 by name, of this rank alone

    def add(self, *, counted: Tensor, **values: Tensor) -> None:
        """Add (B,) values where (B,) `counted` is true."""
        for name, value in {**values, "rows": torch.ones_like(counted)}.items():
            total = torch.where(counted, value.double(), 0.0).sum()
            self.totals[name] = self.totals[name] + total if name in self.totals else total

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self.totals

    def means(self) -> dict[str, float]:
        """The mean over all rows of all ranks, by name."""
        names = sorted(
            self.totals
        )  # the same order on every rank, which a file that they are read from does not keep
        totals = torch.stack([self.totals[name] for name in names])
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(totals)
        sums = dict(zip(names, totals.tolist(), strict=True))
        rows = sums.pop("rows")
        return {name: total / rows for name, total in sums.items()}
