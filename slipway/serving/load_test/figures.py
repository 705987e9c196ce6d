"""The results of one load test: throughput, latency, failures, and the client's CPU time.

Latency is measured from the time at which a request was due, not from the time it was sent. So it
includes delays of an overloaded client (slipway/serving/load_test/load.py).
"""

import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from slipway.serving.load_test.load import (
    REFUSED,
    Answer,
    by_status,
    closed_loop,
    latency,
    open_loop,
    run,
)
from slipway.serving.load_test.samples import Samples

CLIENT_IS_FULL = 0.9  # fraction of one core above which the client may be the bottleneck
_REST_S = 1.0  # pause after an overload, until the service admits requests normally again


@dataclass(frozen=True)
class Figures:
    """Results of one load test run."""

    target_rate: float | None  # requests per second; None in a closed loop
    connections: int | None  # callers of a closed loop
    seconds: float
    answered: int  # requests answered with status 200
    failed: dict[str, int]  # other answers by status; "no answer" for broken connections
    p50_ms: float | None  # None without any answer
    p95_ms: float | None
    p99_ms: float | None
    client_fraction: float  # the client's processor time, as a fraction of one core

    @property
    def rate(self) -> float:
        """Successful responses per second."""
        return self.answered / self.seconds

    def holds(self, p99_ms: float) -> bool:
        """Return True if all requests succeeded, 99 % of them within `p99_ms` milliseconds."""
        return not self.failed and self.p99_ms is not None and self.p99_ms <= p99_ms


class Bench(Protocol):
    """Puts a running service under load, and measures it."""

    def at_rate(self, rate: float, seconds: float) -> Figures:
        """Run an open loop: `rate` requests per second, at random times."""

    def with_connections(self, connections: int, seconds: float) -> Figures:
        """Run a closed loop: each caller waits for the response before its next request."""


class HttpBench:
    """Runs load tests over HTTP on the service at `url`."""

    def __init__(self, url: str, samples: Samples) -> None:
        self._url = url
        self._samples = samples
        self._was_overloaded = False
        self._seed = 0

    def at_rate(self, rate: float, seconds: float) -> Figures:
        """Run an open loop of `rate` requests per second. Each call draws new random times."""
        self._seed += 1
        return self._measure(
            open_loop(self._url, self._samples, rate, seconds, self._seed), seconds, rate, None
        )

    def with_connections(self, connections: int, seconds: float) -> Figures:
        """Run a closed loop of `connections` callers for `seconds`."""
        return self._measure(
            closed_loop(self._url, self._samples, connections, seconds=seconds),
            seconds,
            None,
            connections,
        )

    def _measure(
        self,
        load: Coroutine[Any, Any, list[Answer]],
        seconds: float,
        rate: float | None,
        connections: int | None,
    ) -> Figures:
        if self._was_overloaded:
            time.sleep(_REST_S)
        began, used = time.perf_counter(), time.process_time()
        answers = run(load)
        client_fraction = (time.process_time() - used) / (time.perf_counter() - began)
        figures = figures_of(answers, seconds, client_fraction, rate, connections)
        self._was_overloaded = bool(figures.failed)
        return figures


def figures_of(
    answers: list[Answer],
    seconds: float,
    client_fraction: float,
    target_rate: float | None,
    connections: int | None,
) -> Figures:
    """Compute throughput, latency percentiles and failures from the responses of a load test."""
    statuses = by_status(answers)
    answered = statuses.pop(200, 0)
    failed = {
        "no answer" if status == REFUSED else str(status): count
        for status, count in sorted(statuses.items())
    }
    p50, p95, p99 = (
        1000 * latency(answers, share) if answered else None for share in (0.5, 0.95, 0.99)
    )
    return Figures(
        target_rate, connections, seconds, answered, failed, p50, p95, p99, client_fraction
    )
