"""Decisions of a search: rungs, promotions and budgets, whatever the order of the results."""

import random
from collections.abc import Callable
from typing import Any, Literal

import pytest

from slipway.config.search import BudgetParams, DimensionParams, HalvingParams, SearchParams
from slipway.search.journal import JobLine, ResultLine
from slipway.search.schedule import END, WAIT, NewTrial, Promotion, Schedule, rungs


def params(**changes: Any) -> SearchParams:
    content: dict[str, Any] = {
        "method": "random",
        "metric": "accuracy",
        "direction": "maximize",
        "budget": BudgetParams(trials=9, epochs=None, minutes=None),
        "halving": HalvingParams(reduction=3, first_rung=1),
        "workers": 1,
        "seed": 1,
        "space": {"train.learning_rate": DimensionParams(range=[0.0, 1.0])},
    }
    return SearchParams(**(content | changes))


def quality(trial: int) -> float:
    """A score of each trial, all different and in no order."""
    return (trial * 7 % 11) / 11


def decide(schedule: Schedule) -> JobLine | None:
    """Record the next decision; None if there is none now."""
    decision = schedule.next()
    if decision in (WAIT, END):
        return None
    trial, level = schedule.num_trials, 0
    if isinstance(decision, Promotion):
        trial, level = decision.trial, decision.level
    else:
        assert isinstance(decision, NewTrial)
        assert len(decision.outcomes) == trial
    job = JobLine(
        event="job",
        job=len(schedule.jobs),
        trial=trial,
        values={"train.learning_rate": trial},
        level=level,
        epoch=schedule.rungs[level],
    )
    schedule.jobs.append(job)
    return job


def result(schedule: Schedule, job: JobLine, score: float | None) -> ResultLine:
    is_last = job.level == len(schedule.rungs) - 1
    status: Literal["failed", "done", "stopped"] = "done" if is_last else "stopped"
    return ResultLine(
        event="result",
        job=job.job,
        trial=job.trial,
        status="failed" if score is None else status,
        epoch=job.epoch,
        score=score,
        metric=None,
        seconds=60.0,
        cause="",
    )


def simulate(
    wanted: SearchParams,
    epochs: int = 9,
    pick: Callable[[list[JobLine]], JobLine] = lambda running: running[0],
    score: Callable[[int], float | None] = quality,
) -> Schedule:
    """Run a search whose running jobs end in the order of `pick`."""
    schedule, running = Schedule(wanted, epochs), list[JobLine]()
    while True:
        while len(running) < wanted.workers and (job := decide(schedule)):
            running.append(job)
        if not running:
            return schedule
        ended = pick(running)
        running.remove(ended)
        schedule.results[ended.job] = result(schedule, ended, score(ended.trial))


def decisions(schedule: Schedule) -> list[tuple[int, int]]:
    return [(job.trial, job.level) for job in schedule.jobs]


def test_rungs_grow_by_the_reduction_up_to_the_whole_training() -> None:
    halving = HalvingParams(reduction=3, first_rung=2)
    assert rungs(halving, 30) == [2, 6, 18, 30]
    assert rungs(halving, 6) == [2, 6]
    assert rungs(None, 30) == [30]


def test_with_reduction_3_a_third_of_the_trials_continues_at_each_rung() -> None:
    schedule = simulate(params())
    ended = [job.trial for job in schedule.jobs if job.level == 2]
    assert schedule.num_trials == 9
    assert sum(job.level == 1 for job in schedule.jobs) >= 3
    best = max(range(9), key=quality)
    assert best in ended
    found = schedule.best()
    assert found is not None
    assert found.trial == best
    assert len(ended) < 9


def test_even_of_few_trials_the_best_is_trained_to_its_end() -> None:
    schedule = simulate(params(budget=BudgetParams(trials=2, epochs=None, minutes=None)))
    found = schedule.best()
    assert found is not None
    assert found.trial == max(range(2), key=quality)


def test_without_halving_every_trial_has_all_epochs() -> None:
    schedule = simulate(params(halving=None))
    assert decisions(schedule) == [(trial, 0) for trial in range(9)]
    assert {job.epoch for job in schedule.jobs} == {9}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_search_decisions_do_not_depend_on_the_order_in_which_jobs_end(workers: int) -> None:
    expected = simulate(params(workers=workers))
    for seed in range(20):
        pick = random.Random(seed).choice
        assert decisions(simulate(params(workers=workers), pick=pick)) == decisions(expected)


def test_search_that_lost_its_last_results_makes_the_same_decisions() -> None:
    whole = simulate(params(workers=2))
    for count in range(len(whole.jobs)):
        kept = {number: whole.results[number] for number in range(count)}
        again = Schedule(params(workers=2), 9, whole.jobs[:count], kept)
        while job := decide(again):
            again.results[job.job] = result(again, job, quality(job.trial))
        assert decisions(again) == decisions(whole)


def test_a_failed_trial_is_never_promoted_and_has_no_score() -> None:
    schedule = simulate(params(), score=lambda trial: None if trial == 0 else quality(trial))
    assert all(job.level == 0 for job in schedule.jobs if job.trial == 0)
    assert simulate(params(halving=None), score=lambda _: None).best() is None


def test_a_lower_score_is_better_if_the_metric_is_minimized() -> None:
    found = simulate(params(direction="minimize", halving=None)).best()
    assert found is not None
    assert found.trial == min(range(9), key=quality)


def test_epoch_budget_is_respected_and_ends_with_a_whole_trial() -> None:
    for limit in (9, 12, 20, 40):
        budget = BudgetParams(trials=None, epochs=limit, minutes=None)
        schedule = simulate(params(budget=budget))
        trained = {job.trial: 0 for job in schedule.jobs}
        for job in schedule.jobs:
            trained[job.trial] = max(trained[job.trial], job.epoch)
        assert sum(trained.values()) <= limit
        assert schedule.best() is not None


def test_no_trial_starts_after_the_time_budget_has_ended() -> None:
    budget = BudgetParams(trials=None, epochs=None, minutes=5)
    schedule = simulate(params(budget=budget, halving=None))
    assert schedule.num_trials == 5
