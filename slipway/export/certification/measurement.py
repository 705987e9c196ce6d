"""Holds what a hop predicts for the test rows, and measures how far two hops lie apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.certificate import BatchCheck, Execution
from slipway.artifacts.golden_rows import Thresholds
from slipway.artifacts.uncertainty import Calibration, flipped_rows, given_labels, leads
from slipway.data.store.packed import Inputs, open_split, read_manifest
from slipway.kinds.registry import Task
from slipway.metrics.uncertainty import score_rank
from slipway.system.errors import SchemaError


@dataclass(frozen=True)
class TestRows:
    """The test rows that every hop predicts, with their ids and targets."""

    __test__ = False  # keeps pytest from collecting it

    task: Task
    classes: list[str]  # classes in the order of the network's columns; empty for a numeric target
    ids: list[str]
    sources: list[str]
    inputs: Inputs  # (rows, ...) as the network takes them
    targets: NDArray[Any]  # (rows,) class index, or the number itself; (rows, labels) 0 or 1


def read_test_rows(packed: Path, classes: list[str]) -> TestRows:
    """Read the test split and check its digests.

    Raises:
        SchemaError: the network was trained with classes other than `classes`.
    """
    manifest = read_manifest(packed)
    if manifest.classes != classes:
        raise SchemaError(
            f"{packed} has the classes {manifest.classes}, expected the network's {classes}. "
            "Run `dvc repro train`."
        )
    split = open_split(packed, manifest, "test", verify=True)
    return TestRows(manifest.task, classes, split.ids, split.sources, split.inputs, split.targets)


@dataclass(frozen=True)
class BatchAnswers:
    """The predictions of one way to run the model, computed in batches of `batch_size` rows.

    They are those of the first `len(outputs)` test rows.
    """

    batch_size: int
    outputs: NDArray[np.float32]  # the same as in `Measurement`
    scores: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Measurement:
    """A hop's predictions, their noise, and its speed.

    The noise is the difference of a runtime's predictions between batch sizes, as on a GPU in fp16.
    """

    actual: Execution
    outputs: NDArray[np.float32]  # (rows, classes) probabilities or (rows, 1) values
    latency_ms: float  # median for one row
    rows_per_second: float
    batch_noise: float = 0.0
    scores: NDArray[np.float32] | None = None  # (rows,) OOD scores
    score_noise: float = 0.0
    # The largest batch size comes last; its answers are `outputs`. Empty over HTTP, where requests
    # make the batches.
    batches: tuple[BatchAnswers, ...] = ()
    # Has the OOD threshold and those of labels; without it no row is flagged.
    calibration: Calibration | None = None

    @property
    def thresholds(self) -> Sequence[float] | None:
        """The thresholds of the labels; None if the calibration has none."""
        return self.calibration.thresholds if self.calibration else None


@dataclass(frozen=True)
class Distance:
    """Difference between the predictions of two hops at one batch size."""

    largest: float
    mean: float
    leads: dict[str, float]  # for each flipped row, the lead of its best probability before
    worst_row: str
    rows: int
    batch_size: int | None  # None if requests make the batches


@dataclass(frozen=True)
class Distances:
    """Differences between two hops at every measured batch size."""

    main: Distance
    runs: list[Distance]
    score: float | None  # the largest difference of an OOD score; None if none were measured
    rank: float | None  # the same as `Hop.score_rank`

    @property
    def worst(self) -> Distance:
        """The distance at the batch size with the largest one."""
        return max([self.main, *self.runs], key=lambda run: run.largest)

    @property
    def leads(self) -> dict[str, float]:
        """The leads of the rows that flipped at any batch size."""
        return {row: lead for run in [self.main, *self.runs] for row, lead in run.leads.items()}

    def fields(self) -> dict[str, Any]:
        """Return the fields of a hop in the certificate that these distances give."""
        return {
            "max_difference": _finite(self.worst.largest),
            "mean_difference": _finite(self.main.mean),
            "max_score_difference": None if self.score is None else _finite(self.score),
            "score_rank": self.rank,
            "flipped": list(self.leads),
            "worst_row": self.worst.worst_row,
            "batches": [
                BatchCheck(
                    batch_size=run.batch_size,
                    rows=run.rows,
                    max_difference=_finite(run.largest),
                    flipped=len(run.leads),
                )
                for run in self.runs
                if run.batch_size is not None
            ],
        }


def flips(found: Measurement, expected: Measurement) -> NDArray[np.int64]:
    """Return the positions of the rows whose labels differ between `found` and `expected`."""
    return flipped_rows(found.outputs, expected.outputs, (found.thresholds, expected.thresholds))


def measure_distances(found: Measurement, expected: Measurement, ids: Sequence[str]) -> Distances:
    """Compare the predictions of two hops, of the same shape, on the rows `ids`."""
    both = found.thresholds, expected.thresholds
    runs = [
        _distance(run.outputs, expected.outputs, run.batch_size, both, ids) for run in found.batches
    ]
    main = runs[-1] if runs else _distance(found.outputs, expected.outputs, None, both, ids)
    if found.scores is None or expected.scores is None:
        return Distances(main, runs, None, None)
    scores = [found.scores, *(run.scores for run in found.batches if run.scores is not None)]
    largest = max(float(_differences(part, expected.scores).max()) for part in scores)
    return Distances(main, runs, largest, score_rank(found.scores, expected.scores))


def _distance(
    found: NDArray[np.float32],
    expected: NDArray[np.float32],
    batch_size: int | None,
    thresholds: Thresholds,
    ids: Sequence[str],
) -> Distance:
    differences = _differences(found, expected)
    expected = expected[: len(found)]
    flipped = flipped_rows(found, expected, thresholds)
    lost = lost_leads(found[flipped], expected[flipped], thresholds)
    return Distance(
        largest=float(differences.max()),
        mean=float(differences.mean()),
        leads={ids[row]: lead for row, lead in zip(flipped, lost.tolist(), strict=True)},
        worst_row=ids[int(differences.max(axis=1).argmax())],
        rows=len(found),
        batch_size=batch_size,
    )


def lost_leads(
    found: NDArray[np.float32], expected: NDArray[np.float32], thresholds: Thresholds
) -> NDArray[np.float64]:
    """Return the margin of each row's expected label before it changed, (rows,).

    For classes it is the lead of the most probable class. For several labels it is the largest
    distance of a flipped label's probability from its threshold; 0 if no label flipped.
    """
    now, before = thresholds
    if now is None or before is None:
        return leads(expected, None) if len(expected) else np.zeros(0)
    is_flipped = given_labels(found, now) != given_labels(expected, before)
    distances = np.abs(expected - np.asarray(before, np.float64))
    return np.asarray(np.where(is_flipped, distances, 0.0).max(axis=1, initial=0.0))


def _differences(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return absolute differences from the first rows of `expected`, with infinity for NaN.

    A NaN would pass every comparison with a bound.
    """
    differences = np.abs(found.astype(np.float64) - expected[: len(found)])
    return np.where(np.isfinite(differences), differences, np.inf)


def _finite(value: float) -> float | None:
    """Return `value`, or None if it is infinite, because JSON has no infinity."""
    return value if np.isfinite(value) else None
