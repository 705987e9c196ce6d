"""Tests of the augmentation plan: requested and forbidden operations, and the plan's file."""

from pathlib import Path
from typing import Any, get_args

import pytest

from slipway.config.training import Operation
from slipway.data.augmentation.plan import (
    NEUTRAL,
    AugmentPlan,
    open_augmented,
    operations,
    plan_from_params,
    without_operations,
    write_plan,
)
from slipway.data.store.packed import PackedManifest
from slipway.system.errors import ParamsError, SchemaError
from tests.data.pictures import CONTRACT
from tests.project_params import augment_params

ON: dict[str, Any] = {
    "random_resized_crop": [0.3, 0.9],
    "rotation_deg": 10.0,
    "scale": [0.9, 1.2],
    "translation": 0.1,
    "crop_padding_px": 2,
    "horizontal_flip": 0.5,
    "vertical_flip": 0.25,
    "brightness": 0.2,
    "contrast": 0.3,
    "saturation": 0.4,
    "hue": 0.1,
    "erasing": 0.5,
    "mixup_alpha": 0.4,
    "cutmix_alpha": 1.0,
}
MANIFEST = PackedManifest(
    format_version=3,
    task="image_classification",
    input=CONTRACT,
    classes=["a", "b"],
    mean=[0.5],
    std=[0.5],
    target_scale=None,
    splits={},
)


def plan(**changes: Any) -> AugmentPlan:
    return plan_from_params(augment_params(**changes), seed=7)


def test_an_augmentation_plan_without_operations_is_the_identity() -> None:
    assert plan().is_identity
    assert operations(plan()) == []


def test_every_operation_of_the_params_can_be_requested_alone() -> None:
    assert set(NEUTRAL) == set(ON) == set(get_args(Operation))
    for name, value in ON.items():
        assert operations(plan(**{name: value})) == [name]


@pytest.mark.parametrize("name", ON)
def test_error_for_a_forbidden_operation_names_both_keys(name: str) -> None:
    with pytest.raises(ParamsError) as raised:
        plan(**{name: ON[name], "forbid": [name]})
    assert f"augment.{name} is {ON[name]}" in str(raised.value)
    assert f"augment.forbid names {name!r}" in str(raised.value)


def test_forbidding_an_unused_operation_is_allowed() -> None:
    assert plan(forbid=list(ON)).is_identity
    assert operations(plan(rotation_deg=5.0, forbid=["horizontal_flip"])) == ["rotation_deg"]


def test_one_error_names_all_forbidden_operations() -> None:
    with pytest.raises(ParamsError, match=r"(?s)horizontal_flip.*vertical_flip.*mixup_alpha"):
        plan(**ON, forbid=["mixup_alpha", "horizontal_flip", "vertical_flip"])


def test_mixing_with_probability_zero_is_not_an_operation() -> None:
    assert plan(mixup_alpha=0.4, cutmix_alpha=1.0, mix_probability=0.0).is_identity
    assert plan(mixup_alpha=0.4).mixes


def test_the_augmentation_plan_of_a_table_has_no_operations() -> None:
    assert without_operations(plan(**ON)).is_identity


def test_a_plan_survives_a_round_trip_through_its_file(tmp_path: Path) -> None:
    write_plan(tmp_path, plan(**ON))
    assert open_augmented(tmp_path, MANIFEST) == (plan(**ON), None)


def test_error_for_a_missing_plan_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"plan\.json is missing. Run `dvc repro augment`"):
        open_augmented(tmp_path, MANIFEST)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("words", "is not JSON"),
        ("{}", "has format version None, this Slipway reads version 2"),
        ('{"format_version": 1}', "has format version 1, this Slipway reads version 2"),
        ('{"format_version": 2}', "is not a valid AugmentPlan"),
    ],
)
def test_a_malformed_plan_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(SchemaError, match=reason):
        open_augmented(tmp_path, MANIFEST)
