"""Which settings carry most within a promised waiting time: each candidate is tried once, then the two best again, in rounds in turns.

Trying finds a rate by bisection and takes most of the time; a candidate that answers less than half as much as the best is left at once.
The rounds say what can be relied on: a rate counts only if it is held in most of them, else less is tried. The two best run at the same
time, one idle while the other is measured, so that what else happens on the machine meets both.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from serving.load_test import candidates
from serving.load_test.candidates import SettingsCandidate
from serving.load_test.figures import Bench, Figures
from serving.load_test.search import LOWEST, RESOLUTION, LoadTrial, carried, next_rate, on_grid
from slipway.system.errors import UnavailableError

Open = Callable[[SettingsCandidate], AbstractContextManager[Bench]]

NUM_ROUNDS = 3
_WARM_CONNECTIONS = 16
_MIN_TRIALS, _MAX_TRIALS = 6, 14  # of a candidate
_TRYING = 0.6  # of the time; the rest is for the rounds
_MEASUREMENTS = 120  # that fit into the time, by experience; so long is one
_SHORTEST_S, _LONGEST_S = 0.3, 5.0
_FEW, _LONGER = (
    30,
    4.0,
)  # requests that one measurement should have, and how many times as long it may take for that
_NUM_FINALISTS = 2
_ROUND = 2.0  # times as long as what is tried: the 99th percentile needs many requests
_HOPELESS = 0.5  # of what the best carries
_CLEARLY = 1.1  # less than that is noise, and what was there before stays
_OVERTIME = 1.25  # of the time, where nothing was held in the rounds yet
_STEPS_DOWN = 2  # of RESOLUTION after the first rate that was not held again, twice as many after each further one
_FIRST_GUESS = 0.7  # of what many callers get who wait for their answers
_TOO_MUCH = 2.0  # times that: more is never sent


@dataclass(frozen=True)
class Goal:
    """What is promised: 99 % within `p99_ms`, at so many requests a second, or for so many callers who wait for their answers."""

    p99_ms: float
    rate: float | None
    connections: int | None

    def is_met_by(self, figures: Figures) -> bool:
        """Whether these are figures of the whole load, and hold."""
        return figures.holds(self.p99_ms) and (self.rate is None or figures.asked == self.rate)

    def __str__(self) -> str:
        load = (
            f"{self.rate:g} requests/s"
            if self.rate is not None
            else f"{self.connections} connections"
        )
        return f"{load} with 99 % within {self.p99_ms:g} ms"


@dataclass
class Tried:
    """What one candidate did."""

    candidate: SettingsCandidate
    most: float = 0.0  # answers a second to callers who wait for them
    rate: float | None = (
        None  # that it carried when it was tried; None: not even the lowest, or it was left before
    )
    at_load: Figures | None = None
    problem: str = ""  # why nothing more is known
    rounds: list[Figures] = field(default_factory=list)  # at `confirmed`, or at what was last tried
    load_rounds: list[Figures] = field(default_factory=list)  # at the load of the goal
    confirmed: float | None = None  # rate that was held in most rounds


@dataclass(frozen=True)
class Outcome:
    """The candidates as tried, and the one to take."""

    goal: Goal
    all_tried: list[Tried]
    best: Tried
    is_met: bool  # in most rounds
    seconds: float

    @property
    def headroom(self) -> float | None:
        """How much more than the asked rate is carried, as a share of it; None where connections were asked for."""
        return (
            self.best.confirmed / self.goal.rate - 1
            if self.best.confirmed is not None and self.goal.rate
            else None
        )


@dataclass
class _Finalist:
    """One of the best, running."""

    tried: Tried
    bench: Bench
    rate: float  # to try next
    rounds: list[Figures] = field(default_factory=list)  # at that rate
    missed: set[float] = field(default_factory=set)


class Tuner:
    """One search. `clock` gives seconds."""

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
        told: Callable[[Tried], None],
    ) -> Outcome:
        """Try the present settings and others, the best of them in rounds; `told` hears of each as it is tried."""
        end = self._began + _TRYING * self._seconds
        sharings = candidates.sharings(present, cores)
        self._try_all(sharings, len(candidates.batches(present, largest_batch)), end, told)
        self._try_all(
            candidates.batches(self._ranked(self.all_tried)[0].candidate, largest_batch),
            0,
            end,
            told,
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
        told: Callable[[Tried], None],
    ) -> None:
        """As many as there is time for, which they share with `num_later` others; the very first one in any case."""
        for position, candidate in enumerate(coming):
            left = end - self._clock()
            if self.all_tried and left <= 0:
                return
            self.all_tried.append(
                self._try(candidate, end - left + left / (len(coming) - position + num_later))
            )
            told(self.all_tried[-1])

    def _try(self, candidate: SettingsCandidate, end: float) -> Tried:
        tried = Tried(candidate)
        try:
            with self._open(candidate) as bench:
                self._search(tried, bench, end)
        except UnavailableError as error:
            if not self.all_tried:  # as things are it does not start either
                raise
            tried.problem = str(error)
        return tried

    def _search(self, tried: Tried, bench: Bench, end: float) -> None:
        tried.most = bench.with_connections(_WARM_CONNECTIONS, self._each_s).rate
        best = max((other.rate or 0 for other in self.all_tried), default=0)
        if tried.most < _HOPELESS * best:
            tried.problem = "left: it answers less than half of what the best carries"
            return
        tried.at_load = self._at_load(bench, tried, self._each_s)
        trials = (
            []
            if tried.at_load.asked is None
            else [LoadTrial(tried.at_load.asked, tried.at_load.holds(self._goal.p99_ms))]
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
        """Rounds in turns; as long as there is time, less is tried where that was not held again, and more where it was."""
        with ExitStack() as stack:
            finalists = self._opened(best, stack)
            for number in range(NUM_ROUNDS):
                for one in _in_turns(finalists, number):
                    one.tried.load_rounds.append(
                        self._at_load(one.bench, one.tried, _ROUND * self._each_s)
                    )
            asked = [one for one in finalists if one.tried.rate is not None]
            while asked:
                for one in asked:
                    one.rounds = []
                for number in range(NUM_ROUNDS):
                    for one in _in_turns(asked, number):
                        one.rounds.append(self._at_rate(one.bench, one.rate, _ROUND * self._each_s))
                asked = [one for one in asked if not self._is_settled(one)]
        for tried in best:
            if (
                self._goal.rate is not None
                and tried.load_rounds
                and self._is_met(tried)
                and (tried.confirmed or 0) < self._goal.rate
            ):
                tried.confirmed, tried.rounds = (
                    self._goal.rate,
                    tried.load_rounds,
                )  # the load itself was held in most rounds

    def _opened(self, best: list[Tried], stack: ExitStack) -> list[_Finalist]:
        """Warm services of the best. One that does not start beside the other is not among them: it may lack memory."""
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
        """Whether it needs no more rounds: it held a rate and misses the next, or there is no time. Else another rate is next."""
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
        """The best first; one that was tried later has to be clearly better to come before."""
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
        """The load of the goal; never far more than what was answered at most, since there is nothing to learn of that."""
        if self._goal.rate is None:
            return bench.with_connections(self._goal.connections or 1, seconds)
        return self._at_rate(
            bench, min(self._goal.rate, max(_TOO_MUCH * tried.most, LOWEST)), seconds
        )

    def _at_rate(self, bench: Bench, rate: float, seconds: float) -> Figures:
        """Longer, so that there are some requests, where few come."""
        return bench.at_rate(rate, min(max(seconds, _FEW / rate), _LONGER * seconds))


def _in_turns(finalists: list[_Finalist], number: int) -> list[_Finalist]:
    """All of them, beginning with another one in each round."""
    first = number % len(finalists)
    return finalists[first:] + finalists[:first]
