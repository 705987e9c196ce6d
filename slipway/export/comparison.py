"""One way of running the model against another, over the same rows: is it still the same model?

Pure arithmetic on answers that were already measured. Answers that are not finite, of another shape
or from another execution than the requested one never agree.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipway.bundle import Metric
from slipway.certificate import Execution, Hop
from slipway.contract import Task, is_classification
from slipway.data.packed import Inputs, open_split, read_manifest
from slipway.errors import MetricError, SchemaError
from slipway.metrics import Resampling, classification_metrics, regression_metrics


def headline(task: Task) -> str:
    """The metric that hops are compared by."""
    return "accuracy" if is_classification(task) else "rmse"


@dataclass(frozen=True)
class TestRows:
    """The rows every hop answers."""

    __test__ = False  # not a test, whatever pytest thinks of the name

    task: Task
    classes: list[str]  # in the order of the network's columns; empty for a numeric target
    ids: list[str]
    sources: list[str]
    inputs: Inputs  # (rows, ...) as the network takes them
    targets: NDArray[np.float64]  # (rows,) class index, or the number itself


def read_test_rows(packed: Path, classes: list[str]) -> TestRows:
    """The whole test split, digests checked; SchemaError if the network was trained with other `classes`."""
    manifest = read_manifest(packed)
    if manifest.classes != classes:
        raise SchemaError(f"{packed} has the classes {manifest.classes}, the network {classes}. Run `dvc repro train`.")
    split = open_split(packed, manifest, "test", verify=True)
    return TestRows(manifest.task, classes, split.ids, split.sources, split.inputs, split.targets)


@dataclass(frozen=True)
class Measurement:
    """What one hop answered and how fast."""

    actual: Execution
    outputs: NDArray[np.float32]  # (rows, classes) probabilities or (rows, 1) values
    latency_ms: float  # median for one row
    rows_per_second: float
    batch_noise: float = 0.0  # how far this runtime's own answers differ between batch sizes, as fp16's do on a GPU
    scores: NDArray[np.float32] | None = None  # (rows,) outlier scores
    score_noise: float = 0.0  # as `batch_noise`, of the scores


@dataclass(frozen=True)
class Tolerance:
    """How far a hop may be from its reference; a bound that is None is not asked for.

    `max_difference` is absolute on probabilities, relative to the largest answer (where above 1) on values,
    and with it every label has to be equal; outlier scores are as values. `noise` is absolute and comes on top; a label may flip where the
    two best probabilities are within twice of it. `max_metric_loss` is in accuracy points, or relative growth of the RMSE.
    """

    max_difference: float | None = None
    max_metric_loss: float | None = None
    noise: float = 0.0
    score_noise: float = 0.0  # absolute, on top, of the outlier scores


class Comparison:
    """Compares hops over one set of rows, with intervals made by one resampling."""

    def __init__(self, rows: TestRows, resampling: Resampling) -> None:
        self.rows = rows
        self._resampling = resampling

    def first(self, name: str, requested: Execution, measured: Measurement) -> Hop:
        """The hop that the others are compared with. It differs only if it does not answer, or is not what was requested."""
        metric, problems = self._metric(measured.outputs)
        problems += _changed_execution(requested, measured.actual)
        return self._hop(name, None, requested, measured, metric, None, problems)

    def against(
        self, name: str, requested: Execution, measured: Measurement, reference: tuple[Hop, Measurement], tolerance: Tolerance
    ) -> Hop:
        """The hop `name`, compared with a hop that was measured before."""
        before, expected = reference
        if measured.outputs.shape != expected.outputs.shape:
            found = f"answers of shape {measured.outputs.shape}, expected {expected.outputs.shape}"
            return failed(name, requested, found, before.name, measured.actual)
        metric, problems = self._metric(measured.outputs)
        distances = self._distances(measured.outputs, expected.outputs)
        problems += _changed_execution(requested, measured.actual) + self._beyond(distances, expected, tolerance)
        problems += _scores_beyond(measured, expected, tolerance)
        problems += self._lost(metric, before.metric, tolerance)
        return self._hop(name, before.name, requested, measured, metric, distances, problems)

    def _metric(self, outputs: NDArray[np.float32]) -> tuple[Metric | None, list[str]]:
        measure = classification_metrics if is_classification(self.rows.task) else regression_metrics
        try:
            return measure(self.rows.targets, outputs, self._resampling)[headline(self.rows.task)], []
        except MetricError as error:
            return None, [str(error).rstrip(".")]

    def _distances(self, found: NDArray[np.float32], expected: NDArray[np.float32]) -> "_Distances":
        differences = np.abs(found.astype(np.float64) - expected)
        differences = np.where(np.isfinite(differences), differences, np.inf)  # NaN would compare as no difference
        is_flipped = found.argmax(axis=1) != expected.argmax(axis=1)  # one column never flips
        worst = self.rows.ids[int(differences.max(axis=1).argmax())]
        flipped = [self.rows.ids[row] for row in np.flatnonzero(is_flipped)]
        leads = [float(np.subtract(*np.sort(row)[[-1, -2]])) for row in expected[is_flipped]]
        return _Distances(float(differences.max()), float(differences.mean()), flipped, leads, worst)

    def _beyond(self, distances: "_Distances", expected: Measurement, tolerance: Tolerance) -> list[str]:
        if tolerance.max_difference is None:
            return []
        scale = 1.0 if is_classification(self.rows.task) else max(1.0, float(np.abs(expected.outputs).max()))
        problems, most = [], tolerance.max_difference * scale + tolerance.noise
        if not distances.largest <= most:
            problems.append(f"the largest difference is {distances.largest:.3g}, expected at most {most:.3g}")
        num_flipped = sum(not lead <= 2 * tolerance.noise for lead in distances.leads)
        if num_flipped:
            problems.append(f"{num_flipped} labels flipped, expected none")
        return problems

    def _lost(self, found: Metric | None, expected: Metric | None, tolerance: Tolerance) -> list[str]:
        budget = tolerance.max_metric_loss
        if budget is None or found is None or expected is None:
            return []
        if is_classification(self.rows.task):
            loss, what = expected.value - found.value, "accuracy points lost"
        else:
            loss, what = (found.value - expected.value) / max(expected.value, 1e-12), "relative growth of the RMSE"
        is_within = loss <= budget + 1e-12  # 0.98 - 0.97 is above 0.01 in binary
        return [] if is_within else [f"{loss:.4g} {what} (from {expected.value:.4f} to {found.value:.4f}), expected at most {budget:g}"]

    def _hop(
        self,
        name: str,
        reference: str | None,
        requested: Execution,
        measured: Measurement,
        metric: Metric | None,
        distances: "_Distances | None",
        problems: list[str],
    ) -> Hop:
        return Hop(
            name=name,
            status="differs" if problems else "agrees",
            reason="; ".join(problems),
            requested=requested,
            actual=measured.actual,
            reference=reference,
            rows=len(self.rows.ids),
            max_difference=_finite(distances.largest) if distances else None,
            mean_difference=_finite(distances.mean) if distances else None,
            flipped=distances.flipped if distances else [],
            worst_row=distances.worst_row if distances else None,
            metric=metric,
            latency_ms=measured.latency_ms,
            rows_per_second=measured.rows_per_second,
        )


@dataclass(frozen=True)
class _Distances:
    largest: float
    mean: float
    flipped: list[str]
    leads: list[float]  # of the best over the second best probability before, for each flipped row
    worst_row: str


def failed(name: str, requested: Execution, reason: str, reference: str | None = None, actual: Execution | None = None) -> Hop:
    """A hop that was tried and gave no answers that could be compared: it differs."""
    return _without_answers(name, "differs", requested, reason, reference, actual)


def not_executed(name: str, requested: Execution, reason: str) -> Hop:
    """A hop that cannot run on this machine. It is no pass."""
    return _without_answers(name, "not_executed", requested, reason, None, None)


def _without_answers(name: str, status: str, requested: Execution, reason: str, reference: str | None, actual: Execution | None) -> Hop:
    return Hop.model_validate(
        {
            "name": name,
            "status": status,
            "reason": reason,
            "requested": requested,
            "actual": actual,
            "reference": reference,
            "rows": 0,
            "max_difference": None,
            "mean_difference": None,
            "flipped": [],
            "worst_row": None,
            "metric": None,
            "latency_ms": None,
            "rows_per_second": None,
        }
    )


def _changed_execution(requested: Execution, actual: Execution) -> list[str]:
    fields = [name for name in Execution.model_fields if getattr(requested, name) not in ("auto", getattr(actual, name))]
    return [f"{name}: {getattr(requested, name)} was requested, {getattr(actual, name)} ran" for name in fields]


def _scores_beyond(measured: Measurement, expected: Measurement, tolerance: Tolerance) -> list[str]:
    """Scores that were not measured, in a comparison of other things, do not count; of those that were, every row does."""
    if measured.scores is None or expected.scores is None:
        return []
    if not np.isfinite(measured.scores).all():
        return [f"{int((~np.isfinite(measured.scores)).sum())} outlier scores are not finite"]
    if tolerance.max_difference is None:
        return []
    largest = float(np.abs(measured.scores.astype(np.float64) - expected.scores).max())
    most = tolerance.max_difference * max(1.0, float(expected.scores.max())) + tolerance.score_noise
    return [] if largest <= most else [f"the largest difference of an outlier score is {largest:.3g}, expected at most {most:.3g}"]


def _finite(value: float) -> float | None:
    """JSON has no infinity; the reason tells of it."""
    return value if np.isfinite(value) else None
