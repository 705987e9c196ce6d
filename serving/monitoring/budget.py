"""How much of a core the watching may take: what is beyond it is left out, at random, and counted.

The thread shares its worker's interpreter with the event loop, so every microsecond it takes is missing there. A budget in processor time
holds whatever the model, the size of its inputs and the load are; a budget in rows would not.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Allowance:
    """At most `share` of one core in the long run, and `burst_s` seconds of processor time at once; for one thread.

    Work is done in small pieces, each as long as anything is left: it is overdrawn by one piece at most, which later time pays.
    """

    def __init__(
        self,
        share: float,
        burst_s: float,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._share = share
        self._burst_s = burst_s
        self._clock, self._spent = clock, spent
        self._balance_s = burst_s
        self._since = clock()

    def is_left(self) -> bool:
        """Whether another piece of work may begin."""
        now = self._clock()
        self._balance_s = min(self._burst_s, self._balance_s + (now - self._since) * self._share)
        self._since = now
        return self._balance_s > 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """A piece of work; the processor time it takes is taken off."""
        begun = self._spent()
        try:
            yield
        finally:
            self.take(self._spent() - begun)

    def take(self, seconds: float) -> None:
        """What was spent elsewhere."""
        self._balance_s -= seconds
