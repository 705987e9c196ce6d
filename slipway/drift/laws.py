"""Tail probabilities of the statistics, and thresholds from them: what scipy.stats has, for a service that does not carry it.

Every function takes and gives arrays or numbers. tests/drift/test_laws.py compares each with scipy.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

_TERMS = 2000  # at most, of a series or a continued fraction; a few dozen are usual
_TINY = 1e-300
_EPSILON = 1e-15


def chi_square_tail(x: ArrayLike, degrees_of_freedom: float) -> Float:
    """P(X >= x) of a chi-square variable with a number of degrees of freedom above 0, whole or not; 1 for x <= 0.

    The regularised upper incomplete gamma function Q(k/2, x/2): by the series of P below a + 1 and by the continued fraction of Q above
    (NIST Digital Library of Mathematical Functions, 8.11.4 and 8.9.2), the fraction by Lentz's method.
    """
    a = degrees_of_freedom / 2
    halves = np.maximum(np.asarray(x, np.float64), 0.0) / 2
    tail = np.ones_like(halves)
    in_series = (halves > 0) & (halves < a + 1)
    in_fraction = halves >= a + 1
    tail[in_series] = 1 - _series(a, halves[in_series])
    tail[in_fraction] = _fraction(a, halves[in_fraction])
    return tail


def _prefactor(a: float, x: Float) -> Float:
    factor: Float = np.exp(a * np.log(x) - x - math.lgamma(a))
    return factor


def _series(a: float, x: Float) -> Float:
    term = np.full_like(x, 1 / a)
    total = term.copy()
    for number in range(1, _TERMS):
        term = term * x / (a + number)
        total += term
        if np.all(term < total * _EPSILON):
            break
    return total * _prefactor(a, x)


def _fraction(a: float, x: Float) -> Float:
    b = x + 1 - a
    c = np.full_like(x, 1 / _TINY)
    d = 1 / np.where(np.abs(b) < _TINY, _TINY, b)
    value = d.copy()
    for number in range(1, _TERMS):
        numerator = -number * (number - a)
        b = b + 2
        d = numerator * d + b
        d = 1 / np.where(np.abs(d) < _TINY, _TINY, d)
        c = b + numerator / c
        c = np.where(np.abs(c) < _TINY, _TINY, c)
        change = c * d
        value *= change
        if np.all(np.abs(change - 1) < _EPSILON * 4):
            break
    return value * _prefactor(a, x)


def normal_tail(z: ArrayLike) -> Float:
    """P(|Z| >= |z|) of a standard normal variable: both tails."""
    return chi_square_tail(np.square(np.asarray(z, np.float64)), 1)


def kolmogorov_tail(x: ArrayLike) -> Float:
    """P(K >= x) of Kolmogorov's distribution, the law of sqrt(n) times the largest distance between distribution functions.

    N. Smirnov, Table for estimating the goodness of fit of empirical distributions, Annals of Mathematical Statistics 19 (1948) 279-281.
    """
    values = np.asarray(x, np.float64)
    terms = [
        2 * (-1) ** (number - 1) * np.exp(-2 * (number * values) ** 2) for number in range(1, 101)
    ]
    return np.where(
        values < 0.2, 1.0, np.clip(sum(terms), 0.0, 1.0)
    )  # below 0.2 the tail is 1 to 12 digits


def quadratic_form_tail(x: float, weights: Float) -> float:
    """P(sum of weights * Z**2 >= x) for independent standard normal Z and weights above 0.

    The saddlepoint approximation of D. Kuonen, Saddlepoint approximations for distributions of quadratic forms in normal
    variables, Biometrika 86 (1999) 929-935: its error is relative, so that it holds in the far tail.
    """
    mean = float(weights.sum())
    if x <= mean * (
        1 + 1e-6
    ):  # at the mean itself it is undefined; below it only matters that nothing is surprising
        return 1.0 if x <= 0 else 0.5
    point = _saddlepoint(x, weights)
    rest = 1 - 2 * point * weights
    generating = -0.5 * float(np.log(rest).sum())
    curvature = float((2 * np.square(weights / rest)).sum())
    w = math.sqrt(2 * (point * x - generating))
    v = point * math.sqrt(curvature)
    return min(1.0, 0.5 * math.erfc((w + math.log(v / w) / w) / math.sqrt(2)))


def _saddlepoint(x: float, weights: Float) -> float:
    """Where the derivative of the cumulant generating function is `x`, by bisection between 0 and its pole."""
    low, high = 0.0, (1 - 1e-12) / (2 * float(weights.max()))
    for _ in range(200):
        middle = (low + high) / 2
        if float((weights / (1 - 2 * middle * weights)).sum()) < x:
            low = middle
        else:
            high = middle
        if high - low <= 1e-14 * high:
            break
    return (low + high) / 2


@lru_cache(maxsize=4096)
def chi_square_threshold(level: float, degrees_of_freedom: float) -> float:
    """The x whose tail probability is `level`."""
    return _bisected(
        lambda x: float(chi_square_tail(x, degrees_of_freedom)), level, degrees_of_freedom
    )


@lru_cache(maxsize=4096)
def kolmogorov_threshold(level: float) -> float:
    """The x whose tail probability is `level`."""
    return _bisected(lambda x: float(kolmogorov_tail(x)), level, 1.0)


def normal_threshold(level: float) -> float:
    """The z above 0 with P(|Z| >= z) = `level`."""
    return math.sqrt(chi_square_threshold(level, 1))


@lru_cache(maxsize=64)
def quadratic_form_threshold(level: float, weights: tuple[float, ...]) -> float:
    """The x whose tail probability is `level`, which is below one half."""
    own = np.array(weights)
    return _bisected(lambda x: quadratic_form_tail(x, own), level, float(own.sum()))


def _bisected(tail: Callable[[float], float], level: float, start: float) -> float:
    """Where the falling function `tail` meets `level`."""
    low, high = 0.0, start
    while tail(high) > level:
        low, high = high, high * 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > level else (low, middle)
    return (low + high) / 2
