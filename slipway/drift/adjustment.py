"""How much better or worse the answers are than their score says, by every feature of a row: learned from the validation labels.

A linear model of the residuals: of a number the normal score of its bin and the square, of a category and of missing values a column for
each. It is additive, so a window's counts of each feature are enough; how features act together is not in it. Coefficients are shrunk by as
much as their noise asks for, so that few labels do no harm, and what the labels leave open comes out as a variance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference
from slipway.system.contract import Contract

Float = NDArray[np.float64]
Bins = NDArray[np.intp]

_MOST_COLUMNS = 128  # the bundle holds their square; a feature that alone has more, as a thousand classes, is passed over
_SCALES = np.linspace(0.0, 0.3, 31)  # of a coefficient, in deviations of a residual
_PRIOR = np.exp(
    -0.5 * np.square(_SCALES / 0.1)
)  # half normal: 0.1 is five points where half of the answers are right
_BLOCK_ROWS = 4096


class Adjustment(Contract):
    """What is added to the score's own claim, as the mean of rows, from the rows' mean of each column of the model.

    Of the coefficients' covariance what the labels took off is kept: `unknown` times the identity, less the sum of the outer products
    of `learned`.
    """

    features: list[int]  # places of those that enter
    level: float  # of rows like the validation rows
    level_variance: float
    centre: list[float]  # (columns,) the validation rows' mean
    coefficients: list[float]  # (columns,)
    unknown: float  # the variance of a coefficient of which nothing is learned
    learned: list[list[float]]  # (directions, columns)

    def of(
        self, features: Sequence[FeatureReference], counts: Sequence[NDArray[np.int64]]
    ) -> tuple[float, float]:
        """The mean residual of rows of which so many are in the (bins,) of each feature, and the variance of what is not known of it."""
        means = [
            counts[place] / counts[place].sum() @ _table(features[place]) for place in self.features
        ]
        shift = np.concatenate([*means, np.empty(0)]) - np.array(self.centre)
        told = np.array(self.learned).reshape(-1, len(shift)) @ shift
        variance = self.unknown * float(shift @ shift) - float(told @ told)
        return self.level + float(shift @ np.array(self.coefficients)), self.level_variance + max(
            0.0, variance
        )


def fit_adjustment(
    features: Sequence[FeatureReference],
    bins: Sequence[Bins],
    residuals: Float,
    noise: float,
    *,
    towards_none: bool,
) -> tuple[Adjustment, Float]:
    """The model, and what it says of each row; `bins` (rows,) of each feature, `residuals` (rows,), `noise` the variance of one.

    A ridge regression whose penalty is averaged over its evidence (MacKay, Bayesian interpolation, Neural Computation 4, 1992): in
    deviations of the noise the coefficients are normal with one scale, of which the small ones are as likely beforehand (half normal:
    Gelman, Bayesian Analysis 1, 2006). With `towards_none` the level is shrunk as well, by a scale of its own.
    """
    entering = _entering(features, bins, residuals)
    tables, taken = (
        [_table(features[place]) for place in entering],
        [bins[place] for place in entering],
    )
    counts = [
        np.bincount(own, minlength=len(table)) for own, table in zip(taken, tables, strict=True)
    ]
    centre = np.concatenate(
        [own / len(residuals) @ table for own, table in zip(counts, tables, strict=True)]
    )
    gram, products = _moments(tables, taken, centre, residuals)
    strengths, directions = _directions(gram, len(residuals))
    deviation = np.sqrt(noise)
    means, variances, unknown = _shrunken(strengths, directions @ products / deviation)
    level, level_variance = float(residuals.mean()) / deviation, 1 / len(residuals)
    if towards_none:
        shrunken, left, _ = _shrunken(
            np.array([len(residuals)]), np.array([level * len(residuals)])
        )
        level, level_variance = float(shrunken[0]), float(left[0])
    found = Adjustment(
        features=entering,
        level=level * deviation,
        level_variance=level_variance * noise,
        centre=centre.tolist(),
        coefficients=(deviation * means @ directions).tolist(),
        unknown=unknown * noise,
        learned=(
            np.sqrt(noise * np.maximum(0, unknown - variances))[:, None] * directions
        ).tolist(),
    )
    return found, _said(found, tables, taken)


def _entering(
    features: Sequence[FeatureReference], bins: Sequence[Bins], residuals: Float
) -> list[int]:
    """Places of the features that enter; where there is no room for all, those by whose bins the residuals differ most."""
    widths = [_table(feature).shape[1] for feature in features]
    order = sorted(range(len(features)), key=lambda place: -_difference(bins[place], residuals))
    places, room = [], _MOST_COLUMNS
    for place in order:
        if widths[place] <= room:
            places.append(place)
            room -= widths[place]
    return sorted(places)


def _difference(bins: Bins, residuals: Float) -> float:
    """The sum of squares between the bins in deviations, for comparing features: beyond what it is of noise."""
    counts = np.bincount(bins)
    there = counts > 0
    between = np.square(np.bincount(bins, residuals - residuals.mean())[there]) / counts[there]
    freedom = max(1, int(there.sum()) - 1)
    return float(
        (between.sum() / max(float(residuals.var()), 1e-300) - freedom) / np.sqrt(2 * freedom)
    )


def _table(feature: FeatureReference) -> Float:
    """(bins, columns). Of a number the first two Hermite polynomials of its normal score, as good as uncorrelated, and missing or not."""
    if feature.kind == "category":
        return np.eye(len(feature.counts))
    scores, is_missing = (
        feature.normal_scores,
        np.arange(len(feature.counts)) == len(feature.counts) - 1,
    )
    return np.column_stack([scores, (np.square(scores) - 1) / np.sqrt(2) * ~is_missing, is_missing])


def _moments(
    tables: Sequence[Float], bins: Sequence[Bins], centre: Float, residuals: Float
) -> tuple[Float, Float]:
    """(columns, columns) and (columns,): the sums over rows of the centred columns' products, with each other and with the residuals."""
    gram, products = np.zeros((len(centre), len(centre))), np.zeros(len(centre))
    for start in range(0, len(residuals), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        block = (
            np.concatenate(
                [table[own[part]] for table, own in zip(tables, bins, strict=True)], axis=1
            )
            - centre
        )
        gram += block.T @ block
        products += block.T @ residuals[part]
    return gram, products


def _directions(gram: Float, num_rows: int) -> tuple[Float, Float]:
    """(directions,) sums of squares and (directions, columns): those along which the rows differ."""
    strengths, vectors = np.linalg.eigh(gram)
    kept = strengths > 1e-6 * num_rows
    return strengths[kept], vectors[:, kept].T


def _shrunken(strengths: Float, products: Float) -> tuple[Float, Float, float]:
    """(directions,) means and variances of the coefficients, and the variance of one without data, in deviations of the noise."""
    squares = np.square(_SCALES)
    spreads = 1 + squares[:, None] * strengths  # (scales, directions)
    evidence = -0.5 * (np.log(spreads) + np.square(products) / strengths / spreads).sum(axis=1)
    weights = _PRIOR * np.exp(evidence - evidence.max())
    weights /= weights.sum()
    variances = squares[:, None] / spreads
    each = variances * products
    means = weights @ each
    return means, weights @ (variances + np.square(each - means)), float(weights @ squares)


def _said(found: Adjustment, tables: Sequence[Float], bins: Sequence[Bins]) -> Float:
    coefficients, ends = (
        np.array(found.coefficients),
        np.cumsum([table.shape[1] for table in tables]),
    )
    parts = np.split(coefficients, ends[:-1])
    said: Float = (
        found.level - float(coefficients @ np.array(found.centre)) + np.zeros(len(bins[0]))
    )
    for table, own, part in zip(tables, bins, parts, strict=True):
        said += (table @ part)[own]
    return said
