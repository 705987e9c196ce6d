"""Predicts from a row's features how much better or worse its answer is than its score claims.

A linear model, fitted on the labels of the validation rows. A number contributes its bin's normal
score, the square of that score, and an indicator of missing values; a category contributes one
column for each value. The model is additive, so the counts of each feature in a window are enough
to evaluate it; interactions between features are not modelled. Coefficients are shrunk according
to their noise, so that few labels change little. The remaining uncertainty is reported as a
variance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference
from slipway.system.contract import Contract

Float = NDArray[np.float64]
Bins = NDArray[np.intp]

# The bundle stores the square of this number; wider features (a thousand classes) are skipped.
_MAX_COLUMNS = 128
_SCALES = np.linspace(0.0, 0.3, 31)  # sizes of a coefficient, in standard deviations of a residual
# Half-normal prior of the scale. 0.1 means five percentage points if half of the answers are right.
_PRIOR = np.exp(-0.5 * np.square(_SCALES / 0.1))


class ResidualModel(Contract):
    """Linear model of the mean residual, with the covariance of its coefficients.

    The covariance is `unknown` times the identity minus the sum of the outer products of `learned`,
    which is the part of the prior variance that the labels removed.
    """

    features: list[int]  # indices of the features in the model
    level: float  # mean residual of rows like the validation rows
    level_variance: float
    centre: list[float]  # (columns,) mean of the validation rows
    coefficients: list[float]  # (columns,)
    unknown: float  # prior variance of a coefficient
    learned: list[list[float]]  # (directions, columns)

    def predict(
        self, features: Sequence[FeatureReference], counts: Sequence[NDArray[np.int64]]
    ) -> tuple[float, float]:
        """Return (mean residual, its variance) of rows with these (bins,) counts per feature."""
        means = [
            counts[index] / counts[index].sum() @ _columns(features[index])
            for index in self.features
        ]
        shift = np.concatenate(means) - np.array(self.centre)
        learned = np.array(self.learned).reshape(-1, len(shift)) @ shift
        variance = self.unknown * float(shift @ shift) - float(learned @ learned)
        mean = self.level + float(shift @ np.array(self.coefficients))
        return mean, self.level_variance + max(0.0, variance)


def fit_residual_model(
    features: Sequence[FeatureReference],
    bins: Sequence[Bins],
    residuals: Float,
    noise: float,
    *,
    shrink_level: bool,
) -> tuple[ResidualModel, Float]:
    """Fit the model, and return it with its (rows,) fitted values.

    This is ridge regression whose penalty is averaged over its evidence (MacKay, Bayesian
    interpolation, Neural Computation 4, 1992). The prior of the coefficients is normal with one
    common scale, in standard deviations of the noise; the scale has a half-normal prior (Gelman,
    Bayesian Analysis 1, 2006).

    Args:
        bins: for each feature the (rows,) bin indices.
        residuals: (rows,) measured quality minus claimed quality.
        noise: variance of one residual.
        shrink_level: also shrink the mean residual towards 0, with a separate scale.
    """
    chosen = _choose_features(features, bins, residuals)
    design = np.concatenate([_columns(features[index])[bins[index]] for index in chosen], axis=1)
    centre = design.mean(axis=0)
    design -= centre
    strengths, directions = _principal_directions(design)
    deviation = np.sqrt(noise)
    products = directions @ (design.T @ residuals) / deviation
    means, variances, unknown = _shrink(strengths, products)

    num_rows = len(residuals)
    level, level_variance = float(residuals.mean()) / deviation, 1 / num_rows
    if shrink_level:
        level_means, level_variances, _ = _shrink(
            np.array([num_rows]), np.array([level * num_rows])
        )
        level, level_variance = float(level_means[0]), float(level_variances[0])

    coefficients = deviation * means @ directions
    removed = np.sqrt(noise * np.maximum(0, unknown - variances))
    model = ResidualModel(
        features=chosen,
        level=level * deviation,
        level_variance=level_variance * noise,
        centre=centre.tolist(),
        coefficients=coefficients.tolist(),
        unknown=unknown * noise,
        learned=(removed[:, None] * directions).tolist(),
    )
    return model, model.level + design @ coefficients


def _choose_features(
    features: Sequence[FeatureReference], bins: Sequence[Bins], residuals: Float
) -> list[int]:
    """Return the features that separate the residuals most, with at most _MAX_COLUMNS columns."""
    separations = [_separation(column, residuals) for column in bins]
    chosen, num_free = [], _MAX_COLUMNS
    for index in sorted(range(len(features)), key=lambda index: -separations[index]):
        width = _columns(features[index]).shape[1]
        if width <= num_free:
            chosen.append(index)
            num_free -= width
    return sorted(chosen)


def _separation(bins: Bins, residuals: Float) -> float:
    """Return the excess of the between-bin sum of squares over noise, in standard deviations."""
    counts = np.bincount(bins)
    is_used = counts > 0
    sums = np.bincount(bins, residuals - residuals.mean())
    between = float((np.square(sums[is_used]) / counts[is_used]).sum())
    freedom = max(1, int(is_used.sum()) - 1)
    return (between / max(float(residuals.var()), 1e-300) - freedom) / float(np.sqrt(2 * freedom))


def _columns(feature: FeatureReference) -> Float:
    """Return the (bins, columns) design matrix of one feature.

    A category has one column for each bin. A number has the first two Hermite polynomials of its
    normal score, which are nearly uncorrelated, and an indicator of missing values.
    """
    if feature.kind == "category":
        return np.eye(len(feature.counts))
    scores = feature.normal_scores
    is_missing = np.arange(len(feature.counts)) == len(feature.counts) - 1
    squares = (np.square(scores) - 1) / np.sqrt(2) * ~is_missing
    return np.column_stack([scores, squares, is_missing])


def _principal_directions(design: Float) -> tuple[Float, Float]:
    """Return the principal directions of the rows: (directions,) sums of squares, and vectors.

    The vectors are (directions, columns). Directions without variation are left out.
    """
    strengths, vectors = np.linalg.eigh(design.T @ design)
    is_varied = strengths > 1e-6 * len(design)
    return strengths[is_varied], vectors[:, is_varied].T


def _shrink(strengths: Float, products: Float) -> tuple[Float, Float, float]:
    """Return the posterior (means, variances) of the coefficients, and their prior variance.

    Both arrays are (directions,), in standard deviations of the noise.
    """
    squares = np.square(_SCALES)
    spreads = 1 + squares[:, None] * strengths  # (scales, directions)
    evidence = -0.5 * (np.log(spreads) + np.square(products) / strengths / spreads).sum(axis=1)
    weights = _PRIOR * np.exp(evidence - evidence.max())
    weights /= weights.sum()
    variances = squares[:, None] / spreads
    means_by_scale = variances * products
    means = weights @ means_by_scale
    total_variances = weights @ (variances + np.square(means_by_scale - means))
    return means, total_variances, float(weights @ squares)
