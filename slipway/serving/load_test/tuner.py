"""Finds the settings with the highest rate within a latency goal.

First a bisection measures each candidate once, which takes most of the time. A candidate with less
than half of the best rate is abandoned at once. Then the two best candidates, the finalists, are
measured in alternating rounds. A rate is confirmed if the candidate holds it in most rounds; if
not, a lower rate is tried. Both finalists run at the same time, and one is idle while the other is
measured, so that other load on the machine affects both alike.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from slipway.serving.load_test import candidates
from slipway.serving.load_test.candidates import SettingsCandidate
from slipway.serving.load_test.figures import Bench, Figures
from slipway.serving.load_test.search import (
    LOWEST,
    RESOLUTION,
    LoadTrial,
    carried,
    next_rate,
    on_grid,
)
from slipway.system.errors import UnavailableError

Open = Callable[[SettingsCandidate], AbstractContextManager[Bench]]

NUM_ROUNDS = 3
_WARM_CONNECTIONS = 16
_MIN_TRIALS, _MAX_TRIALS = 6, 14  # of a candidate
_TRYING = 0.6  # fraction of the time for trials; the rest is for the rounds
_MEASUREMENTS = 120  # measured: this many fit into the time
_SHORTEST_S, _LONGEST_S = 0.3, 5.0
# A measurement should have 30 requests, and may take four times as long to get them.
_MIN_REQUESTS, _MAX_EXTENSION = 30, 4.0
_NUM_FINALISTS = 2
_ROUND = 2.0  # times the length of a trial: the 99th percentile needs many requests
_HOPELESS = 0.5  # fraction of the best rate below which a candidate is abandoned
_CLEARLY = 1.1  # factor of a clear gain; with less, the earlier candidate wins
_OVERTIME = 1.25  # limit as a multiple of the duration, while no rate was confirmed
# Steps of RESOLUTION after the first missed rate; doubled after each further one.
_STEPS_DOWN = 2
_FIRST_GUESS = 0.7  # first rate to try, as a fraction of the closed-loop rate
_TOO_MUCH = 2.0  # highest rate that is sent, as a multiple of the closed-loop rate


@dataclass(frozen=True)
class Goal:
    """Latency goal: 99 % of the responses within `p99_ms` milliseconds.

    It applies at `rate` requests per second (open loop), or for `connections` callers that wait for
    each response (closed loop).
    """

    p99_ms: float
    rate: float | None
    connections: int | None

    def is_met_by(self, figures: Figures) -> bool:
        """Return True if the figures meet the latency goal at the goal's full rate."""
        return figures.holds(self.p99_ms) and (
            self.rate is None or figures.target_rate == self.rate
        )

    def __str__(self) -> str:
        load = (
            f"{self.rate:g} requests/s"
            if self.rate is not None
            else f"{self.connections} connections"
        )
        return f"{load} with 99 % within {self.p99_ms:g} ms"


@dataclass
class Tried:
    """A candidate, with the rates that were measured for it."""

    candidate: SettingsCandidate
    most: float = 0.0  # closed-loop answers per second
    rate: float | None = None  # sustained when tried; None if not even the lowest was
    at_load: Figures | None = None
    problem: str = ""  # reason why the trial ended early
    rounds: list[Figures] = field(default_factory=list)  # at `confirmed` or the last tried rate
    load_rounds: list[Figures] = field(default_factory=list)  # measured at the goal's load
    confirmed: float | None = None  # rate held in most rounds


@dataclass(frozen=True)
class Outcome:
    """The result of a search: all tried candidates, and the best one."""

    goal: Goal
    all_tried: list[Tried]
    best: Tried
    is_met: bool  # the goal was met in most rounds
    seconds: float

    @property
    def headroom(self) -> float | None:
        """Confirmed rate relative to the goal's rate, minus 1. None for a closed loop."""
        return (
            self.best.confirmed / self.goal.rate - 1
            if self.best.confirmed is not None and self.goal.rate
            else None
        )


@dataclass
class _Finalist:
    """One of the two best candidates, with its running service, while its rate is confirmed."""

    tried: Tried
    bench: Bench
    rate: float  # rate to try next
    rounds: list[Figures] = field(default_factory=list)  # rounds measured at that rate
    missed: set[float] = field(default_factory=set)


class Tuner:
    """Searches for the best settings within about `seconds`. `clock` returns seconds."""

    def __init__(
        self,
        open_bench: Open,
        goal: Goal,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = open_bench
        self._goal = goal
        self._clock = clock
        self._began = clock()
        self._seconds = seconds
        self._each_s = min(max(seconds / _MEASUREMENTS, _SHORTEST_S), _LONGEST_S)
        self.all_tried: list[Tried] = []

    def run(
        self,
        present: SettingsCandidate,
        cores: int,
        largest_batch: int,
        report: Callable[[Tried], None],
    ) -> Outcome:
        """Try the present settings and other candidates, then confirm the best ones.

        Calls `report` after each candidate.
        """
        end = self._began + _TRYING * self._seconds
        sharings = candidates.sharings(present, cores)
        self._try_all(sharings, len(candidates.batches(present, largest_batch)), end, report)
        self._try_all(
            candidates.batches(self._ranked(self.all_tried)[0].candidate, largest_batch),
            0,
            end,
            report,
        )
        finalists = self._ranked(self.all_tried)[:_NUM_FINALISTS]
        self._confirm(finalists)
        best = self._ranked(
            [tried for tried in self.all_tried if tried in finalists and tried.load_rounds]
        )[0]
        return Outcome(
            self._goal, self.all_tried, best, self._is_met(best), self._clock() - self._began
        )

    def _try_all(
        self,
        coming: list[SettingsCandidate],
        num_later: int,
        end: float,
        report: Callable[[Tried], None],
    ) -> None:
        """Measure the candidates in order, while time is left for `num_later` later ones too.

        The first candidate is always tried.
        """
        for position, candidate in enumerate(coming):
            left = end - self._clock()
            if self.all_tried and left <= 0:
                return
            self.all_tried.append(
                self._try(candidate, end - left + left / (len(coming) - position + num_later))
            )
            report(self.all_tried[-1])

    def _try(self, candidate: SettingsCandidate, end: float) -> Tried:
        tried = Tried(candidate)
        try:
            with self._open(candidate) as bench:
                self._search(tried, bench, end)
        except UnavailableError as error:
            if not self.all_tried:  # the first candidate: the present settings
                raise
            tried.problem = str(error)
        return tried

    def _search(self, tried: Tried, bench: Bench, end: float) -> None:
        tried.most = bench.with_connections(_WARM_CONNECTIONS, self._each_s).rate
        best = max((other.rate or 0 for other in self.all_tried), default=0)
        if tried.most < _HOPELESS * best:
            tried.problem = "abandoned: it answers less than half of the best rate"
            return
        tried.at_load = self._at_load(bench, tried, self._each_s)
        trials = (
            []
            if tried.at_load.target_rate is None
            else [LoadTrial(tried.at_load.target_rate, tried.at_load.holds(self._goal.p99_ms))]
        )
        while len(trials) < _MIN_TRIALS or (len(trials) < _MAX_TRIALS and self._clock() < end):
            rate = next_rate(trials, _FIRST_GUESS * tried.most)
            if rate is None:
                break
            trials.append(
                LoadTrial(rate, self._at_rate(bench, rate, self._each_s).holds(self._goal.p99_ms))
            )
        tried.rate = carried(trials)

    def _confirm(self, best: list[Tried]) -> None:
        """Measure the best candidates in alternating rounds, and store their confirmed rates.

        A missed rate is lowered, and a held one is raised while time is left.
        """
        with ExitStack() as stack:
            finalists = self._opened(best, stack)
            for number in range(NUM_ROUNDS):
                for one in _in_turns(finalists, number):
                    one.tried.load_rounds.append(
                        self._at_load(one.bench, one.tried, _ROUND * self._each_s)
                    )
            open_rates = [one for one in finalists if one.tried.rate is not None]
            while open_rates:
                for one in open_rates:
                    one.rounds = []
                for number in range(NUM_ROUNDS):
                    for one in _in_turns(open_rates, number):
                        one.rounds.append(self._at_rate(one.bench, one.rate, _ROUND * self._each_s))
                open_rates = [one for one in open_rates if not self._is_settled(one)]
        for tried in best:
            if (
                self._goal.rate is not None
                and tried.load_rounds
                and self._is_met(tried)
                and (tried.confirmed or 0) < self._goal.rate
            ):
                tried.confirmed, tried.rounds = self._goal.rate, tried.load_rounds

    def _opened(self, best: list[Tried], stack: ExitStack) -> list[_Finalist]:
        """Start and warm up a service for each of the best candidates.

        Skips the second if it cannot run beside the first, for example for lack of memory.
        """
        finalists: list[_Finalist] = []
        for tried in best:
            try:
                bench = stack.enter_context(self._open(tried.candidate))
            except UnavailableError as error:
                if not finalists:
                    raise
                tried.problem = str(error)
                continue
            bench.with_connections(_WARM_CONNECTIONS, self._each_s)
            finalists.append(_Finalist(tried, bench, tried.rate or LOWEST))
        return finalists

    def _is_settled(self, one: _Finalist) -> bool:
        """Evaluate a finalist's last rounds, and set its next rate.

        Returns True if it is settled, so that it needs no more rounds: if it held a rate and missed
        the next one, or if the time is over.
        """
        holds, tried = self._most_hold(one.rounds), one.tried
        if holds or tried.confirmed is None:
            tried.rounds = one.rounds
        if holds:
            tried.confirmed = one.rate
        else:
            one.missed.add(one.rate)
        rate = on_grid(
            one.rate * (RESOLUTION if holds else RESOLUTION ** -(_STEPS_DOWN ** len(one.missed)))
        )
        allowed = self._seconds if tried.confirmed is not None else _OVERTIME * self._seconds
        if (
            rate in one.missed
            or rate < LOWEST
            or (not holds and tried.confirmed is not None)
            or self._clock() - self._began >= allowed
        ):
            return True
        one.rate = rate
        return False

    def _ranked(self, all_tried: list[Tried]) -> list[Tried]:
        """Return the candidates, best first; those within the noise keep the given order."""
        ranked: list[Tried] = []
        for tried in all_tried:
            place = next(
                (index for index, other in enumerate(ranked) if self._is_better(tried, other)),
                len(ranked),
            )
            ranked.insert(place, tried)
        return ranked

    def _is_better(self, tried: Tried, other: Tried) -> bool:
        if self._is_met(tried) != self._is_met(other):
            return self._is_met(tried)
        mine, its = (one.confirmed if one.rounds else one.rate for one in (tried, other))
        if mine is None or its is None:
            return mine is not None or (its is None and tried.most > _CLEARLY * other.most)
        return mine > _CLEARLY * its

    def _is_met(self, tried: Tried) -> bool:
        if tried.load_rounds:
            return sum(map(self._goal.is_met_by, tried.load_rounds)) > len(tried.load_rounds) / 2
        return tried.at_load is not None and self._goal.is_met_by(tried.at_load)

    def _most_hold(self, rounds: list[Figures]) -> bool:
        return sum(figures.holds(self._goal.p99_ms) for figures in rounds) > len(rounds) / 2

    def _at_load(self, bench: Bench, tried: Tried, seconds: float) -> Figures:
        """Measure at the goal's load; its rate is at most a multiple of the closed-loop rate."""
        if self._goal.rate is None:
            return bench.with_connections(self._goal.connections or 1, seconds)
        return self._at_rate(
            bench, min(self._goal.rate, max(_TOO_MUCH * tried.most, LOWEST)), seconds
        )

    def _at_rate(self, bench: Bench, rate: float, seconds: float) -> Figures:
        """Measure at `rate` requests per second.

        Takes longer at a low rate, to get enough requests.
        """
        return bench.at_rate(
            rate, min(max(seconds, _MIN_REQUESTS / rate), _MAX_EXTENSION * seconds)
        )


def _in_turns(finalists: list[_Finalist], number: int) -> list[_Finalist]:
    """Return the finalists in the order for round `number`, which rotates by one in each round."""
    first = number % len(finalists)
    return finalists[first:] + finalists[:first]
