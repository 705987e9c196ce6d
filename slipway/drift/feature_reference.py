"""Describes one feature: its bins, and the distribution of the reference rows over them."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature
from slipway.drift.histogram import bins_of, category_bins, equal_edges

Float32 = NDArray[np.float32]


class FeatureReference(Feature):
    """A feature with its bin edges and the number of reference rows in each bin.

    Fields are lists, because pydantic cannot compare arrays.
    """

    rows: int  # number of reference rows; input features also count training rows
    edges: list[float]  # increasing edges of a number's bins; empty for a category
    # len(edges) + 2 for a number, len(categories) + 1 for a category; missing values come last.
    counts: list[int]
    low: float | None  # smallest number; null for a category, or if all values are missing
    high: float | None

    def bins(self, values: Float32) -> NDArray[np.intp]:
        """Return (rows,) the bin index of each value."""
        if self.kind == "category":
            return category_bins(values, len(self.categories))
        return bins_of(values, np.array(self.edges, np.float32))

    def is_outside(self, values: Float32) -> NDArray[np.bool_]:
        """Return (rows,) True for numbers below or above those of all reference rows."""
        if self.low is None or self.high is None:
            return np.zeros(len(values), np.bool_)
        return (values < np.float32(self.low)) | (values > np.float32(self.high))

    @property
    def varies(self) -> bool:
        """True for a number that takes at least two different values."""
        return self.low is not None and self.high is not None and self.low < self.high

    @property
    def normal_scores(self) -> NDArray[np.float64]:
        """(bins,) standard normal quantile of each bin's middle rank; 0 for missing values."""
        counts = np.array(self.counts[:-1], np.float64)
        middles = (np.cumsum(counts) - counts / 2 + 0.25) / (
            counts.sum() + 0.5
        )  # strictly between 0 and 1
        return np.array([*map(NormalDist().inv_cdf, middles), 0.0])


def describe_feature(feature: Feature, values: Float32) -> FeatureReference:
    """Return the reference of one feature from its (rows,) values."""
    edges = known = np.empty(0, np.float32)
    if feature.kind == "number":
        edges = equal_edges(values)
        known = values[~np.isnan(values)]
        counts = np.bincount(bins_of(values, edges), minlength=len(edges) + 2)
    else:
        num_categories = len(feature.categories)
        counts = np.bincount(category_bins(values, num_categories), minlength=num_categories + 1)
    return FeatureReference(
        **feature.model_dump(),
        rows=len(values),
        edges=edges.tolist(),
        counts=counts.tolist(),
        low=float(known.min()) if len(known) else None,
        high=float(known.max()) if len(known) else None,
    )


def describe_features(features: Sequence[Feature], values: Float32) -> list[FeatureReference]:
    """Return the reference of each feature from (rows, features) values."""
    return [describe_feature(feature, values[:, column]) for column, feature in enumerate(features)]


def bin_columns(features: Sequence[FeatureReference], values: Float32) -> list[NDArray[np.intp]]:
    """Return for each feature the (rows,) bin indices of its column in (rows, features) values."""
    return [feature.bins(values[:, column]) for column, feature in enumerate(features)]
