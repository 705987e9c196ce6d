"""A clock that moves only when code sleeps or reads it; it replaces the module `time`."""


class FakeClock:
    """Replaces `time` in code that measures. Sleeping takes no processor time."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now = 0.0
        self._tick_s = tick_s

    def perf_counter(self) -> float:
        """Return the clock's time, and advance it by a tick."""
        self.now += self._tick_s
        return self.now

    monotonic = perf_counter

    def process_time(self) -> float:
        """Return 0: nothing computes."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


CLOCK = FakeClock(tick_s=1e-6)
