"""Content of `reports/leaderboard.json`: every variant on every provider, and the choice.

Accuracy and size belong to the graph, speed and memory to the machine that exported it.
"""

import math
from typing import Literal

from slipway.artifacts.bundle import Choice, Provider, VariantFigures
from slipway.kinds.registry import Task
from slipway.system.contract import Contract


class Attempt(Contract):
    """One attempt to quantize a static int8 graph."""

    range_method: Literal["minmax", "percentile", "entropy"]
    in_fp32: list[str]  # layers that were not quantized
    metric_loss: float | None  # on validation rows; null for answers that are not finite

    @property
    def loss(self) -> float:
        """The metric loss; infinity if the answers were not finite."""
        return math.inf if self.metric_loss is None else self.metric_loss


class LeaderboardLine(Contract):
    """One variant on one provider: its figures, and values that the bundle does not store."""

    variant: str
    provider: str
    is_meant_for: bool  # else it is measured, but never chosen
    flipped: list[str]  # ids of the validation rows whose label is not fp32's
    rows_per_second: dict[int, float]  # medians by batch size
    figures: VariantFigures


class Leaderboard(Contract):
    """The content of `reports/leaderboard.json`."""

    task: Task
    metric: str  # "accuracy" or "rmse"
    rows: int  # of the validation split
    lines: list[LeaderboardLine]
    choice: dict[Provider, Choice]
    absent: dict[str, str]  # unavailable providers, each with the reason
    left_out: dict[str, str]  # requested variants that were not made, each with the reason
    attempts: dict[str, list[Attempt]]  # by variant, if it took more than one

    def lines_on(self, provider: str) -> list[LeaderboardLine]:
        """Return the lines of one provider."""
        return [line for line in self.lines if line.provider == provider]
