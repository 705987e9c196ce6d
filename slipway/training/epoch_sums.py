"""Metrics of an epoch as sums over its rows, so that they do not depend on how rows were cut over processes."""

import torch
from torch import Tensor, distributed


class EpochSums:
    """Sums over rows on the device, reduced over ranks when their means are asked for."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, *, counted: Tensor, **values: Tensor) -> None:
        """Add (B,) values where (B,) `counted` is true."""
        for name, value in {**values, "rows": torch.ones_like(counted)}.items():
            total = torch.where(counted, value.double(), 0.0).sum()
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._totals

    def means(self) -> dict[str, float]:
        """The mean over all rows of all ranks, by name."""
        totals = torch.stack(list(self._totals.values()))
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(totals)
        sums = dict(zip(self._totals, totals.tolist(), strict=True))
        rows = sums.pop("rows")
        return {name: total / rows for name, total in sums.items()}
