"""Residual model: additive effects of features, shrinkage with few labels, an honest variance."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference, describe_feature
from slipway.drift.features import Feature
from slipway.drift.residual_model import ResidualModel, fit_residual_model

Float = NDArray[np.float64]
NUMBERS = [
    Feature(name=f"x{number}", kind="number", origin="input", categories=[]) for number in range(6)
]
NOISE = 0.25


def _numbers(random: np.random.Generator, num_rows: int, shift: float = 0.0) -> NDArray[np.float32]:
    """(rows, 6) standard normal; the first two columns are highly correlated."""
    values = random.normal(size=(num_rows, len(NUMBERS)))
    values[:, 1] = values[:, 0] + 0.3 * values[:, 1]
    values[:, :2] += shift
    return values.astype(np.float32)


def _fit(
    values: NDArray[np.float32], residuals: Float, *, shrink_level: bool = True
) -> tuple[list[FeatureReference], ResidualModel]:
    features = [
        describe_feature(feature, values[:, column]) for column, feature in enumerate(NUMBERS)
    ]
    bins = [feature.bins(values[:, column]) for column, feature in enumerate(features)]
    return features, fit_residual_model(
        features, bins, residuals, NOISE, shrink_level=shrink_level
    )[0]


def _predict(
    features: list[FeatureReference], model: ResidualModel, values: NDArray[np.float32]
) -> tuple[float, float]:
    counts = [
        np.bincount(feature.bins(values[:, column]), minlength=len(feature.counts)).astype(np.int64)
        for column, feature in enumerate(features)
    ]
    return model.predict(features, counts)


def _effect(values: NDArray[np.float32], slope: float) -> Float:
    """(rows,) effect proportional to the normal score of the first column's bin."""
    edges = [-1.28, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.28]
    scores = np.array([-1.64, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.64])
    found: Float = slope * scores[np.searchsorted(edges, values[:, 0])]
    return found


def _residuals(random: np.random.Generator, values: NDArray[np.float32], slope: float) -> Float:
    return _effect(values, slope) + random.normal(0, NOISE**0.5, len(values))


def test_effect_shared_by_two_correlated_features_is_counted_once() -> None:
    random = np.random.default_rng(1)
    values = _numbers(random, 6000)
    features, model = _fit(values, _residuals(random, values, 0.1))
    moved = _numbers(random, 6000, shift=0.7)
    truth = float(_effect(moved, 0.1).mean())
    found, variance = _predict(features, model, moved)
    assert abs(found - truth) < 0.02
    assert variance < 0.015**2
    slopes = [
        np.polyfit(values[:, column], _residuals(random, values, 0.1), 1)[0] for column in (0, 1)
    ]
    assert (
        float(moved[:, :2].mean(axis=0) @ slopes) > 1.6 * truth
    )  # counter-check: separate fits, summed


def test_few_labels_without_any_effect_shift_the_prediction_little() -> None:
    random, errors, unshrunken = np.random.default_rng(2), [], []
    for _ in range(30):
        values = _numbers(random, 300)
        residuals = _residuals(random, values, 0.0)
        moved = _numbers(random, 2000, shift=1.0)
        errors.append(_predict(*_fit(values, residuals), moved)[0])
        slopes = np.linalg.lstsq(np.column_stack([values, np.ones(300)]), residuals, rcond=None)[0]
        unshrunken.append(float(np.append(moved.mean(axis=0), 1) @ slopes))
    assert np.std(errors) < 0.025
    assert np.std(unshrunken) > 1.5 * np.std(errors)  # counter-check: least squares


@pytest.mark.process
def test_predicted_variance_covers_the_error() -> None:
    random, held, held_by_level = np.random.default_rng(3), 0, 0
    for _ in range(200):
        slope = random.normal(0, 0.05)
        values = _numbers(random, 2000)
        features, model = _fit(values, _residuals(random, values, slope))
        moved = _numbers(random, 600, shift=0.7)
        found, variance = _predict(features, model, moved)
        error = abs(found - float(_effect(moved, slope).mean()))
        held += error <= 1.96 * variance**0.5
        held_by_level += error <= 1.96 * model.level_variance**0.5
    assert held >= 184  # of 200
    assert held_by_level < 180  # counter-check: without the coefficients' variance


def test_mean_residual_is_shrunk_only_with_shrink_level() -> None:
    random = np.random.default_rng(4)
    values = _numbers(random, 300)
    residuals = _residuals(random, values, 0.0) + 0.02
    mean = float(residuals.mean())
    assert np.isclose(_fit(values, residuals, shrink_level=False)[1].level, mean)
    assert abs(_fit(values, residuals)[1].level) < 0.9 * abs(mean)
    assert _fit(values, residuals + 0.3)[1].level > 0.9 * (
        0.3 + mean
    )  # far beyond the noise: hardly shrunk


def test_feature_values_without_labels_increase_the_predicted_variance() -> None:
    random = np.random.default_rng(5)
    values = _numbers(random, 3000)
    features, model = _fit(values, _residuals(random, values, 0.1))
    missing = values.copy()
    missing[:1500, 3] = np.nan
    assert _predict(features, model, missing)[1] > _predict(features, model, values)[1]


def test_feature_with_too_many_categories_is_left_out_of_the_model() -> None:
    random = np.random.default_rng(6)
    many = Feature(
        name="many",
        kind="category",
        origin="output",
        categories=[str(number) for number in range(600)],
    )
    codes, values = random.integers(0, 600, 1000).astype(np.float32), _numbers(random, 1000)[:, 0]
    features = [describe_feature(NUMBERS[0], values), describe_feature(many, codes)]
    bins = [features[0].bins(values), features[1].bins(codes)]
    model, fitted = fit_residual_model(
        features, bins, random.normal(size=1000), 1.0, shrink_level=True
    )
    assert len(model.coefficients) == 3
    assert fitted.shape == (1000,)


def test_prediction_for_a_window_is_the_mean_of_its_rows_fitted_values() -> None:
    random = np.random.default_rng(7)
    values = _numbers(random, 2000)
    features = [
        describe_feature(feature, values[:, column]) for column, feature in enumerate(NUMBERS)
    ]
    bins = [feature.bins(values[:, column]) for column, feature in enumerate(features)]
    model, fitted = fit_residual_model(
        features, bins, _residuals(random, values, 0.1), NOISE, shrink_level=True
    )
    assert np.isclose(fitted[:500].mean(), _predict(features, model, values[:500])[0])
