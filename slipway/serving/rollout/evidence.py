"""Counts the outcomes of a candidate's requests, and decides whether to roll it back.

Each worker counts its own requests and writes the counts to its report. The test uses the sum over
all workers, including those that stopped or died. All methods are thread-safe and do not block.
"""

import threading
from collections import deque
from collections.abc import Iterable

import numpy as np

from slipway.serving.rollout.sequential import LOG_THRESHOLD, EventCounts, log_evidence
from slipway.serving.rollout.state import Candidate
from slipway.system.contract import Contract

EVENTS = ("errors", "slow", "quality")
SHADOWED = ("agrees", "differs", "failed", "dropped")
_NUM_LATENCIES = 1024


class Counts(Contract):
    """The counts of one worker, or their sums over workers, as pairs (candidate, stable model)."""

    events: dict[str, dict[str, tuple[int, int]]]  # pairs by event, then by fraction as text
    requests: tuple[int, int]  # requests that were answered or failed
    shadowed: dict[str, int]  # number of shadowed requests by outcome
    fault: str  # the candidate's first invalid answer; empty if there was none

    def of(self, event: str) -> EventCounts:
        """Return the counts of one event, by the fraction that the candidate had at the time."""
        return {float(fraction): pair for fraction, pair in self.events.get(event, {}).items()}

    @property
    def disagreements(self) -> tuple[int, int]:
        """Return how many shadowed requests differ or have no prediction, and how many agree."""
        return self.shadowed["differs"] + self.shadowed["failed"], self.shadowed["agrees"]


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts over workers."""
    events: dict[str, dict[str, tuple[int, int]]] = {event: {} for event in EVENTS}
    requests, shadowed, fault = (0, 0), dict.fromkeys(SHADOWED, 0), ""
    for one in counts:
        for event, by_fraction in one.events.items():
            for fraction, pair in by_fraction.items():
                events[event][fraction] = _added(events[event].get(fraction, (0, 0)), pair)
        requests = _added(requests, one.requests)
        shadowed = {outcome: number + one.shadowed[outcome] for outcome, number in shadowed.items()}
        fault = fault or one.fault
    return Counts(events=events, requests=requests, shadowed=shadowed, fault=fault)


def _added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def log_evidences(counts: Counts, disagreement: float) -> dict[str, float]:
    """Return the natural logarithm of the evidence against the candidate, by test.

    `disagreement` is the fraction of predictions that may differ from the stable model's. A value
    of LOG_THRESHOLD or more rolls the candidate back.
    """
    return {event: log_evidence(counts.of(event)) for event in EVENTS} | {
        "disagreement": log_evidence({disagreement: counts.disagreements})
    }


def rollback_reason(counts: Counts, candidate: Candidate, disagreement: float) -> str:
    """Return the reason for rolling the candidate back, as a clause; "" if there is none."""
    if counts.fault:
        return counts.fault
    reasons = {
        "errors": "its requests fail more often than the stable model's",
        "slow": f"its answers take longer than {candidate.slow_s or 0:.3g} s more often than the "
        "stable model's",
        "quality": "by feedback its answers are wrong more often than the stable model's",
        "disagreement": f"its answers differ from the stable model's on more than "
        f"{100 * disagreement:.3g} % of the requests",
    }
    for test, value in log_evidences(counts, disagreement).items():
        if value >= LOG_THRESHOLD:
            return f"{reasons[test]}: {_figures(counts, test)}"
    return ""


def _figures(counts: Counts, test: str) -> str:
    if test == "disagreement":
        return f"{counts.disagreements[0]} of {sum(counts.disagreements)} shadowed"
    candidate, stable = (sum(pair[side] for pair in counts.of(test).values()) for side in (0, 1))
    return (
        f"{candidate} of {counts.requests[0]} of its requests, "
        f"{stable} of {counts.requests[1]} of the stable model's"
    )


class Evidence:
    """Counts the outcomes of a candidate's requests in one worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, dict[str, list[int]]] = {event: {} for event in EVENTS}
        self._requests = [0, 0]
        self._shadowed = dict.fromkeys(SHADOWED, 0)
        self._fault = ""
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)  # the stable model's, in s

    def request(self, *, of_candidate: bool, seconds: float) -> None:
        """Count a request to one of the two models, with its duration."""
        with self._lock:
            self._requests[not of_candidate] += 1
            if not of_candidate:
                self._latencies.append(seconds)

    def event(self, event: str, fraction: float, *, of_candidate: bool) -> None:
        """Count an event, one of EVENTS. `fraction` is the candidate's when it was drawn."""
        with self._lock:
            self._events[event].setdefault(repr(fraction), [0, 0])[not of_candidate] += 1

    def shadow(self, outcome: str) -> None:
        """Count a shadowed request by its outcome, one of SHADOWED."""
        with self._lock:
            self._shadowed[outcome] += 1

    def fault(self, reason: str) -> None:
        """Record an invalid prediction of the candidate, which rolls it back at once."""
        with self._lock:
            self._fault = self._fault or reason

    def counts(self) -> Counts:
        """Return a snapshot of the counts."""
        with self._lock:
            events = {
                event: {fraction: (pair[0], pair[1]) for fraction, pair in by_fraction.items()}
                for event, by_fraction in self._events.items()
            }
            requests = (self._requests[0], self._requests[1])
            return Counts(
                events=events, requests=requests, shadowed=dict(self._shadowed), fault=self._fault
            )

    def stable_latency_s(self) -> tuple[float, int]:
        """Return the 95th percentile of the stable model's recent latencies, and their number.

        The percentile is in seconds, and 0 without requests.
        """
        with self._lock:
            latencies = list(self._latencies)
        return (float(np.percentile(latencies, 95)) if latencies else 0.0), len(latencies)
