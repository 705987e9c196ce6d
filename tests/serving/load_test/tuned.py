"""A service whose capacity follows a formula, for tests of the tuner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipway.serving.load_test.candidates import (
    SettingsCandidate,
)
from slipway.serving.load_test.figures import Bench, Figures
from slipway.serving.load_test.tuner import Goal, Outcome, Tuner

PRESENT = SettingsCandidate(1, 2, 16)


P99_MS = 50.0


def figures(
    rate: float | None,
    connections: int | None,
    seconds: float,
    answered: float,
    p99_ms: float,
    failed: int = 0,
) -> Figures:
    refused = {"429": failed} if failed else {}
    return Figures(
        rate,
        connections,
        seconds,
        round(answered),
        refused,
        p99_ms / 4,
        p99_ms / 2,
        p99_ms,
        client_fraction=0.2,
    )


class Formula:
    """Simulated services on a fake clock; a candidate sustains the rate `capacity(candidate)`."""

    def __init__(
        self, capacity: Callable[[SettingsCandidate], float], latency_ms: float = 10.0
    ) -> None:
        self.capacity = capacity
        self.latency_ms = latency_ms
        self.now = 0.0
        self.opened: list[SettingsCandidate] = []
        self.most_at_once = 0
        self.highest_sent = 0.0
        self._open = 0

    @contextmanager
    def __call__(self, candidate: SettingsCandidate) -> Iterator[Bench]:
        self.opened.append(candidate)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        self.now += 2.0
        try:
            yield _FormulaBench(self, self.capacity(candidate))
        finally:
            self._open -= 1


class _FormulaBench:
    def __init__(self, formula: Formula, capacity: float) -> None:
        self._formula = formula
        self._capacity = capacity

    def at_rate(self, rate: float, seconds: float) -> Figures:
        self._formula.now += seconds
        self._formula.highest_sent = max(self._formula.highest_sent, rate)
        if rate > self._capacity:
            return figures(
                rate,
                None,
                seconds,
                self._capacity * seconds,
                900,
                failed=round((rate - self._capacity) * seconds) + 1,
            )
        return figures(rate, None, seconds, rate * seconds, self._formula.latency_ms)

    def with_connections(self, connections: int, seconds: float) -> Figures:
        self._formula.now += seconds
        waiting_ms = 1000 * connections / self._capacity
        return figures(
            None,
            connections,
            seconds,
            self._capacity * seconds,
            max(waiting_ms, self._formula.latency_ms),
        )


def tuned(
    formula: Formula,
    goal: Goal,
    seconds: float = 120,
    present: SettingsCandidate = PRESENT,
    cores: int = 2,
) -> Outcome:
    return Tuner(formula, goal, seconds, clock=lambda: formula.now).run(
        present, cores, 64, report=lambda tried: None
    )
