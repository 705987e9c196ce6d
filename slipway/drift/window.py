"""What was seen of the traffic: whole numbers alone, so that windows of workers, and of before a restart, add up exactly in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slipway.drift.joint import FIXED_POINT, random_sums
from slipway.drift.reference import Reference
from slipway.system.errors import SchemaError

Counts = NDArray[np.int64]

_MAGIC = b"slipway window 1"
_ROWS, _OUTLIERS, _OUTSIDE, _FIRST_BIN = range(4)  # the first numbers


@dataclass(frozen=True)
class _Layout:
    """Where each part of a window is in its one row of numbers, and what the random features are summed with."""

    features: list[slice]
    joint: slice
    quality_counts: slice
    confidence: int
    size: int
    quality_column: int | None
    joint_table: list[NDArray[np.float64]]


class Window:
    """Counts of the rows that were added: of each feature's bins, of outliers, of rows outside the reference's range."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._layout = _lay_out(reference)
        self._numbers: Counts = np.zeros(self._layout.size, np.int64)

    def add(self, features: NDArray[np.float32]) -> None:
        """Count (rows, features), as `slipway.drift.features.extract` gives them; ValueError if it is another number of features."""
        reference, layout = self.reference, self._layout
        if features.ndim != 2 or features.shape[1] != len(reference.features):
            raise ValueError(
                f"features of shape {features.shape}, expected (rows, {len(reference.features)})"
            )
        bins = [
            feature.bins(features[:, column]) for column, feature in enumerate(reference.features)
        ]
        added = np.zeros_like(self._numbers)
        added[_ROWS] = len(features)
        added[_OUTLIERS] = self._num_outliers(features)
        added[_OUTSIDE] = self._num_outside(features)
        for place, own in zip(layout.features, bins, strict=True):
            added[place] = np.bincount(own, minlength=place.stop - place.start)
        if reference.inputs.joint is not None and len(features):
            added[layout.joint] = random_sums(
                [bins[column] for column in reference.inputs.joint.columns], layout.joint_table
            )
        quality = reference.answers.quality
        if quality is not None and layout.quality_column is not None:
            scores = features[:, layout.quality_column]
            own = quality.bins(scores)
            added[layout.quality_counts] = np.bincount(own, minlength=len(quality.counts))
            if quality.metric == "accuracy":
                added[layout.confidence] = (
                    np.rint(scores.astype(np.float64) * FIXED_POINT).astype(np.int64).sum()
                )
        self._numbers += added  # at once: a row that cannot be counted leaves nothing behind

    def merge(self, other: "Window") -> None:
        """Add the rows of `other`; ValueError if it is of another reference."""
        if other.reference.fingerprint != self.reference.fingerprint:
            raise ValueError("two windows of different references cannot be put together")
        self._numbers += other._numbers

    @classmethod
    def union(cls, windows: Sequence["Window"]) -> "Window":
        """A new window of the rows of one window or more, of one reference."""
        total = cls(windows[0].reference)
        for window in windows:
            total.merge(window)
        return total

    @property
    def num_rows(self) -> int:
        """Rows that were added."""
        return int(self._numbers[_ROWS])

    @property
    def num_outliers(self) -> int:
        """Rows with an outlier score above the threshold."""
        return int(self._numbers[_OUTLIERS])

    @property
    def num_outside(self) -> int:
        """Rows in which at least one number of the input is below or above all of the reference."""
        return int(self._numbers[_OUTSIDE])

    def counts(self, column: int) -> Counts:
        """(bins,) of the feature in that column."""
        return self._numbers[self._layout.features[column]].copy()

    @property
    def joint_mean(self) -> NDArray[np.float64]:
        """(frequencies,) the mean of the random features; empty without a joint reference or rows."""
        return self._numbers[self._layout.joint] / (FIXED_POINT * max(1, self.num_rows))

    @property
    def quality_counts(self) -> Counts:
        """(bins,) of the score that the quality is estimated with; empty without it."""
        return self._numbers[self._layout.quality_counts].copy()

    @property
    def confidence_sum(self) -> float:
        """Of all rows; 0 for a number."""
        return float(self._numbers[self._layout.confidence]) / FIXED_POINT

    def to_bytes(self) -> bytes:
        """For `from_bytes`, with the reference's fingerprint; some bytes for each bin."""
        return _MAGIC + self.reference.fingerprint + self._numbers.astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, reference: Reference, payload: bytes) -> "Window":
        """What `to_bytes` gave; SchemaError if it is something else, or of another reference."""
        window = cls(reference)
        start = _MAGIC + reference.fingerprint
        if not payload.startswith(start) or len(payload) != len(start) + window._numbers.nbytes:
            raise SchemaError(
                "these bytes are no window of this drift reference. Begin a new window."
            )
        window._numbers = np.frombuffer(payload, "<i8", offset=len(start)).astype(np.int64)
        return window

    def _num_outliers(self, features: NDArray[np.float32]) -> int:
        threshold = self.reference.answers.outlier_threshold
        return (
            0
            if threshold is None
            else int((features[:, self.reference.outlier_column] > threshold).sum())
        )

    def _num_outside(self, features: NDArray[np.float32]) -> int:
        is_outside = np.zeros(len(features), np.bool_)
        for column, feature in enumerate(self.reference.inputs.features):
            is_outside |= feature.is_outside(features[:, column])
        return int(is_outside.sum())


def _lay_out(reference: Reference) -> _Layout:
    joint, quality = reference.inputs.joint, reference.answers.quality
    ends = _FIRST_BIN + np.cumsum([0, *(len(feature.counts) for feature in reference.features)])
    joint_end = int(ends[-1]) + (len(joint.mean) if joint else 0)
    quality_end = joint_end + (len(quality.counts) if quality else 0)
    return _Layout(
        features=[slice(int(start), int(end)) for start, end in pairwise(ends)],
        joint=slice(int(ends[-1]), joint_end),
        quality_counts=slice(joint_end, quality_end),
        confidence=quality_end,
        size=quality_end + 1,
        quality_column=reference.names.index(quality.feature) if quality else None,
        joint_table=joint.table(reference.features) if joint else [],
    )
