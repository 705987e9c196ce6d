"""A window of traffic: bin counts as integers, so that windows of several workers add exactly."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import bin_columns
from slipway.drift.joint_reference import FIXED_POINT, random_sums
from slipway.drift.reference import Reference
from slipway.system.errors import SchemaError

Counts = NDArray[np.int64]

_MAGIC = b"slipway window 1"
_ROWS, _OOD, _OUTSIDE, _FIRST_BIN = range(4)  # positions in a window's row of numbers


@dataclass(frozen=True)
class _WindowLayout:
    """The position of each count in a window's numbers, and the table for random features."""

    features: list[slice]
    joint: slice
    quality_counts: slice
    confidence: int
    size: int
    quality_column: int | None
    angle_table: list[NDArray[np.float64]]


class Window:
    """Counts of the added rows: by bin of each feature, OOD rows, and rows outside the range."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._layout = _lay_out(reference)
        self._numbers: Counts = np.zeros(self._layout.size, np.int64)

    def add(self, features: NDArray[np.float32]) -> None:
        """Count (rows, features) as returned by `slipway.drift.features.extract`."""
        reference, layout = self.reference, self._layout
        if features.ndim != 2 or features.shape[1] != len(reference.features):
            expected = len(reference.features)
            raise ValueError(f"features of shape {features.shape}, expected (rows, {expected})")
        bins = bin_columns(reference.features, features)
        added = np.zeros_like(self._numbers)
        added[_ROWS] = len(features)
        added[_OOD] = self._num_ood(features)
        added[_OUTSIDE] = self._num_outside(features)
        for part, own in zip(layout.features, bins, strict=True):
            added[part] = np.bincount(own, minlength=part.stop - part.start)
        if reference.inputs.joint is not None and len(features):
            columns = [bins[column] for column in reference.inputs.joint.columns]
            added[layout.joint] = random_sums(columns, layout.angle_table)
        quality = reference.answers.quality
        if quality is not None and layout.quality_column is not None:
            scores = features[:, layout.quality_column]
            counts = np.bincount(quality.bins(scores), minlength=len(quality.counts))
            added[layout.quality_counts] = counts
            if quality.metric != "rmse":
                rounded = np.rint(scores.astype(np.float64) * FIXED_POINT).astype(np.int64)
                added[layout.confidence] = rounded.sum()
        self._numbers += added  # added only if all rows could be counted

    def merge(self, other: "Window") -> None:
        """Add the rows of `other`; ValueError if its reference differs."""
        if other.reference.fingerprint != self.reference.fingerprint:
            raise ValueError("cannot merge two windows of different references")
        self._numbers += other._numbers

    @property
    def num_rows(self) -> int:
        return int(self._numbers[_ROWS])

    @property
    def num_ood(self) -> int:
        """Number of rows whose OOD score is above the threshold."""
        return int(self._numbers[_OOD])

    @property
    def num_outside(self) -> int:
        """Number of rows with at least one input number outside the reference's range."""
        return int(self._numbers[_OUTSIDE])

    def counts(self, column: int) -> Counts:
        """Return the (bins,) counts of the feature at `column`."""
        return self._numbers[self._layout.features[column]].copy()

    @property
    def joint_mean(self) -> NDArray[np.float64]:
        """(frequencies,) mean random features; empty without a joint reference."""
        return self._numbers[self._layout.joint] / (FIXED_POINT * max(1, self.num_rows))

    @property
    def quality_counts(self) -> Counts:
        """(bins,) counts of the quality estimate's score; empty without a quality reference."""
        return self._numbers[self._layout.quality_counts].copy()

    @property
    def confidence_sum(self) -> float:
        """Sum of the confidences of all rows; 0 for numeric answers."""
        return float(self._numbers[self._layout.confidence]) / FIXED_POINT

    def as_reference(self) -> Reference:
        """Return the reference of these rows, with the same bins.

        It has no joint reference and no quality reference, which need the rows themselves.
        """
        features = [
            feature.model_copy(
                update={"rows": self.num_rows, "counts": self.counts(column).tolist()}
            )
            for column, feature in enumerate(self.reference.features)
        ]
        inputs, answers = self.reference.inputs, self.reference.answers
        num_inputs, rows = len(inputs.features), {"rows": self.num_rows}
        return Reference(
            inputs.model_copy(update=rows | {"features": features[:num_inputs], "joint": None}),
            answers.model_copy(update=rows | {"features": features[num_inputs:], "quality": None}),
        )

    def to_bytes(self) -> bytes:
        """Serialise the window: the reference's fingerprint, then 8 bytes for each number."""
        return _MAGIC + self.reference.fingerprint + self._numbers.astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, reference: Reference, payload: bytes) -> "Window":
        """Restore a window from `to_bytes`; SchemaError for other bytes or another reference."""
        window = cls(reference)
        header = _MAGIC + reference.fingerprint
        if not payload.startswith(header) or len(payload) != len(header) + window._numbers.nbytes:
            raise SchemaError(
                "the stored window does not belong to this drift reference. Begin a new window."
            )
        window._numbers = np.frombuffer(payload, "<i8", offset=len(header)).astype(np.int64)
        return window

    def _num_ood(self, features: NDArray[np.float32]) -> int:
        threshold = self.reference.answers.ood_threshold
        if threshold is None:
            return 0
        return int((features[:, self.reference.ood_column] > threshold).sum())

    def _num_outside(self, features: NDArray[np.float32]) -> int:
        is_outside = np.zeros(len(features), np.bool_)
        for column, feature in enumerate(self.reference.inputs.features):
            is_outside |= feature.is_outside(features[:, column])
        return int(is_outside.sum())


def _lay_out(reference: Reference) -> _WindowLayout:
    joint, quality = reference.inputs.joint, reference.answers.quality
    sizes = [len(feature.counts) for feature in reference.features]
    ends = [int(end) for end in _FIRST_BIN + np.cumsum([0, *sizes])]
    joint_end = ends[-1] + (len(joint.mean) if joint else 0)
    quality_end = joint_end + (len(quality.counts) if quality else 0)
    return _WindowLayout(
        features=[slice(start, end) for start, end in pairwise(ends)],
        joint=slice(ends[-1], joint_end),
        quality_counts=slice(joint_end, quality_end),
        confidence=quality_end,
        size=quality_end + 1,
        quality_column=reference.column(quality.feature) if quality else None,
        angle_table=joint.angle_table(reference.features) if joint else [],
    )
