"""Describes a search in words: its beginning, each result and the winner; and the whole as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.config.yaml_text import as_yaml
from slipway.planning.search_space import Space, Values
from slipway.reports.console import interval, number
from slipway.search.journal import JobLine, ResultLine
from slipway.search.optimism import Optimism
from slipway.search.page import PAGE, latest_results
from slipway.search.proposals import grid_size
from slipway.search.study import Study
from slipway.system.errors import SlipwayError

_SHORT_S = 30.0  # a shorter remaining time is not shown


@dataclass(frozen=True)
class SearchEnd:
    """A finished search, and the optimism of its winner (None if it cannot be measured)."""

    study: Study
    optimism: Optimism | None


def introduction(study: Study, space: Space, num_workers: int, where: str) -> str:
    """Describe a search that begins: its method, its limits, and its threads."""
    params = study.schedule.params
    limits = [
        f"{value:g} {name}"
        for name, value in params.budget.model_dump().items()
        if value is not None
    ]
    parts = [
        f"{study.name}: {params.method} over {', '.join(params.space)}",
        f"budget {' or '.join(limits)}",
    ]
    if params.halving:
        parts.append(f"rungs after epochs {', '.join(map(str, study.schedule.rungs))}")
    if params.method == "grid":
        parts.append(f"a grid of {grid_size(space)} points")
    parts.append(f"{num_workers} at a time{where}, {study.threads} threads each")
    done = len(study.schedule.results)
    if done:
        parts.append(f"resumes after {done} results")
    return "; ".join(parts)


def result_text(study: Study, job: JobLine, line: ResultLine) -> str:
    """Describe a result and the best result so far."""
    values = " ".join(f"{key}={as_yaml(value)}" for key, value in job.values.items())
    head = f"{study.trial_name(job.trial)}  {line.status:<7} epoch {line.epoch:>3}"
    found = line.cause if line.score is None else f"{study.schedule.params.metric} {_shown(line)}"
    best = study.schedule.best()
    tail = f"; best: {study.trial_name(best.trial)} {_shown(best)}" if best else ""
    return f"{head}  {line.seconds:.0f} s  {found}  {values}{tail}{_remaining(study)}"


def _remaining(study: Study) -> str:
    """Describe the remaining time, estimated from the mean seconds of an epoch so far."""
    schedule, params = study.schedule, study.schedule.params
    budget = params.budget
    results = sorted(schedule.results.values(), key=lambda one: one.epoch)
    spent = sum(one.seconds for one in results)
    reached = {one.trial: one.epoch for one in results}  # the last epoch of each trial
    trained = sum(reached.values())
    if not trained:
        return ""
    estimates = []
    if budget.trials is not None:
        estimates.append(spent / len(reached) * (budget.trials - len(reached)))
    if budget.epochs is not None:
        estimates.append(spent / trained * (budget.epochs - trained))
    if budget.minutes is not None:
        estimates.append(60 * budget.minutes * params.workers - spent)
    left = max(0.0, min(estimates)) / params.workers
    return f"; about {left / 60:.0f} min left" if left >= _SHORT_S else ""


def conclude(end: SearchEnd) -> None:
    """Print the winner; raises SlipwayError if no trial was trained to its end."""
    study = end.study
    best = study.schedule.best()
    if best is None:
        failed = [one for one in study.schedule.results.values() if one.status == "failed"]
        cause = failed[-1].cause if failed else "the budget ended before"
        raise SlipwayError(
            f"no trial of {study.name} was trained to its end, expected at least one; {cause}. "
            "`slipway compare` lists the trials."
        )
    print(
        f"\n{study.name}: the best of {study.schedule.num_trials} trials is "
        f"{study.trial_name(best.trial)}, {study.schedule.params.metric} {_shown(best)} on the "
        f"validation rows{_expected(end.optimism)}\n"
        f"all trials: {PAGE}\nnext: slipway take {study.trial_name(best.trial)}"
    )


def _expected(optimism: Optimism | None) -> str:
    if optimism is None:
        return ""
    return (
        f"; {number(optimism.expected)} is expected on other rows, because the best of several "
        "trials looks better than it is"
    )


def as_json(end: SearchEnd) -> Mapping[str, Any]:
    """Return the search in the form that `--json` prints."""
    study, schedule = end.study, end.study.schedule
    best, latest = schedule.best(), latest_results(study)
    values: dict[int, Values] = {job.trial: job.values for job in schedule.jobs}
    return {
        "search": study.name,
        "metric": schedule.params.metric,
        "best": study.trial_name(best.trial) if best else None,
        "expected_on_other_rows": end.optimism.expected if end.optimism else None,
        "threads": study.threads,
        "trials": [
            {
                "name": study.trial_name(trial),
                "params": values[trial],
                "status": line.status,
                "epochs": line.epoch,
                "score": line.score,
                "interval": line.metric.model_dump(mode="json") if line.metric else None,
                "seconds": round(study.seconds(trial), 1),
                "cause": line.cause,
            }
            for trial, line in latest.items()
        ],
    }


def _shown(line: ResultLine) -> str:
    assert line.score is not None
    if line.metric is None:
        return number(line.score)
    return f"{number(line.metric.value)} {interval(line.metric)}"
