"""Proposals are functions of the search, the number of the trial and the earlier results."""

from typing import Any

import pytest

from slipway.config.params import parse_params
from slipway.config.search import SearchParams
from slipway.config.yaml_text import as_yaml
from slipway.planning.search_space import Space, Values, read_space
from slipway.search.proposals import TrialOutcome, grid_size, propose
from tests.planning.test_search_space import content

SPACE: dict[str, Any] = {
    "train.learning_rate": {"log_range": [0.001, 0.01]},
    "train.network_arguments.blocks": {"choice": [[1, 1], [1, 1, 1]]},
    "train.optimizer": {"choice": ["adamw", "sgd"]},
    "train.momentum": {"range": [0.8, 0.99], "when": {"train.optimizer": ["sgd"]}},
}
POINTS: dict[str, Any] = {
    "train.optimizer": {"choice": ["adamw", "sgd"]},
    "train.momentum": {"choice": [0.8, 0.9], "when": {"train.optimizer": ["sgd"]}},
    "train.batch_size": {"range": [32, 96], "step": 32},
}


def search(method: str, space: dict[str, Any]) -> tuple[Space, SearchParams]:
    found = content(method=method, space=space)
    params = parse_params(found).search
    assert params is not None
    return read_space(found, params), params


def outcome(values: Values) -> TrialOutcome:
    """A result that prefers high learning rates; every fourth trial was stopped."""
    rate = values.get("train.learning_rate", 0.0)
    is_stopped = len(as_yaml(values)) % 4 == 0
    return TrialOutcome(values, "stopped" if is_stopped else "done", rate, 3)


def run(method: str, count: int, space: dict[str, Any] = SPACE) -> list[Values]:
    found, params = search(method, space)
    outcomes: list[TrialOutcome] = []
    while (
        len(outcomes) < count
        and (values := propose(found, params, len(outcomes), outcomes)) is not None
    ):
        outcomes.append(outcome(values))
    return [one.values for one in outcomes]


@pytest.mark.process
@pytest.mark.parametrize("method", ["random", "tpe", "gp"])
def test_each_method_is_reproducible_and_never_proposes_the_same_values_twice(method: str) -> None:
    first = run(method, 14)
    assert first == run(method, 14)
    assert len({as_yaml(values) for values in first}) == 14
    assert first[0]["train.learning_rate"] == 0.004, "the values of params.yaml come first"
    assert all(("train.momentum" in one) == (one["train.optimizer"] == "sgd") for one in first)


def test_tpe_proposes_values_near_the_best_ones() -> None:
    late = [values["train.learning_rate"] for values in run("tpe", 30)[20:]]
    assert sorted(late)[len(late) // 2] > 0.005


@pytest.mark.parametrize("method", ["grid", "random", "tpe"])
def test_each_point_of_a_small_space_is_proposed_once_and_then_the_search_ends(method: str) -> None:
    found = run(method, 100, POINTS)
    assert len(found) == len({as_yaml(values) for values in found}) == 9
    assert grid_size(search(method, POINTS)[0]) == 9
