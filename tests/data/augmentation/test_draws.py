"""Tests of random changes: pure functions of (seed, epoch, key), ranges and matrices."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from slipway.data.augmentation.draws import (
    LUMA,
    Draw,
    affine_matrices,
    colour_matrices,
    crop_bounds,
    draw,
    draw_mixing,
    erased_bounds,
    unchanged,
)
from slipway.data.augmentation.plan import AugmentPlan, plan_from_params
from tests.data.augmentation.test_plan import ON
from tests.project_params import augment_params

KEYS = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)


def plan(**changes: Any) -> AugmentPlan:
    return plan_from_params(augment_params(**changes), seed=7)


def change(**values: Any) -> Draw:
    return unchanged(1)._replace(**{name: np.array([value]) for name, value in values.items()})


def read_from(values: Draw, x: float, y: float) -> NDArray[np.float32]:
    """Return the source position of an output point in an image of 10 px."""
    point: NDArray[np.float32] = affine_matrices(values, 10)[0] @ np.array([x, y, 1], np.float32)
    return point


def test_a_plan_without_operations_draws_no_change() -> None:
    for found, neutral in zip(draw(plan(), 3, KEYS[:5]), unchanged(5), strict=True):
        assert np.array_equal(found, neutral)
    identity = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    assert np.array_equal(
        affine_matrices(draw(plan(), 3, KEYS[:5]), 16), np.broadcast_to(identity, (5, 2, 3))
    )
    assert not draw(plan(), 3, KEYS[:5]).recolours
    assert (draw_mixing(plan(), 3, KEYS, 16).own_fraction == 1).all()


def test_the_draw_of_an_image_does_not_depend_on_the_other_keys() -> None:
    some = slice(100, 107)
    for everything, part in zip(
        draw(plan(**ON), 3, KEYS), draw(plan(**ON), 3, KEYS[some]), strict=True
    ):
        assert np.array_equal(part, everything[some])
    mixing, of_some = (
        draw_mixing(plan(**ON), 3, KEYS, 16),
        draw_mixing(plan(**ON), 3, KEYS[some], 16),
    )
    assert np.array_equal(of_some.own_fraction, mixing.own_fraction[some])
    assert np.array_equal(of_some.boxes, mixing.boxes[some])


@pytest.mark.parametrize("epoch", [-1, 0, 1, 2])
def test_each_epoch_draws_different_changes(epoch: int) -> None:
    for first, second in zip(draw(plan(**ON), 3, KEYS), draw(plan(**ON), epoch, KEYS), strict=True):
        assert not np.array_equal(first, second)
    assert not np.array_equal(
        draw_mixing(plan(**ON), 3, KEYS, 16).own_fraction,
        draw_mixing(plan(**ON), epoch, KEYS, 16).own_fraction,
    )


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("rotation_deg", -10, 10), ("scale", 0.9, 1.2), ("shift", -0.1, 0.1), ("brightness", 0.8, 1.2),
     ("contrast", 0.7, 1.3), ("saturation", 0.6, 1.4), ("hue", -0.1, 0.1)],
)  # fmt: skip
def test_drawn_parameters_cover_their_whole_range(name: str, low: float, high: float) -> None:
    values = getattr(draw(plan(**ON), 0, KEYS), name)
    edge = (high - low) / 100
    assert low <= values.min() < low + edge
    assert high - edge < values.max() <= high


def test_operations_occur_with_the_requested_probabilities() -> None:
    values = draw(plan(**ON), 0, KEYS)
    assert abs(values.horizontal_flip.mean() - 0.5) < 0.02
    assert abs(values.vertical_flip.mean() - 0.25) < 0.02
    assert abs((values.erased[:, 2] > 0).mean() - 0.5) < 0.02
    assert (
        abs(
            (
                draw_mixing(plan(**ON | {"mix_probability": 0.3}), 0, KEYS, 64).own_fraction < 1
            ).mean()
            - 0.3
        )
        < 0.02
    )


def test_shifts_by_whole_pixels_are_distributed_uniformly() -> None:
    for axis in (0, 1):
        found, counts = np.unique(draw(plan(**ON), 0, KEYS).shift_px[:, axis], return_counts=True)
        assert found.tolist() == [-2, -1, 0, 1, 2]
        assert np.abs(counts / len(KEYS) - 0.2).max() < 0.02


def test_crops_have_the_requested_area_and_aspect_and_lie_inside_the_image() -> None:
    crop = draw(plan(random_resized_crop=[0.08, 1.0], crop_aspect=[0.75, 1.3333]), 0, KEYS).crop
    area, aspect = crop[:, 2] * crop[:, 3], crop[:, 2] / crop[:, 3]
    assert stats.kstest(area, "uniform", args=(0.08, 0.92)).pvalue > 0.001
    small = area < 0.7
    assert (
        stats.kstest(
            np.log(aspect[small]), "uniform", args=(math.log(0.75), math.log(1.3333 / 0.75))
        ).pvalue
        > 0.001
    )
    assert (crop[:, :2] >= 0).all()
    assert (crop[:, :2] + crop[:, 2:] <= 1 + 1e-12).all()
    bounds = crop_bounds(draw(plan(random_resized_crop=[0.001, 1.0]), 0, KEYS), 17)
    assert bounds.min() >= 0
    assert bounds.max() <= 17
    assert (bounds[:, 2:] > bounds[:, :2]).all()


def test_erased_rectangles_have_the_requested_area() -> None:
    values = draw(plan(erasing=1.0, erasing_area=[0.1, 0.2]), 0, KEYS)
    area = values.erased[:, 2] * values.erased[:, 3]
    assert stats.kstest(area, "uniform", args=(0.1, 0.1)).pvalue > 0.001
    bounds = erased_bounds(values, 100)
    pixels = (bounds[:, 2] - bounds[:, 0]) * (bounds[:, 3] - bounds[:, 1])
    assert np.abs(pixels / 10_000 - area).max() < 0.015


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0])
def test_mixup_weights_are_beta_distributed(alpha: float) -> None:
    shares = draw_mixing(plan(mixup_alpha=alpha), 0, KEYS, 16).own_fraction.astype(float)
    points = np.linspace(0.01, 0.99, 99)  # not at 0 and 1, where float32 ends
    found = np.searchsorted(np.sort(shares), points) / len(shares)
    assert np.abs(found - stats.beta(alpha, alpha).cdf(points)).max() < 2 / np.sqrt(len(shares))
    assert np.abs(found - stats.beta(1.5 * alpha, 1.5 * alpha).cdf(points)).max() > 4 / np.sqrt(
        len(shares)
    )  # the test can tell


def test_cutmix_weights_an_image_by_its_area_outside_the_box() -> None:
    mixing = draw_mixing(plan(cutmix_alpha=1.0), 0, KEYS, 40)
    sides = mixing.boxes[:, 2:] - mixing.boxes[:, :2]
    assert np.allclose(mixing.own_fraction, 1 - sides.prod(axis=1) / 1600)
    assert sides.min() >= 0
    assert mixing.boxes.min() == 0
    assert mixing.boxes.max() == 40


def test_mixup_and_cutmix_are_each_drawn_half_of_the_time() -> None:
    mixing = draw_mixing(plan(cutmix_alpha=4.0, mixup_alpha=1.0), 0, KEYS, 100)
    assert abs((mixing.boxes[:, 2] > mixing.boxes[:, 0]).mean() - 0.5) < 0.02


def test_augmentation_operations_are_drawn_independently_of_each_other() -> None:
    values = draw(plan(**ON), 0, KEYS)
    mixing = draw_mixing(plan(**ON), 0, KEYS, 16)
    columns = [
        column.astype(float).reshape(len(KEYS), -1)
        for column in (*values[:-1], (values.erased[:, :1] > 0), mixing.own_fraction)
    ]
    table = np.abs(np.corrcoef(np.concatenate(columns, axis=1).T))
    table[:4, :4] = 0  # where a crop is depends on how large it is
    np.fill_diagonal(table, 0)
    assert table.max() < 5 / np.sqrt(len(KEYS))


@pytest.mark.parametrize(
    ("values", "point", "source"),
    [
        (change(shift_px=[2, 0]), (0.0, 0.0), (-0.4, 0.0)),  # moved right: read from the left
        (change(shift_px=[0, -1]), (0.0, 0.0), (0.0, 0.2)),
        (change(shift=[0.1, 0.0], shift_px=[1, 0]), (0.0, 0.0), (-0.4, 0.0)),
        (change(horizontal_flip=True), (0.5, 0.25), (-0.5, 0.25)),
        (change(vertical_flip=True), (0.5, 0.25), (0.5, -0.25)),
        (change(scale=2.0), (0.5, -0.5), (0.25, -0.25)),  # enlarged: read nearer to the centre
        (
            change(rotation_deg=90.0),
            (0.0, -0.5),
            (0.5, 0.0),
        ),  # counter-clockwise: the top comes from the right
        (change(rotation_deg=90.0, horizontal_flip=True), (0.0, -0.5), (-0.5, 0.0)),
        (change(rotation_deg=90.0, shift_px=[5, 0]), (1.0, -0.5), (0.5, 0.0)),
    ],
)
def test_an_affine_matrix_maps_output_points_to_source_points(
    values: Draw, point: tuple[float, float], source: tuple[float, float]
) -> None:
    assert read_from(values, *point) == pytest.approx(source, abs=1e-6)


def coloured(values: Draw, pixel: list[float], mean: float = 0.0) -> NDArray[np.float64]:
    matrices, shares = colour_matrices(values, len(pixel))
    result: NDArray[np.float64] = matrices[0] @ np.array(pixel) + shares[0] * mean
    return result


def test_brightness_and_contrast_are_factors() -> None:
    assert coloured(change(brightness=1.5), [100, 40, 20]) == pytest.approx([150, 60, 30], abs=1e-3)
    assert coloured(change(contrast=0.5), [100, 40, 20], mean=60) == pytest.approx(
        [80, 50, 40], abs=1e-3
    )
    assert coloured(change(contrast=0.5, brightness=2.0), [100.0], mean=60) == pytest.approx(
        [160], abs=1e-3
    )


def test_saturation_of_zero_turns_a_pixel_grey() -> None:
    grey = float(LUMA @ [200, 40, 20])
    assert coloured(change(saturation=0.0), [200, 40, 20]) == pytest.approx([grey] * 3, abs=1e-3)


def test_hue_rotates_colours_and_preserves_greys_and_luma() -> None:
    assert coloured(change(hue=0.3), [90, 90, 90]) == pytest.approx([90] * 3, abs=0.1)
    assert float(LUMA @ coloured(change(hue=0.3), [120, 90, 60])) == pytest.approx(
        float(LUMA @ [120, 90, 60]), abs=0.1
    )
    assert coloured(change(hue=1.0), [120, 90, 60]) == pytest.approx(
        [120, 90, 60], abs=1e-3
    )  # once around
    once = coloured(change(hue=0.2), [120, 90, 60])
    assert coloured(change(hue=-0.2), once.tolist()) == pytest.approx([120, 90, 60], abs=1e-2)
    assert np.abs(once - [120, 90, 60]).max() > 10
