"""One feature and how the rows of the reference are spread over its bins."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from slipway.drift.features import Feature
from slipway.drift.histogram import bins_of, category_bins, equal_edges

Float32 = NDArray[np.float32]


class FeatureReference(Feature):
    """A feature and how the reference's rows are spread over its bins. Arrays are not kept in it: pydantic could not compare two."""

    rows: int  # of the reference; more for features of the input than for those of the answer
    edges: list[float]  # of a number's bins, increasing; empty for a category
    counts: list[
        int
    ]  # of a number len(edges) + 2, of a category len(categories) + 1; the last is missing values
    low: (
        float | None
    )  # the smallest and the largest number; null for a category and where every value is missing
    high: float | None

    def bins(self, values: Float32) -> NDArray[np.intp]:
        """(rows,) the bin of each value."""
        if self.kind == "category":
            return category_bins(values, len(self.categories))
        return bins_of(values, self._edges)

    def is_outside(self, values: Float32) -> NDArray[np.bool_]:
        """(rows,) whether a number is below or above all of the reference; never where it is missing, nor for a category."""
        low, high = (
            (-math.inf, math.inf)
            if self.low is None or self.high is None
            else (self.low, self.high)
        )
        return (values < np.float32(low)) | (values > np.float32(high))

    @property
    def varies(self) -> bool:
        """Whether it is a number with two values or more."""
        return self.low is not None and self.high is not None and self.low < self.high

    @property
    def normal_scores(self) -> NDArray[np.float64]:
        """(bins,) the normal quantile of the middle of each bin's rows; 0 for missing values."""
        counts = np.array(self.counts[:-1], np.float64)
        middles = (np.cumsum(counts) - counts / 2 + 0.25) / (counts.sum() + 0.5)  # never 0 or 1
        return np.array([*map(NormalDist().inv_cdf, middles), 0.0])

    @property
    def _edges(self) -> Float32:
        return np.array(self.edges, np.float32)


def describe(feature: Feature, values: Float32) -> FeatureReference:
    """The reference of one feature from its (rows,) values."""
    is_number = feature.kind == "number"
    edges = equal_edges(values) if is_number else np.empty(0, np.float32)
    bins = bins_of(values, edges) if is_number else category_bins(values, len(feature.categories))
    num_bins = len(edges) + 2 if is_number else len(feature.categories) + 1
    known = values[~np.isnan(values)] if is_number else values[:0]
    return FeatureReference(
        **feature.model_dump(),
        rows=len(values),
        edges=edges.tolist(),
        counts=np.bincount(bins, minlength=num_bins).tolist(),
        low=float(known.min()) if len(known) else None,
        high=float(known.max()) if len(known) else None,
    )
