"""Proposes the values of trials with Optuna's samplers.

A proposal depends only on the search, the number of the trial and the earlier results: each
proposal creates a new Optuna study whose sampler is seeded by the number of the trial. So a search
that was killed continues with the same proposals.
"""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slipway.config.search import SearchParams
from slipway.config.yaml_text import as_yaml
from slipway.planning.search_space import Space, Values

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_ATTEMPTS = 50  # attempts to find values that no earlier trial has


@dataclass(frozen=True)
class TrialOutcome:
    """The state of an earlier trial: its values, epochs trained so far, and score."""

    values: Values
    state: Literal["running", "stopped", "done", "failed"]
    score: float | None = None
    epoch: int = 0


def propose(
    space: Space, params: SearchParams, number: int, outcomes: Sequence[TrialOutcome]
) -> Values | None:
    """Return the values of trial `number`, from 0; None if every point was already proposed.

    `outcomes` are the states of all earlier trials. The first trial has the values of params.yaml
    if they are in the space; a grid keeps its own order.
    """
    taken = {as_yaml(outcome.values) for outcome in outcomes}
    if params.method == "grid":
        return next((one for one in _grid(space, params.seed) if as_yaml(one) not in taken), None)
    if number == 0 and (present := space.present()) is not None:
        return present
    for attempt in range(_ATTEMPTS):
        found = _ask(space, params, number, attempt, outcomes)
        if as_yaml(found) not in taken:
            return found
    left = (one for one in _points(space) if as_yaml(one) not in taken)
    return next(left, None)


def grid_size(space: Space) -> int:
    """Return the number of distinct points of a grid."""
    return len({as_yaml(one) for one in _points(space)})


def frozen(space: Space, outcome: TrialOutcome) -> "FrozenTrial":
    """Convert an outcome to a finished trial of Optuna."""
    from optuna.trial import TrialState, create_trial

    states = {
        "running": TrialState.RUNNING,
        "stopped": TrialState.PRUNED,
        "done": TrialState.COMPLETE,
        "failed": TrialState.FAIL,
    }
    values, distributions = space.external(outcome.values)
    is_done = outcome.state == "done"
    reached = {outcome.epoch: outcome.score} if outcome.score is not None else {}
    return create_trial(
        state=states[outcome.state],
        value=outcome.score if is_done else None,
        params=values,
        distributions=distributions,
        intermediate_values=reached,
    )


def _ask(
    space: Space, params: SearchParams, number: int, attempt: int, outcomes: Sequence[TrialOutcome]
) -> Values:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # With a prime above any number of trials, different proposals have different seeds.
    seed = (params.seed * 1_000_003 + number * _ATTEMPTS + attempt) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(direction=params.direction, sampler=_sampler(params, seed))
        study.add_trials([frozen(space, outcome) for outcome in outcomes])
        return space.suggest(study.ask())


def _sampler(params: SearchParams, seed: int) -> "BaseSampler":
    from optuna import samplers

    if params.method == "gp":
        return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if params.method == "tpe":
        return samplers.TPESampler(seed=seed)
    return samplers.RandomSampler(seed=seed)


def _grid(space: Space, seed: int) -> list[Values]:
    """Return the points of the grid in the order of Optuna's sampler."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    points = {
        dimension.key: [dimension.external(value) for value in dimension.points()]
        for dimension in space.dimensions
    }
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(points, seed))
    # Points are requested but get no result, so the sampler returns each point once.
    count = len(list(itertools.product(*points.values())))
    trials = [study.ask() for _ in range(count)]
    return [
        space.active({one.key: one.suggest(trial) for one in space.dimensions}) for trial in trials
    ]


def _points(space: Space) -> list[Values]:
    """Return every point of a space of choices and steps; empty for a continuous space."""
    if any(one.params.bounds and one.params.step is None for one in space.dimensions):
        return []
    keys = [dimension.key for dimension in space.dimensions]
    every = itertools.product(*(dimension.points() for dimension in space.dimensions))
    return [space.active(dict(zip(keys, values, strict=True))) for values in every]
