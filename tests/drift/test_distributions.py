"""Tails and thresholds agree with scipy, or with simulation if scipy has no such function."""

import numpy as np
import pytest
import scipy.special  # type: ignore[import-untyped]
import scipy.stats  # type: ignore[import-untyped]

from slipway.drift import distributions


@pytest.mark.parametrize("degrees_of_freedom", [1, 2, 3, 9, 19, 99, 999])
def test_chi_square_tail_agrees_with_scipy(degrees_of_freedom: int) -> None:
    x = np.concatenate(
        [
            [-1.0, 0.0, 1e-9],
            np.linspace(0.01, 3, 50) * degrees_of_freedom,
            degrees_of_freedom + np.geomspace(1, 500, 60),
        ]
    )
    expected = scipy.stats.chi2.sf(x, degrees_of_freedom)
    np.testing.assert_allclose(
        distributions.chi_square_tail(x, degrees_of_freedom), expected, rtol=1e-9, atol=1e-290
    )


def test_normal_tail_agrees_with_scipy() -> None:
    z = np.linspace(-12, 12, 101)
    np.testing.assert_allclose(
        distributions.normal_tail(z), 2 * scipy.stats.norm.sf(np.abs(z)), rtol=1e-9
    )


def test_kolmogorov_tail_agrees_with_scipy() -> None:
    x = np.linspace(0.01, 6, 200)
    np.testing.assert_allclose(
        distributions.kolmogorov_tail(x), scipy.special.kolmogorov(x), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("level", [0.05, 1e-3, 2e-5, 1e-9])
def test_threshold_is_the_point_whose_tail_probability_is_the_level(level: float) -> None:
    assert distributions.chi_square_threshold(level, 9) == pytest.approx(
        scipy.stats.chi2.isf(level, 9), rel=1e-7
    )
    assert distributions.normal_threshold(level) == pytest.approx(
        scipy.stats.norm.isf(level / 2), rel=1e-7
    )
    assert distributions.kolmogorov_threshold(level) == pytest.approx(
        scipy.special.kolmogi(level), rel=1e-7
    )
    weights = (3.0, 1.0, 0.2)
    assert distributions.quadratic_form_tail(
        distributions.quadratic_form_threshold(level, weights), np.array(weights)
    ) == pytest.approx(level, rel=1e-6)


@pytest.mark.parametrize("number", [1, 4, 64])
def test_quadratic_form_with_equal_weights_is_chi_square(number: int) -> None:
    for level in (1e-2, 1e-4, 1e-8):
        x = 0.3 * scipy.stats.chi2.isf(level, number)
        assert distributions.quadratic_form_tail(x, np.full(number, 0.3)) == pytest.approx(
            level, rel=0.12
        )


def test_quadratic_form_tail_agrees_with_simulation() -> None:
    weights = np.array([2.0, 1.0, 0.5, 0.1, 0.1])
    draws = np.square(np.random.default_rng(3).normal(size=(400_000, 5))) @ weights
    for share in (0.1, 0.01, 0.001):
        assert distributions.quadratic_form_tail(
            float(np.quantile(draws, 1 - share)), weights
        ) == pytest.approx(share, rel=0.15)


def test_quadratic_form_tail_is_one_half_below_the_mean() -> None:
    assert distributions.quadratic_form_tail(0.5, np.array([1.0, 1.0])) == 0.5
    assert distributions.quadratic_form_tail(0.0, np.array([1.0, 1.0])) == 1.0
