"""Decides on the next job of a search: a new trial, or a trial that continues to its next rung.

A rung is an epoch at which trials may be stopped, as in asynchronous successive halving (L. Li et
al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2). Decisions do
not depend on time: decision n waits for the results of decisions 0 to n - workers, and uses only
these. So a search has the same winner if it is killed and resumed, or if trials take longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipway.config.search import BudgetParams, HalvingParams, SearchParams
from slipway.planning.search_space import Values
from slipway.search.journal import JobLine, ResultLine
from slipway.search.proposals import TrialOutcome


@dataclass(frozen=True)
class Promotion:
    """A decision that a trial continues to the rung `level`."""

    trial: int
    level: int


@dataclass(frozen=True)
class NewTrial:
    """A decision to start the next trial."""

    outcomes: Sequence[TrialOutcome]  # states of earlier trials that this decision may use


WAIT, END = "wait", "end"


@dataclass
class Schedule:
    """The decisions and results of a search so far, and the rule for the next decision."""

    params: SearchParams
    epochs: int  # epochs of a trial that is not stopped
    jobs: list[JobLine] = field(default_factory=list)
    results: dict[int, ResultLine] = field(default_factory=dict)  # results by number of the job
    is_exhausted: bool = False  # every point of the space has been tried

    @property
    def rungs(self) -> list[int]:
        """Epochs at which trials may be stopped; the last is the end of a trial."""
        return rungs(self.params.halving, self.epochs)

    @property
    def num_trials(self) -> int:
        return 1 + max((job.trial for job in self.jobs), default=-1)

    def next(self) -> NewTrial | Promotion | str:
        """Return the next decision, WAIT if it needs a missing result, or END."""
        # If nothing can be started, decide again with one more result.
        for seen in range(len(self.jobs) - self.params.workers + 1, len(self.jobs) + 1):
            if any(number not in self.results for number in range(seen)):
                return WAIT
            decision = self._decide(max(0, seen))
            if decision is not None:
                return decision
        return END

    def best(self) -> ResultLine | None:
        """Return the best result of a trial trained to its end; ties go to the earlier trial."""
        return min(
            (result for result in self.results.values() if result.status == "done"),
            key=lambda result: (self._rank(result), result.trial),
            default=None,
        )

    def _decide(self, seen: int) -> NewTrial | Promotion | None:
        results = [self.results[number] for number in range(seen)]
        has_budget = not self.is_exhausted and self._has_budget(results)
        promotion = self._promotion(results, at_least_one=not has_budget)
        if promotion is not None:
            return promotion
        return NewTrial(self._outcomes(results)) if has_budget else None

    def _promotion(self, results: list[ResultLine], *, at_least_one: bool) -> Promotion | None:
        """Return the best trial of the highest rung from which a trial may continue, or None.

        A trial may continue if it is among the best 1 / reduction of its rung. At the end of a
        search (`at_least_one`), the best trial of a rung always continues.
        """
        halving = self.params.halving
        if halving is None:
            return None
        levels = {job.job: job.level for job in self.jobs}
        started = {(job.trial, job.level) for job in self.jobs}
        for level in reversed(range(len(self.rungs) - 1)):
            ranked = sorted(
                (one for one in results if levels[one.job] == level and one.score is not None),
                key=lambda one: (self._rank(one), one.trial),
            )
            count = len(ranked) // halving.reduction
            for result in ranked[: max(count, 1) if at_least_one else count]:
                if result.status != "stopped" or (result.trial, level + 1) in started:
                    continue
                if self._affords(results, self.rungs[level], self.rungs[level + 1]):
                    return Promotion(result.trial, level + 1)
        return None

    def _has_budget(self, results: list[ResultLine]) -> bool:
        budget: BudgetParams = self.params.budget
        if budget.trials is not None and self.num_trials >= budget.trials:
            return False
        if budget.minutes is not None:
            seconds = sum(result.seconds for result in results) / self.params.workers
            if seconds >= 60 * budget.minutes:
                return False
        return self._affords(results, 0, self.rungs[0])

    def _affords(self, results: list[ResultLine], start: int, end: int) -> bool:
        """Return True if the budget covers these epochs and the rest of the furthest trial.

        Reserving the rest ensures that at least one trial is trained to its end.
        """
        limit = self.params.budget.epochs
        if limit is None:
            return True
        failed = {result.trial for result in results if result.status == "failed"}
        reached = [job.epoch for job in self.jobs if job.trial not in failed]
        reserve = self.epochs - max([*reached, end])
        return self._epochs_spent(results) + end - start + reserve <= limit

    def _epochs_spent(self, results: list[ResultLine]) -> int:
        """Return the epochs of all jobs: trained ones of `results`, planned ones of other jobs."""
        reached = {result.job: result.epoch for result in results}
        before: dict[int, int] = {}
        spent = 0
        for job in self.jobs:
            end = reached.get(job.job, job.epoch)
            spent += max(0, end - before.get(job.trial, 0))
            before[job.trial] = end
        return spent

    def _outcomes(self, results: list[ResultLine]) -> list[TrialOutcome]:
        """Return the latest state of each trial, as far as the decision may use `results`."""
        values: dict[int, Values] = {job.trial: job.values for job in self.jobs}
        found = {trial: TrialOutcome(own, "running") for trial, own in values.items()}
        for result in results:
            found[result.trial] = TrialOutcome(
                values[result.trial], result.status, result.score, result.epoch
            )
        return [found[trial] for trial in sorted(found)]

    def _rank(self, result: ResultLine) -> float:
        """Return a number that is lower for a better result."""
        assert result.score is not None
        return result.score if self.params.direction == "minimize" else -result.score


def rungs(halving: HalvingParams | None, epochs: int) -> list[int]:
    """List the epochs of the rungs in rising order; the last is `epochs`."""
    found: list[int] = []
    rung = halving.first_rung if halving else epochs
    while halving and rung < epochs:
        found.append(rung)
        rung *= halving.reduction
    return [*found, epochs]
