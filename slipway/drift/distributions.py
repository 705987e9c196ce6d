"""Tail probabilities and critical values of the test statistics.

The service does not depend on scipy. Tests compare each function with `scipy.stats`.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

_KOLMOGOROV_TERMS = np.arange(1, 101)
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_lgamma = np.vectorize(math.lgamma, otypes=[np.float64])


def chi_square_tail(x: ArrayLike, degrees_of_freedom: int) -> Float:
    """Return P(X >= x) of a chi-square variable; 1 for x <= 0.

    With whole degrees of freedom the incomplete gamma function Q(k/2, x/2) is a finite sum of
    positive terms (NIST DLMF, 8.8.2), accurate in the far tail.
    """
    halves = np.maximum(np.asarray(x, np.float64) / 2, np.finfo(np.float64).tiny)
    powers = np.arange(degrees_of_freedom % 2 / 2, degrees_of_freedom / 2)
    shaped = halves[..., None]
    terms = np.exp(powers * np.log(shaped) - shaped - _lgamma(powers + 1))
    first = _erfc(np.sqrt(halves)) if degrees_of_freedom % 2 else 0.0
    tail: Float = np.minimum(first + terms.sum(axis=-1), 1.0)
    return tail


def normal_tail(z: ArrayLike) -> Float:
    """Return P(|Z| >= |z|) of a standard normal variable: both tails."""
    return chi_square_tail(np.square(np.asarray(z, np.float64)), 1)


def kolmogorov_tail(x: ArrayLike) -> Float:
    """Return P(K >= x) of Kolmogorov's distribution.

    It is the limit of sqrt(n) times the largest distance between two distribution functions
    (N. Smirnov, Annals of Mathematical Statistics 19, 1948, 279-281).
    """
    values = np.asarray(x, np.float64)
    signs = 2.0 * (-1.0) ** (_KOLMOGOROV_TERMS - 1)
    terms = signs * np.exp(-2 * np.square(_KOLMOGOROV_TERMS * values[..., None]))
    is_tiny = values < 0.2  # the series converges slowly there, and the tail is 1 to 12 digits
    return np.where(is_tiny, 1.0, np.clip(terms.sum(axis=-1), 0.0, 1.0))


def quadratic_form_tail(x: float, weights: Float) -> float:
    """Return P(sum of weights * Z**2 >= x) for independent standard normal Z and weights above 0.

    Saddlepoint approximation (D. Kuonen, Biometrika 86, 1999, 929-935). Its error is relative, so
    it is accurate in the far tail. Values below the mean are no evidence of drift and return 0.5.
    """
    mean = float(weights.sum())
    if x <= mean * (1 + 1e-6):  # the approximation is undefined at the mean
        return 1.0 if x <= 0 else 0.5
    point = _saddlepoint(x, weights)
    rest = 1 - 2 * point * weights
    generating = -0.5 * float(np.log(rest).sum())
    curvature = float((2 * np.square(weights / rest)).sum())
    w = math.sqrt(2 * (point * x - generating))
    v = point * math.sqrt(curvature)
    return min(1.0, 0.5 * math.erfc((w + math.log(v / w) / w) / math.sqrt(2)))


def _saddlepoint(x: float, weights: Float) -> float:
    """Solve K'(point) = x for the cumulant generating function K, between 0 and its pole."""
    pole = (1 - 1e-12) / (2 * float(weights.max()))
    return _bisect(
        lambda point: x - float((weights / (1 - 2 * point * weights)).sum()), 0.0, pole, 1e-14
    )


@lru_cache(maxsize=4096)
def chi_square_threshold(level: float, degrees_of_freedom: int) -> float:
    """Return the x whose tail probability is `level`."""
    return _invert(
        lambda x: float(chi_square_tail(x, degrees_of_freedom)), level, degrees_of_freedom
    )


@lru_cache(maxsize=4096)
def kolmogorov_threshold(level: float) -> float:
    """Return the x whose tail probability is `level`."""
    return _invert(lambda x: float(kolmogorov_tail(x)), level, 1.0)


def normal_threshold(level: float) -> float:
    """Return the z above 0 with P(|Z| >= z) = `level`."""
    return math.sqrt(chi_square_threshold(level, 1))


@lru_cache(maxsize=64)
def quadratic_form_threshold(level: float, weights: tuple[float, ...]) -> float:
    """Return the x whose tail probability is `level`, which must be below one half."""
    array = np.array(weights)
    return _invert(lambda x: quadratic_form_tail(x, array), level, float(array.sum()))


def _invert(tail: Callable[[float], float], level: float, start: float) -> float:
    """Return the x at which the decreasing function `tail` equals `level`, from `start` upwards."""
    low, high = 0.0, start
    while tail(high) > level:
        low, high = high, high * 2
    return _bisect(lambda x: tail(x) - level, low, high, 1e-10)


def _bisect(falling: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return the root of a decreasing function in [low, high], to a relative tolerance."""
    for _ in range(200):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
        if high - low <= tolerance * high:
            break
    return (low + high) / 2
