"""The augmentation plan: pure draws within their ranges, matrices that mean what they say, forbidden operations refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.augmentation import (
    AugmentPlan,
    Draw,
    affine_matrices,
    draw,
    matrices,
    open_augmented,
    operations,
    plan_from_params,
    write_plan,
)
from slipway.data.packed import PackedManifest
from slipway.errors import ParamsError, SchemaError
from tests.data.pictures import CONTRACT
from tests.project_params import augment_params

OFF: dict[str, Any] = {"rotation_deg": 0.0, "scale": [1.0, 1.0], "crop_padding_px": 0, "horizontal_flip": 0.0, "vertical_flip": 0.0}
ON: dict[str, Any] = {"rotation_deg": 10.0, "scale": [0.9, 1.2], "crop_padding_px": 2, "horizontal_flip": 0.5, "vertical_flip": 0.25}
KEYS = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
MANIFEST = PackedManifest(
    format_version=2, task="image_classification", input=CONTRACT, classes=["a", "b"], mean=[0.5], std=[0.5], target_scale=None, splits={}
)


def plan(**changes: Any) -> AugmentPlan:
    return plan_from_params(augment_params(**changes), seed=7)


def change(**values: Any) -> Draw:
    neutral: dict[str, Any] = {
        "rotation_deg": 0.0,
        "scale": 1.0,
        "shift_x_px": 0,
        "shift_y_px": 0,
        "horizontal_flip": False,
        "vertical_flip": False,
    }
    return Draw(**{name: np.array([value]) for name, value in {**neutral, **values}.items()})


def read_from(values: Draw, x: float, y: float) -> NDArray[np.float32]:
    """Where an output point is read from in an image of 10 px."""
    point: NDArray[np.float32] = affine_matrices(values, 10)[0] @ np.array([x, y, 1], np.float32)
    return point


def test_nothing_asked_for_is_the_identity() -> None:
    assert plan().is_identity
    assert operations(plan()) == []
    identity = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    assert np.array_equal(matrices(plan(), 3, KEYS[:5], 16), np.broadcast_to(identity, (5, 2, 3)))


def test_draws_depend_on_the_key_alone_and_not_on_its_neighbours() -> None:
    everything = matrices(plan(**ON), 3, KEYS, 16)
    assert everything.dtype == np.float32
    assert everything.shape == (len(KEYS), 2, 3)
    assert np.array_equal(matrices(plan(**ON), 3, KEYS[100:107], 16), everything[100:107])


@pytest.mark.parametrize("epoch", [-1, 0, 1, 2])
def test_every_epoch_draws_anew(epoch: int) -> None:
    assert not np.array_equal(matrices(plan(**ON), 3, KEYS, 16), matrices(plan(**ON), epoch, KEYS, 16))


def test_draws_fill_their_ranges() -> None:
    values = draw(plan(**ON), 0, KEYS)
    assert -10 <= values.rotation_deg.min() < -9.9
    assert 9.9 < values.rotation_deg.max() <= 10
    assert 0.9 <= values.scale.min() < 0.901
    assert 1.199 < values.scale.max() <= 1.2
    assert abs(values.horizontal_flip.mean() - 0.5) < 0.02
    assert abs(values.vertical_flip.mean() - 0.25) < 0.02
    for shift in (values.shift_x_px, values.shift_y_px):
        found, counts = np.unique(shift, return_counts=True)
        assert found.tolist() == [-2, -1, 0, 1, 2]
        assert np.abs(counts / len(KEYS) - 0.2).max() < 0.02


def test_operations_are_drawn_independently() -> None:
    values = draw(plan(**ON), 0, KEYS)
    table = np.corrcoef(np.stack([column.astype(float) for column in values]))
    assert np.abs(table - np.eye(6)).max() < 4 / np.sqrt(len(KEYS))


@pytest.mark.parametrize(
    ("values", "point", "source"),
    [
        (change(shift_x_px=2), (0.0, 0.0), (-0.4, 0.0)),  # moved right: read from the left
        (change(shift_y_px=-1), (0.0, 0.0), (0.0, 0.2)),
        (change(horizontal_flip=True), (0.5, 0.25), (-0.5, 0.25)),
        (change(vertical_flip=True), (0.5, 0.25), (0.5, -0.25)),
        (change(scale=2.0), (0.5, -0.5), (0.25, -0.25)),  # enlarged: read nearer to the centre
        (change(rotation_deg=90.0), (0.0, -0.5), (0.5, 0.0)),  # counter-clockwise: the top comes from the right
        (change(rotation_deg=90.0, horizontal_flip=True), (0.0, -0.5), (-0.5, 0.0)),
        (change(rotation_deg=90.0, shift_x_px=5), (1.0, -0.5), (0.5, 0.0)),
    ],
)
def test_a_matrix_says_where_a_point_comes_from(values: Draw, point: tuple[float, float], source: tuple[float, float]) -> None:
    assert read_from(values, *point) == pytest.approx(source, abs=1e-6)


@pytest.mark.parametrize("name", OFF)
def test_a_forbidden_operation_is_refused_naming_both_keys(name: str) -> None:
    with pytest.raises(ParamsError) as raised:
        plan(**{name: ON[name], "forbid": [name]})
    assert f"augment.{name} is {ON[name]}" in str(raised.value)
    assert f"augment.forbid names {name!r}" in str(raised.value)


def test_forbidding_what_is_not_asked_for_is_no_fault() -> None:
    assert plan(forbid=list(OFF)).is_identity
    assert operations(plan(rotation_deg=5.0, forbid=["horizontal_flip"])) == ["rotation_deg"]


def test_all_forbidden_operations_are_named_at_once() -> None:
    with pytest.raises(ParamsError, match=r"(?s)horizontal_flip.*vertical_flip"):
        plan(**ON, forbid=["horizontal_flip", "vertical_flip"])


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_plan(tmp_path, plan(**ON))
    assert open_augmented(tmp_path, MANIFEST) == (plan(**ON), None)


def test_a_missing_plan_names_the_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"plan\.json is missing. Run `dvc repro augment`"):
        open_augmented(tmp_path, MANIFEST)


@pytest.mark.parametrize("content", ["{}", "words", '{"format_version": 2}'])
def test_a_plan_that_is_not_understood_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(SchemaError, match="not an augmentation plan"):
        open_augmented(tmp_path, MANIFEST)
