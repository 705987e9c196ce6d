"""Invalid ensembles are refused before training, with the value to write."""

import copy
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.ensemble import members_of, require_one_model, student_of
from slipway.config.network_arguments import LightgbmArguments, TabmArguments
from slipway.config.params import mistakes_in, parse_params
from slipway.system.errors import ParamsError
from tests.project_params import PROJECT, of_kind

TREES = {
    "network": "lightgbm",
    "network_arguments": LightgbmArguments().model_dump(),
    "epochs": 200,
}


def content(
    members: list[Any], method: str | None = "average", task: str = "table_classification"
) -> dict[str, Any]:
    """Return the content of params.yaml for TabM with an ensemble."""
    found = of_kind(copy.deepcopy(PROJECT.model_dump(mode="json")), task)
    found["train"] |= {
        "network": "tabm",
        "network_arguments": TabmArguments().model_dump(),
        "label_smoothing": 0.0,
    }
    folds = 5 if method == "stack" else None
    found["ensemble"] = {"method": method, "folds": folds, "members": members, "student": None}
    if task == "table_regression":
        found["evaluate"]["gates"] = {}
    return found


def test_ensemble_section_of_the_guide_is_accepted(root: Path) -> None:
    guide = (root / "docs/how-to/ensembles.md").read_text()
    block = re.search(r"^ +```yaml\n(.*?)^ +```", guide, re.DOTALL | re.MULTILINE)
    assert block
    found = content([], task="table_regression") | yaml.safe_load(textwrap.dedent(block[1]))
    assert len(parse_params(found).ensemble.members) == 3


def test_members_inherit_all_values_that_they_do_not_set() -> None:
    wider = {"train": {"network_arguments": {"width": 64}, "epochs": 3}}
    params = parse_params(content([{}, {"seed": 8}, {"train": TREES}, wider]))
    same, seeded, trees, wide = members_of(params.ensemble, params.seed, params.train)
    assert (same.train, same.seed) == (params.train, params.seed)
    assert (seeded.train, seeded.seed, seeded.name) == (params.train, 8, "tabm, seed 8")
    assert (trees.train.network, trees.train.epochs) == ("lightgbm", 200)
    assert wide.train.network_arguments == params.train.network_arguments | {"width": 64}
    assert wide.name == f"tabm, seed {params.seed}, epochs 3"


@pytest.mark.parametrize(
    ("members", "method", "expected"),
    [
        ([{}], None, "members has 1 entries, but method is null: set method to"),
        ([{}], "average", "at least two members, but members has 1: write members"),
        ([{}, {"sed": 8}], "average", r"ensemble\.members.*sed.*did you mean 'seed'"),
        ([{}, {"data": {"task": "x"}}], "average", r"ensemble\.members.*data"),
        ([{}, {"seed": -1}], "average", r"ensemble\.members.*seed"),
        ([{}, {}], "average", r"ensemble\.members\[1\] is the same as members\[0\].*another seed"),
        (
            [{}, {"train": {"learning_rat": 0.1}}],
            "greedy",
            r"members\[1\]\.train\.learning_rat.*did you mean 'learning_rate'",
        ),
        ([{}, {"train": {"epochs": 0}}], "average", r"members\[1\]\.train\.epochs"),
        (
            [{}, {"train": {"network": "lightgbm", "network_arguments": {"width": 3}}}],
            "average",
            r"members\[1\]\.train: network_arguments of",
        ),
        (
            [{}, {"train": TREES | {"ema_decay": 0.9}}],
            "average",
            r"members\[1\]: train\.ema_decay is 0.9, but .* set it to null",
        ),
        (
            [{}, {"train": {"network": "small_resnet"}}],
            "average",
            r"members\[1\]: train\.network is 'small_resnet', but data\.task is",
        ),
        (
            [{}, {"train": {"devices": 2}}],
            "average",
            r"members\[1\]\.train\.devices is 2, but .* in one process: set it to 'auto'",
        ),
        (
            [{}, {"train": {"loss": "losses:mine"}}],
            "average",
            r"members\[1\]\.train\.loss is 'losses:mine', but .* name it there",
        ),
    ],
)
def test_error_names_the_position_of_a_member_that_cannot_be_trained(
    members: list[Any], method: str | None, expected: str
) -> None:
    with pytest.raises(ParamsError, match=expected):
        parse_params(content(members, method))


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ({"seed": 8}, r"members\[1\]\.seed is 8, but a soup .* expected 7: remove seed"),
        ({"train": TREES}, "whose trees cannot be averaged: use the method average or greedy"),
        (
            {"train": {"network_arguments": {"width": 64}}},
            r"members\[1\]\.train\.network_arguments is .* began as the same",
        ),
    ],
)
def test_a_soup_of_members_with_different_initial_weights_is_refused(
    member: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ParamsError, match=expected):
        parse_params(content([{}, member], "soup"))
    assert mistakes_in(content([{}, {"train": {"learning_rate": 0.002}}], "soup")) == []


@pytest.mark.parametrize(
    ("method", "folds", "expected"),
    [
        ("stack", None, "fitted to answers out of fold, but folds is null: set folds to 5"),
        ("stack", 1, r"ensemble\.folds"),
        (
            "greedy",
            5,
            "folds is 5, but method is 'greedy' and no member has without_fold: set folds to null",
        ),
    ],
)
def test_folds_are_required_for_a_stack_and_refused_where_nothing_uses_them(
    method: str, folds: int | None, expected: str
) -> None:
    given = content([{}, {"seed": 8}], method)
    given["ensemble"]["folds"] = folds
    with pytest.raises(ParamsError, match=expected):
        parse_params(given)


def test_stack_is_refused_if_rows_have_groups() -> None:
    given = content([{}, {"seed": 8}], "stack")
    given["data"]["group_column"] = "person"
    (found,) = mistakes_in(given)
    assert "data.group_column is 'person', but the folds of" in found


def test_voting_is_refused_for_numeric_targets() -> None:
    (found,) = mistakes_in(content([{}, {"seed": 8}], "vote", "table_regression"))
    assert "whose numbers have no votes: set it to 'average'" in found


def test_pruning_together_with_an_ensemble_is_refused() -> None:
    given = content([{}, {"seed": 8}])
    given["prune"]["kind"] = "magnitude"
    given["export"]["variants"] = ["fp32", "pruned"]
    given["compile"]["variant"] = "fp32"
    assert any("set prune.kind to null" in text for text in mistakes_in(given))


def test_a_required_engine_is_refused_for_trees() -> None:
    given = content([{}, {"train": TREES}])
    given["compile"]["require"] = True
    (found,) = mistakes_in(given)
    assert "ensemble.members[1]: compile.require is true" in found
    assert "TensorRT cannot run" in found


def test_a_command_for_one_model_refuses_an_ensemble() -> None:
    require_one_model(None, "slipway search")
    with pytest.raises(ParamsError, match=r"slipway search is for one model.*method: null"):
        require_one_model("greedy", "slipway search")


STUDENT = {"temperature": 2.0, "soft_fraction": 0.8, "served": True}


def taught(
    student: dict[str, Any], method: str | None = "average", task: str = "table_classification"
) -> list[str]:
    given = content([{}, {"seed": 8}] if method else [], method, task)
    given["ensemble"]["student"] = student
    return mistakes_in(given)


def test_student_of_an_ensemble_is_accepted_for_every_kind_of_input() -> None:
    assert taught(STUDENT) == []
    assert taught(STUDENT | {"seed": 9, "train": {"learning_rate": 0.1}}) == []
    assert taught(STUDENT | {"temperature": None}, task="table_regression") == []
    params = parse_params(content([{}, {"seed": 8}]) | {})
    assert student_of(params.ensemble, params.seed, params.train) is None


@pytest.mark.parametrize(
    ("student", "method", "task", "expected"),
    [
        ({"train": TREES}, "average", "table_classification", "trees do not learn from soft"),
        ({"temperature": None}, "average", "table_classification", "set it to 2.0"),
        ({}, "average", "table_regression", "numbers have none: set it to null"),
        ({}, "soup", "table_classification", "set student to null"),
        ({}, None, "table_classification", "set student to null"),
        ({"soft_fraction": 0}, "average", "table_classification", "above 0"),
        ({"train": {"epochs": 0}}, "average", "table_classification", "student.train.epochs"),
        ({"train": {"devices": 2}}, "average", "table_classification", "in one process"),
    ],
)
def test_student_without_usable_settings_is_refused_before_training(
    student: dict[str, Any], method: str | None, task: str, expected: str
) -> None:
    found = taught(STUDENT | student, method, task)
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    ("folds", "numbers", "method", "expected"),
    [
        (5, [0, 1], "average", ""),
        (2, [1, None], "greedy", ""),
        (None, [0, 1], "average", "without_fold is 1, but folds is null: set folds to 5"),
        (3, [0, 3], "average", "but folds is 3: expected a number from 0 to 2"),
        (5, [0, 1], "stack", "whose folds are those of every member"),
        (5, [2, 2], "average", "is the same as members[0]"),
    ],
)
def test_members_may_each_leave_out_one_existing_fold(
    folds: int | None, numbers: list[int | None], method: str, expected: str
) -> None:
    given = content([{"without_fold": number} for number in numbers], method)
    given["ensemble"]["folds"] = folds
    found = mistakes_in(given)
    assert any(expected in line for line in found) if expected else found == []


def test_student_leaves_out_no_fold() -> None:
    assert "ensemble.student.without_fold" in " ".join(taught(STUDENT | {"without_fold": 0}))
