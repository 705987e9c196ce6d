"""The search space: the keys of params.yaml that a search changes, and the values that it tries.

Refuses a space with values that params.yaml would refuse. Optuna identifies each value of a choice
by its YAML text, because Optuna's categories cannot be lists.
"""

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slipway.config.edit import known_keys
from slipway.config.ensemble import require_one_model
from slipway.config.mistakes import hint
from slipway.config.params import Params, filled, mistakes_in, value_at
from slipway.config.search import DimensionParams, SearchParams
from slipway.config.sections import default_of
from slipway.config.tree_settings import WITHOUT_EFFECT
from slipway.config.yaml_text import as_yaml
from slipway.kinds.registry import are_trees, kind_of
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.system.errors import ParamsError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

Values = dict[str, Any]  # by key of params.yaml, such as "train.learning_rate"
LOSS = "loss"  # the metric that every task has
# Sections that a search may change: they change neither the validation rows nor the metric.
_FREE = ("precompute", "augment", "train")
_WHY_NOT = {
    "data": "decides which rows there are",
    "clean": "decides which rows there are",
    "split": "decides which rows are for validation",
    "seed": "draws the validation rows",
    "evaluate": "decides how models are measured",
}
# Keys that change the loss itself: losses with different values are not comparable.
_OF_THE_LOSS = ("train.loss", "train.huber_delta", "train.class_weights", "train.label_smoothing")
_NETWORK = "train.network"
_DIGITS = 4  # significant digits of a proposed number
_SAMPLES, _SHOWN = 100, 5


@dataclass(frozen=True)
class SearchDimension:
    """A key of params.yaml and the values that the search tries for it."""

    key: str
    params: DimensionParams
    is_integer: bool  # True for a range of whole numbers

    @property
    def choices(self) -> dict[str, Any]:
        """The values to choose from, by their YAML text; empty for a range."""
        return {as_yaml(value): value for value in self.params.choice or ()}

    @property
    def distribution(self) -> "BaseDistribution":
        """The values to try, as an Optuna distribution."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        if self.params.bounds is None:
            return CategoricalDistribution(list(self.choices))
        low, high = self.params.bounds
        log, step = self.params.log_range is not None, self.params.step
        if self.is_integer:
            return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        return FloatDistribution(low, high, log=log, step=step)

    def external(self, value: Any) -> Any:
        """Return a value as Optuna stores it: the YAML text of a choice, or the number itself."""
        return as_yaml(value) if self.params.bounds is None else value

    def suggest(self, trial: "Trial") -> Any:
        """Return a value that Optuna proposes, with at most 4 digits unless the range has steps."""
        if self.params.bounds is None:
            return self.choices[trial.suggest_categorical(self.key, list(self.choices))]
        (low, high), step, log = self.params.bounds, self.params.step, self.params.log_range
        if self.is_integer:
            whole = int(low), int(high)
            return trial.suggest_int(self.key, *whole, step=int(step or 1), log=log is not None)
        found = trial.suggest_float(self.key, low, high, step=step, log=log is not None)
        digits = 12 if step else _DIGITS
        return float(min(max(float(f"{found:.{digits}g}"), low), high))

    def holds(self, value: Any) -> bool:
        """Return True if the value is in the space."""
        if self.params.bounds is None:
            return as_yaml(value) in self.choices
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        low, high = self.params.bounds
        if self.is_integer or self.params.step:
            return low <= value <= high and (
                value == int(value)
                if self.params.step is None
                else any(math.isclose(value, point) for point in self.points())
            )
        return low <= value <= high

    def points(self) -> list[Any]:
        """List all values of a choice or a stepped range, or the two bounds of another range."""
        bounds, step = self.params.bounds, self.params.step
        if bounds is None:
            return list(self.params.choice or ())
        low, high = bounds
        if step is None:
            return [low, high] if self.is_integer else [float(low), float(high)]
        count = math.floor((high - low) / step + 1e-9) + 1
        return [
            int(low + place * step) if self.is_integer else float(f"{low + place * step:.12g}")
            for place in range(count)
        ]


@dataclass(frozen=True)
class Space:
    """All dimensions of a search, in an order in which conditions can be evaluated.

    A dimension comes after the keys that its condition (`when`) names. `content` is params.yaml.
    """

    dimensions: Sequence[SearchDimension]
    content: Mapping[str, Any]

    @cached_property
    def values(self) -> dict[str, Any]:
        """The content of params.yaml with the defaults of all keys that it leaves out."""
        return filled(self.content)

    def suggest(self, trial: "Trial") -> Values:
        """Return a value that Optuna proposes for each key whose condition holds."""
        found: Values = {}
        for dimension in self.dimensions:
            if self._is_active(dimension, found):
                found[dimension.key] = dimension.suggest(trial)
        return found

    def present(self) -> Values | None:
        """Return the values of params.yaml itself; None if they are not in the space."""
        found: Values = {}
        for dimension in self.dimensions:
            if self._is_active(dimension, found):
                found[dimension.key] = value_at(self.values, dimension.key)
                if not dimension.holds(found[dimension.key]):
                    return None
        return found

    def active(self, values: Values) -> Values:
        """Return `values` without the keys whose condition does not hold."""
        found: Values = {}
        for dimension in self.dimensions:
            if self._is_active(dimension, found):
                found[dimension.key] = values[dimension.key]
        return found

    def changes(self, values: Values) -> Values:
        """Return the values that a trial writes into params.yaml.

        A key whose condition does not hold normally keeps its present value. After `slipway take`
        that value may belong to an earlier trial, such as a momentum while the trial uses adamw.
        If params.yaml refuses the combination, such keys get their defaults, and so do the keys
        that the trial's network does not read.
        """
        if not mistakes_in(changed_content(self.content, values)):
            return values
        unread = [f"train.{key}" for key in WITHOUT_EFFECT] if self._has_trees(values) else []
        inactive = [one.key for one in self.dimensions if one.key not in values]
        usual = {key: _default(key) for key in (*inactive, *unread)}
        changed = values | {
            key: value for key, value in usual.items() if value_at(self.values, key) != value
        }
        return values if mistakes_in(changed_content(self.content, changed)) else changed

    def _has_trees(self, values: Values) -> bool:
        return are_trees(values.get(_NETWORK, value_at(self.values, _NETWORK)))

    def external(self, values: Values) -> tuple[dict[str, Any], dict[str, "BaseDistribution"]]:
        """Return (values, distributions) by key, in the form that Optuna stores."""
        mine = [dimension for dimension in self.dimensions if dimension.key in values]
        return (
            {dimension.key: dimension.external(values[dimension.key]) for dimension in mine},
            {dimension.key: dimension.distribution for dimension in mine},
        )

    def samples(self) -> list[Values]:
        """Return combinations to check, in which each choice and bound occurs at least once."""
        drawn = random.Random(0)  # a fixed seed: each check has the same combinations
        points = {dimension.key: dimension.points() for dimension in self.dimensions}
        longest = max(map(len, points.values()))
        every = [
            {
                key: own[number % len(own)] if number < longest else drawn.choice(own)
                for key, own in points.items()
            }
            for number in range(max(_SAMPLES, min(longest, 10 * _SAMPLES)))
        ]
        return list({as_yaml(found): found for found in map(self.active, every)}.values())

    def _is_active(self, dimension: SearchDimension, found: Values) -> bool:
        section, _, name = dimension.key.partition(".")
        if section == "train" and name in WITHOUT_EFFECT and self._has_trees(found):
            return False
        return all(
            found.get(key, value_at(self.values, key)) in values
            for key, values in (dimension.params.when or {}).items()
        )


def _default(key: str) -> Any:
    """Return the default of a key; None for one inside of a mapping with free names."""
    try:
        return default_of(Params, key)
    except (KeyError, AttributeError):
        return None


def read_space(content: dict[str, Any], params: SearchParams) -> Space:
    """Return the search space of a valid params.yaml; ParamsError lists every mistake in it."""
    require_one_model(value_at(content, "ensemble.method"), "slipway search")
    if problems := space_mistakes(content, params):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ParamsError(
            f"search has {len(problems)} mistake{'s' * (len(problems) > 1)}:\n{lines}\n"
            "Nothing was trained. Correct params.yaml, and run the command again."
        )
    return _space(content, params)


def space_mistakes(content: dict[str, Any], params: SearchParams) -> list[str]:
    """List the mistakes of section `search`: metric, keys, conditions, budget, refused values."""
    return [*_mistakes(filled(content), params)] or [*_refused_values(_space(content, params))]


def _space(content: dict[str, Any], params: SearchParams) -> Space:
    whole = filled(content)
    dimensions = [
        SearchDimension(key, params.space[key], _is_integer(whole, key, params.space[key]))
        for key in _in_order(params)
    ]
    return Space(dimensions, content)


def changed_content(content: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a copy of the content of params.yaml with `values` in place."""
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    for key, value in values.items():
        *sections, name = key.split(".")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return changed


def metrics_of(task: str) -> dict[str, str]:
    """Return the validation metrics of a task, each with "minimize" or "maximize"."""
    headline = kind_of(task).target.headline
    better = "minimize" if headline in UNBOUNDED_METRICS else "maximize"
    return {headline: better, LOSS: "minimize"}


def _mistakes(content: dict[str, Any], params: SearchParams) -> Iterator[str]:
    """Yield mistakes that show only when `search` is compared with the other sections."""
    task = value_at(content, "data.task")
    metrics = metrics_of(task)
    if params.metric not in metrics:
        yield (
            f"search.metric is {params.metric!r}, but the training of data.task {task!r} measures "
            f"{' and '.join(metrics)} on the validation rows; "
            f"{hint(params.metric, list(metrics), 'expected one of')}"
        )
    elif params.direction != metrics[params.metric]:
        yield (
            f"search.direction is {params.direction!r}, but of {params.metric} the best is the "
            f"one to {metrics[params.metric]}; write `direction: {metrics[params.metric]}`"
        )
    known = known_keys(content)
    for key, dimension in params.space.items():
        yield from _key_mistakes(f"search.space.{key}", key, known, params.metric)
        for other, values in (dimension.when or {}).items():
            yield from _condition_mistakes(f"search.space.{key}.when", other, values, params, known)
    if loop := _loop(params):
        yield f"search.space: {', '.join(loop)} depend on each other; remove one `when`"
    yield from _budget_mistakes(content, params)


def _key_mistakes(place: str, key: str, known: Sequence[str], metric: str) -> Iterator[str]:
    section = key.partition(".")[0]
    if section not in _FREE:
        expected = f"expected a key of {', '.join(_FREE[:-1])} or {_FREE[-1]}"
        if section in _WHY_NOT:
            yield (
                f"{place}: {section} {_WHY_NOT[section]}, so that trials could not be compared; "
                f"{expected}. Remove it; `slipway run {key}=VALUE` tries another value"
            )
        elif section in known:
            yield (
                f"{place}: {section} changes no model that train makes, {expected}. Remove it; "
                "set it once the search has ended"
            )
        else:
            yield f"{place}: params.yaml has no such key, {expected}; {_like(key, known)}"
        return
    # A user's network may take any argument; `_refused_values` checks those of Slipway's own.
    if key not in known and not key.startswith("train.network_arguments."):
        yield f"{place}: params.yaml has no such key; {_like(key, known)}"
    if metric == LOSS and key in _OF_THE_LOSS:
        yield (
            f"{place}: it changes the loss itself, so that search.metric 'loss' could not compare "
            "the trials. Use the other metric of the task, or remove the key"
        )


def _condition_mistakes(
    place: str, other: str, values: list[Any], params: SearchParams, known: Sequence[str]
) -> Iterator[str]:
    if other in params.space:
        choice = params.space[other].choice
        if choice is None:
            yield f"{place}: {other} is a range, expected a key with a choice, or a fixed one"
        elif missing := [value for value in values if value not in choice]:
            yield (
                f"{place}: {other} never is {', '.join(map(as_yaml, missing))}, expected some of "
                f"{as_yaml(choice)}"
            )
    elif other not in known:
        yield f"{place}: params.yaml has no key {other}; {_like(other, known)}"


def _like(key: str, known: Sequence[str]) -> str:
    name = key.rpartition(".")[2]
    homes = [one for one in known if one.partition(".")[0] in _FREE]
    same = [one for one in homes if one.rpartition(".")[2] == name]
    if same:
        return f"did you mean {' or '.join(map(repr, same))}?"
    found = hint(key, homes, "")
    return found if found.startswith("did") else "`slipway params` lists all"


def _budget_mistakes(content: dict[str, Any], params: SearchParams) -> Iterator[str]:
    epochs = _least_epochs(content, params)
    if params.budget.epochs is not None and params.budget.epochs < epochs:
        yield (
            f"search.budget.epochs is {params.budget.epochs}, below one trial: train.epochs is "
            f"{epochs}. Write at least {epochs}, or lower train.epochs"
        )
    if params.halving is None:
        return
    dimension = params.space.get("train.network")
    networks = (dimension.choice if dimension else None) or [value_at(content, "train.network")]
    yield from (
        f"search.halving resumes trials from checkpoints, but trees of {network!r} have none; "
        "write `halving: null`"
        for network in networks
        if isinstance(network, str) and are_trees(network)
    )
    if "train.epochs" in params.space:
        yield (
            "search.space.train.epochs: rungs compare trials after the same part of one length; "
            "remove it, or write `halving: null`"
        )
    elif params.halving.first_rung >= epochs:
        fix = f"write at most {max(1, epochs // params.halving.reduction)}, or `halving: null`"
        yield (
            f"search.halving.first_rung is {params.halving.first_rung}, but a trial ends after "
            f"train.epochs {epochs}: no trial could be stopped early; {fix}"
        )


def _least_epochs(content: dict[str, Any], params: SearchParams) -> int:
    dimension = params.space.get("train.epochs")
    if dimension is None:
        return int(value_at(content, "train.epochs"))
    numbers = dimension.bounds or dimension.choice or [1]
    return int(min(number for number in numbers if isinstance(number, int | float)))


def _loop(params: SearchParams) -> list[str]:
    """Return the keys whose conditions form a cycle; empty if there is none."""
    waiting = dict(params.space)
    while True:
        ready = [
            key
            for key, dimension in waiting.items()
            if not any(other in waiting for other in dimension.when or {})
        ]
        if not ready:
            return list(waiting)
        for key in ready:
            del waiting[key]


def _in_order(params: SearchParams) -> list[str]:
    """List the keys in order: each comes after the keys that its condition names."""
    ordered = [key for key in (_NETWORK,) if key in params.space and not params.space[key].when]
    while len(ordered) < len(params.space):
        for key, dimension in params.space.items():
            needed = [other for other in dimension.when or {} if other in params.space]
            if key not in ordered and all(other in ordered for other in needed):
                ordered.append(key)
    return ordered


def _is_integer(content: dict[str, Any], key: str, params: DimensionParams) -> bool:
    """Return True if the bounds of a range are integers and the key accepts only integers."""
    numbers = [*(params.bounds or ()), *([params.step] if params.step is not None else [])]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return False
    now = value_at(content, key)
    if now is not None:
        return isinstance(now, int)
    place = f"{key}: found"
    refused = mistakes_in(changed_content(content, {key: numbers[0] + 0.5}))
    return any(text.startswith(place) for text in refused)


def _refused_values(space: Space) -> Iterator[str]:
    """Yield each refusal of params.yaml, with one combination of values that causes it."""
    present = mistakes_in(dict(space.content))
    seen: dict[str, Values] = {}
    for values in space.samples():
        for text in mistakes_in(changed_content(space.content, space.changes(values))):
            if text not in present and text not in seen:
                seen[text] = values
    for text, values in list(seen.items())[:_SHOWN]:
        shown = ", ".join(f"{key}={as_yaml(value)}" for key, value in values.items())
        yield f"search.space makes {shown}, which params.yaml refuses: {text}"
    if len(seen) > _SHOWN:
        yield f"search.space makes {len(seen) - _SHOWN} more combinations that are refused"
