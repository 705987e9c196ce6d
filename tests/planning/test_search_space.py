"""The search space: every mistake is refused with what to write instead."""

import copy
from typing import Any

import pytest

from slipway.config.params import mistakes_in, parse_params
from slipway.planning.search_space import Space, Values, changed_content, read_space
from slipway.system.errors import ParamsError
from tests.project_params import own_content

PARAMS: dict[str, Any] = own_content()
SECTION: dict[str, Any] = {
    "method": "tpe",
    "metric": "accuracy",
    "direction": "maximize",
    "budget": {"trials": 5, "epochs": None, "minutes": None},
    "halving": None,
    "workers": 1,
    "seed": 1,
    "space": {"train.learning_rate": {"log_range": [0.001, 0.01]}},
}


def content(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(PARAMS) | {"search": copy.deepcopy(SECTION) | changes}


def space(**changes: Any) -> Space:
    found = content(**changes)
    params = parse_params(found).search
    assert params is not None
    return read_space(found, params)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"space": {}}, "at least 1 value"),
        ({"space": {"train.epochs": {"range": [9, 3]}}}, "write [3, 9]"),
        ({"space": {"train.epochs": {"range": [3, 3]}}}, "choice: [3]"),
        ({"space": {"train.epochs": {"log_range": [0, 3]}}}, "use range"),
        ({"space": {"train.epochs": {}}}, "exactly one of choice, range, log_range"),
        ({"space": {"train.epochs": {"choice": [1], "step": 2}}}, "remove step"),
        ({"space": {"train.epochs": {"rang": [1, 2]}}}, "did you mean 'range'"),
        ({"budget": {"trials": 0, "epochs": None, "minutes": None}}, "at least 1"),
        ({"budget": dict.fromkeys(["trials", "epochs", "minutes"])}, "at least one limit"),
        ({"method": "bayes"}, "'grid', 'random', 'tpe' or 'gp'"),
        ({"method": "grid"}, "choice: [0.001, 0.01]"),
    ],
)
def test_a_search_section_that_is_invalid_by_itself_is_refused(
    changes: dict[str, Any], part: str
) -> None:
    (text,) = mistakes_in(content(**changes))
    assert text.startswith("search")
    assert part in text


def _of(key: str, **dimension: Any) -> dict[str, Any]:
    return {"space": {key: dimension or {"choice": [1]}}}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"metric": "acuracy"}, "did you mean 'accuracy'"),
        ({"metric": "rmse"}, "measures accuracy and loss"),
        ({"direction": "minimize"}, "direction: maximize"),
        (_of("data.path"), "decides which rows there are"),
        (_of("clean.max_bad_fraction"), "decides which rows there are"),
        (_of("split.val"), "for validation"),
        (_of("seed"), "draws the validation rows"),
        (_of("evaluate.top_k"), "how models are measured"),
        (_of("export.opset"), "changes no model that train makes"),
        (_of("learning_rate"), "did you mean 'train.learning_rate'"),
        (_of("train.learning_rte"), "did you mean 'train.learning_rate'"),
        (_of("train.optimizer", choice=["adamw", "adam"]), "did you mean 'adamw'"),
        (_of("train.optimizer", choice=["adamw", "sgd"]), "needs momentum"),
        (_of("train.batch_size", range=[0, 64]), "batch_size: found 0"),
        (_of("train.network_arguments.wdth"), "wdth"),
        (_of("train.momentum", range=[0.5, 0.9], when={"train.optimzer": ["sgd"]}), "train.opt"),
        ({"budget": {"trials": 9, "epochs": 29, "minutes": None}}, "Write at least 30"),
        ({"halving": {"reduction": 3, "first_rung": 30}}, "write at most 10"),
        (
            _of("train.epochs", range=[10, 20]) | {"halving": {"reduction": 2, "first_rung": 2}},
            "one length",
        ),
        (
            _of("train.network", choice=["small_resnet", "lightgbm"])
            | {"halving": {"reduction": 2, "first_rung": 2}},
            "trees of 'lightgbm' have none; write `halving: null`",
        ),
        (
            _of("train.label_smoothing", range=[0.0, 0.1])
            | {"metric": "loss", "direction": "minimize"},
            "changes the loss itself",
        ),
    ],
)
def test_a_search_section_that_contradicts_other_sections_is_refused(
    changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ParamsError, match="Nothing was trained") as raised:
        space(**changes)
    assert part in str(raised.value)


def test_conditions_that_never_hold_or_form_a_cycle_are_refused() -> None:
    choice = {"train.optimizer": {"choice": ["adamw"]}}
    momentum = {"range": [0.5, 0.9], "when": {"train.optimizer": ["sgd"]}}
    with pytest.raises(ParamsError, match="never is 'sgd'"):
        space(space=choice | {"train.momentum": momentum})
    one = {"choice": [8], "when": {"train.epochs": [30]}}
    other = {"choice": [30], "when": {"train.batch_size": [8]}}
    with pytest.raises(ParamsError, match="depend on each other"):
        space(space={"train.batch_size": one, "train.epochs": other})


def test_all_mistakes_of_the_search_space_are_listed_at_once() -> None:
    with pytest.raises(ParamsError, match="2 mistakes"):
        space(metric="rmse", **_of("seed"))


def test_a_key_is_left_out_while_its_condition_does_not_hold() -> None:
    found = space(
        space={
            "train.momentum": {"range": [0.5, 0.9], "when": {"train.optimizer": ["sgd"]}},
            "train.optimizer": {"choice": ["adamw", "sgd"]},
        }
    )
    assert [dimension.key for dimension in found.dimensions] == [
        "train.optimizer",
        "train.momentum",
    ]
    assert found.present() == {"train.optimizer": "adamw"}
    assert found.active({"train.optimizer": "sgd", "train.momentum": 0.5})["train.momentum"] == 0.5


def test_a_key_left_from_a_taken_trial_becomes_null_if_params_refuse_it() -> None:
    dimensions = {
        "train.optimizer": {"choice": ["adamw", "sgd"]},
        "train.momentum": {"range": [0.5, 0.9], "when": {"train.optimizer": ["sgd"]}},
    }
    given = content(space=dimensions)
    params = parse_params(given).search
    assert params is not None
    taken = {"train.optimizer": "sgd", "train.momentum": 0.7}
    found = read_space(changed_content(given, taken), params)  # refused without the null
    assert found.present() == taken
    adamw: Values = {"train.optimizer": "adamw"}
    assert found.changes(adamw) == adamw | {"train.momentum": None}
    assert found.changes(taken) == taken
    assert read_space(given, params).changes(adamw) == adamw


def test_a_key_whose_condition_does_not_hold_keeps_a_valid_value() -> None:
    when = {"choice": [20], "when": {"train.optimizer": ["adamw"]}}
    found = space(space={"train.optimizer": {"choice": ["adamw"]}, "train.epochs": when})
    assert found.changes({"train.optimizer": "adamw"}) == {"train.optimizer": "adamw"}


def test_a_range_proposes_integers_if_its_key_accepts_only_integers() -> None:
    found = space(
        space={
            "train.batch_size": {"range": [32, 64]},
            "train.weight_decay": {"range": [0, 1]},
            "train.early_stopping_patience": {"range": [2, 5]},
            "train.ema_decay": {"range": [0.5, 0.9]},
        }
    )
    whole = [dimension.key for dimension in found.dimensions if dimension.is_integer]
    assert whole == ["train.batch_size", "train.early_stopping_patience"]


def test_present_values_are_returned_only_if_they_are_in_the_space() -> None:
    assert space().present() == {"train.learning_rate": 0.004}
    assert space(space={"train.learning_rate": {"range": [0.1, 0.2]}}).present() is None
