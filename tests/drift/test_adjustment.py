"""What the labels say beyond the score: learned by feature, shrunk where they are few, with a variance that is true."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.adjustment import Adjustment, fit_adjustment
from slipway.drift.feature_reference import FeatureReference, describe
from slipway.drift.features import Feature

Float = NDArray[np.float64]
NUMBERS = [
    Feature(name=f"x{number}", kind="number", origin="input", categories=[]) for number in range(6)
]
NOISE = 0.25


def _numbers(random: np.random.Generator, num_rows: int, shift: float = 0.0) -> NDArray[np.float32]:
    """(rows, 6) standard normal, the first two nearly the same."""
    values = random.normal(size=(num_rows, len(NUMBERS)))
    values[:, 1] = values[:, 0] + 0.3 * values[:, 1]
    values[:, :2] += shift
    return values.astype(np.float32)


def _fit(
    values: NDArray[np.float32], residuals: Float, *, towards_none: bool = True
) -> tuple[list[FeatureReference], Adjustment]:
    features = [describe(feature, values[:, column]) for column, feature in enumerate(NUMBERS)]
    bins = [feature.bins(values[:, column]) for column, feature in enumerate(features)]
    return features, fit_adjustment(features, bins, residuals, NOISE, towards_none=towards_none)[0]


def _of(
    features: list[FeatureReference], adjustment: Adjustment, values: NDArray[np.float32]
) -> tuple[float, float]:
    counts = [
        np.bincount(feature.bins(values[:, column]), minlength=len(feature.counts)).astype(np.int64)
        for column, feature in enumerate(features)
    ]
    return adjustment.of(features, counts)


def _effect(values: NDArray[np.float32], slope: float) -> Float:
    """(rows,) that grows with the normal score of the first number's bin: of what happens inside a bin nothing is seen."""
    edges = [-1.28, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.28]
    scores = np.array([-1.64, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.64])
    found: Float = slope * scores[np.searchsorted(edges, values[:, 0])]
    return found


def _residuals(random: np.random.Generator, values: NDArray[np.float32], slope: float) -> Float:
    return _effect(values, slope) + random.normal(0, NOISE**0.5, len(values))


def test_what_two_features_say_alike_is_counted_once() -> None:
    random = np.random.default_rng(1)
    values = _numbers(random, 6000)
    features, adjustment = _fit(values, _residuals(random, values, 0.1))
    moved = _numbers(random, 6000, shift=0.7)
    truth = float(_effect(moved, 0.1).mean())
    found, variance = _of(features, adjustment, moved)
    assert abs(found - truth) < 0.02
    assert variance < 0.015**2
    slopes = [
        np.polyfit(values[:, column], _residuals(random, values, 0.1), 1)[0] for column in (0, 1)
    ]
    assert (
        float(moved[:, :2].mean(axis=0) @ slopes) > 1.6 * truth
    )  # the twin: each by itself, and summed


def test_few_labels_of_answers_without_fault_do_little_harm() -> None:
    random, errors, unshrunken = np.random.default_rng(2), [], []
    for _ in range(30):
        values = _numbers(random, 300)
        residuals = _residuals(random, values, 0.0)
        moved = _numbers(random, 2000, shift=1.0)
        errors.append(_of(*_fit(values, residuals), moved)[0])
        slopes = np.linalg.lstsq(np.column_stack([values, np.ones(300)]), residuals, rcond=None)[0]
        unshrunken.append(float(np.append(moved.mean(axis=0), 1) @ slopes))
    assert np.std(errors) < 0.025
    assert np.std(unshrunken) > 1.5 * np.std(errors)  # the twin: least squares


@pytest.mark.process
def test_the_variance_is_as_large_as_the_error() -> None:
    random, held, held_by_level = np.random.default_rng(3), 0, 0
    for _ in range(200):
        slope = random.normal(0, 0.05)
        values = _numbers(random, 2000)
        features, adjustment = _fit(values, _residuals(random, values, slope))
        moved = _numbers(random, 600, shift=0.7)
        found, variance = _of(features, adjustment, moved)
        error = abs(found - float(_effect(moved, slope).mean()))
        held += error <= 1.96 * variance**0.5
        held_by_level += error <= 1.96 * adjustment.level_variance**0.5
    assert held >= 184  # of 200
    assert held_by_level < 180  # the twin: as if the coefficients were known


def test_the_level_is_shrunk_towards_none_only_where_asked() -> None:
    random = np.random.default_rng(4)
    values = _numbers(random, 300)
    residuals = _residuals(random, values, 0.0) + 0.02
    mean = float(residuals.mean())
    assert np.isclose(_fit(values, residuals, towards_none=False)[1].level, mean)
    assert abs(_fit(values, residuals)[1].level) < 0.9 * abs(mean)
    assert _fit(values, residuals + 0.3)[1].level > 0.9 * (
        0.3 + mean
    )  # what is far beyond the noise stays


def test_values_that_no_label_was_seen_with_widen_the_variance() -> None:
    random = np.random.default_rng(5)
    values = _numbers(random, 3000)
    features, adjustment = _fit(values, _residuals(random, values, 0.1))
    missing = values.copy()
    missing[:1500, 3] = np.nan
    assert _of(features, adjustment, missing)[1] > _of(features, adjustment, values)[1]


def test_a_feature_of_too_many_categories_is_passed_over_and_the_others_enter() -> None:
    random = np.random.default_rng(6)
    many = Feature(
        name="many",
        kind="category",
        origin="output",
        categories=[str(number) for number in range(600)],
    )
    codes, values = random.integers(0, 600, 1000).astype(np.float32), _numbers(random, 1000)[:, 0]
    features = [describe(NUMBERS[0], values), describe(many, codes)]
    bins = [features[0].bins(values), features[1].bins(codes)]
    adjustment, said = fit_adjustment(
        features, bins, random.normal(size=1000), 1.0, towards_none=True
    )
    assert len(adjustment.coefficients) == 3
    assert said.shape == (1000,)


def test_what_it_says_of_rows_is_on_average_what_it_says_of_their_window() -> None:
    random = np.random.default_rng(7)
    values = _numbers(random, 2000)
    features = [describe(feature, values[:, column]) for column, feature in enumerate(NUMBERS)]
    bins = [feature.bins(values[:, column]) for column, feature in enumerate(features)]
    adjustment, said = fit_adjustment(
        features, bins, _residuals(random, values, 0.1), NOISE, towards_none=True
    )
    assert np.isclose(said[:500].mean(), _of(features, adjustment, values[:500])[0])
