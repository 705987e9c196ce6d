"""Counts of the request path in plain numbers, brought to prometheus_client's afterwards.

A histogram of prometheus_client takes 4 µs for each value where workers write to files (two locks, two writes, a search), six times
for each prediction; here it is a tenth of that. Only the event loop adds. `flush` may be called by any thread: it reads totals that
are never reset, so nothing is counted twice or lost between two threads.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from prometheus_client import Counter, Gauge, Histogram


class Tally(Protocol):
    """What is counted here and shown by prometheus_client."""

    def flush(self) -> None:
        """Bring what was counted since the last time. One thread at a time."""


class Count:
    """How often something happened."""

    __slots__ = ("_counter", "_shown", "total")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.total = self._shown = 0  # so often; whoever counts adds to the total

    def flush(self) -> None:
        """As `Tally.flush`."""
        total = self.total
        if total > self._shown:
            self._counter.inc(total - self._shown)
            self._shown = total


class Level:
    """How much of something there is: `now` says it whenever it is to be written, on any thread."""

    __slots__ = ("_gauge", "_now", "_shown")

    def __init__(self, gauge: Gauge, now: Callable[[], int]) -> None:
        self._gauge = gauge
        self._now = now
        self._shown = 0

    def flush(self) -> None:
        """As `Tally.flush`."""
        level = self._now()
        if level != self._shown:
            self._gauge.set(level)
            self._shown = level


class Distribution:
    """How a quantity is distributed over the `bounds` of a histogram, each the largest value of its bucket.

    A value is noted when it is observed, and put into its bucket with others when they are written: one after the other takes a
    fraction of what each takes between all else that is done for a request.
    """

    __slots__ = (
        "_bounds",
        "_counts",
        "_histogram",
        "_new",
        "_shown_counts",
        "_shown_sum",
        "_sum",
        "observe",
    )

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram = histogram
        self._bounds = np.array(bounds, np.float64)
        self._new: list[float] = []  # in no bucket yet
        self.observe: Callable[[float], None] = self._new.append  # one more value
        self._counts = [0] * (len(bounds) + 1)  # the last is what is beyond all bounds
        self._shown_counts = [0] * (len(bounds) + 1)
        self._sum = self._shown_sum = 0.0

    def include(self, counts: Sequence[int], total: float) -> None:
        """Values that were counted elsewhere, by the same bounds, and their sum."""
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._sum += total

    def flush(self) -> None:
        """As `Tally.flush`."""
        new = self._new[:]
        if new:
            del self._new[: len(new)]  # more may have come meanwhile, behind these
            values = np.array(new, np.float64)
            self.include(
                np.bincount(np.searchsorted(self._bounds, values)).tolist(), float(values.sum())
            )
        # prometheus_client (0.26) has no public way to add many values at once; a test watches these two names.
        counts, total = list(self._counts), self._sum
        for index, count in enumerate(counts):
            if count > self._shown_counts[index]:
                self._histogram._buckets[index].inc(count - self._shown_counts[index])
        if total != self._shown_sum:
            self._histogram._sum.inc(total - self._shown_sum)
        self._shown_counts, self._shown_sum = counts, total
