"""How much of a core the watching may take: what is beyond it is left out, at random, and counted.

The thread shares its worker's interpreter with the event loop, so every microsecond it takes is missing there. A budget in processor time
holds whatever the model, the size of its inputs and the load are; a budget in rows would not.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Allowance:
    """At most `share` of one core in the long run, and `burst_s` seconds of processor time at once; for one thread."""

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._burst_s = burst_s
        self._clock = clock
        self._balance_s = burst_s
        self._since = clock()
        self._row_s = 0.0  # what a row has cost so far; unknown at first

    def affordable(self, num_rows: int) -> int:
        """How many of so many rows may be worked on now; of the first ones all, since their cost is not known yet."""
        now = self._clock()
        self._balance_s = min(self._burst_s, self._balance_s + (now - self._since) * self._share)
        self._since = now
        if not self._row_s:
            return num_rows
        return max(0, min(num_rows, int(self._balance_s / self._row_s)))

    @contextmanager
    def spending(self, num_rows: int, spent: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Work on so many rows; what it takes is taken off."""
        begun = spent()
        try:
            yield
        finally:
            seconds = spent() - begun
            self._balance_s -= seconds
            self._row_s = 0.8 * (self._row_s or seconds / num_rows) + 0.2 * seconds / num_rows
