"""What one load did: how many were answered, how long they waited, what the client itself took.

A latency counts from the time at which the request was due (serving/load_test/load.py), so that a full client shows as waiting, too.
"""

import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from serving.load_test.load import REFUSED, Answer, by_status, closed_loop, latency, open_loop, run
from serving.load_test.samples import Samples

CLIENT_IS_FULL = 0.9  # of one core: from here on the client may be what is measured
_REST_S = 1.0  # after an overload: the service refuses more than usual until the demand has fallen


@dataclass(frozen=True)
class Figures:
    """One load of some seconds."""

    asked: (
        float | None
    )  # requests a second; None where callers wait for their answer before they ask again
    connections: int | None  # such callers
    seconds: float
    answered: int  # with 200
    failed: dict[
        str, int
    ]  # answers that are not 200, by status; "no answer" where a connection broke
    p50_ms: float | None  # None where nothing was answered
    p95_ms: float | None
    p99_ms: float | None
    client_share: float  # of one core

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answered / self.seconds

    def holds(self, p99_ms: float) -> bool:
        """Whether everything was answered, and 99 % of it in time."""
        return not self.failed and self.p99_ms is not None and self.p99_ms <= p99_ms


class Bench(Protocol):
    """A running service that can be put under load."""

    def at_rate(self, rate: float, seconds: float) -> Figures:
        """Requests at random times, `rate` a second, whatever the answers do."""

    def with_connections(self, connections: int, seconds: float) -> Figures:
        """So many callers who each wait for their answer before they ask again."""


class HttpBench:
    """The service at `url`."""

    def __init__(self, url: str, samples: Samples) -> None:
        self._url = url
        self._samples = samples
        self._was_overloaded = False
        self._seed = 0

    def at_rate(self, rate: float, seconds: float) -> Figures:
        """As `Bench.at_rate`; each call has other random times."""
        self._seed += 1
        return self._measure(
            open_loop(self._url, self._samples, rate, seconds, self._seed), seconds, rate, None
        )

    def with_connections(self, connections: int, seconds: float) -> Figures:
        """As `Bench.with_connections`."""
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
        client_share = (time.process_time() - used) / (time.perf_counter() - began)
        figures = figures_of(answers, seconds, client_share, rate, connections)
        self._was_overloaded = bool(figures.failed)
        return figures


def figures_of(
    answers: list[Answer],
    seconds: float,
    client_share: float,
    asked: float | None,
    connections: int | None,
) -> Figures:
    """The figures of what came back."""
    statuses = by_status(answers)
    answered = statuses.pop(200, 0)
    failed = {
        "no answer" if status == REFUSED else str(status): count
        for status, count in sorted(statuses.items())
    }
    p50, p95, p99 = (
        1000 * latency(answers, share) if answered else None for share in (0.5, 0.95, 0.99)
    )
    return Figures(asked, connections, seconds, answered, failed, p50, p95, p99, client_share)
