"""One way of running the model against another, over the same rows: is it still the same model?

Pure arithmetic on answers that were already measured. Answers that are not finite, of another shape
or from another execution than the requested one never agree. Metrics are compared row by row with those of the first hop: the interval
of a change tells how much of it other test rows could undo.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import BatchCheck, Execution, Hop, HopBounds
from slipway.artifacts.uncertainty import Calibration
from slipway.data.store.packed import Inputs, open_split, read_manifest
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, measure
from slipway.metrics.uncertainty import ood_fraction, score_rank
from slipway.system.errors import MetricError, SchemaError

_PER_CLASS = "f1_macro"  # the accuracy hides what happens to a rare class
_ROUNDING = 1e-12  # 0.98 - 0.97 is above 0.01 in binary


def headline(task: Task) -> str:
    """The metric that hops are compared by."""
    return "accuracy" if is_classification(task) else "rmse"


def compared_metrics(task: Task) -> tuple[str, ...]:
    """The metrics whose change is in the certificate, the headline first."""
    return ("accuracy", _PER_CLASS, "log_loss") if is_classification(task) else ("rmse", "mae")


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
        raise SchemaError(
            f"{packed} has the classes {manifest.classes}, the network {classes}. Run `dvc repro train`."
        )
    split = open_split(packed, manifest, "test", verify=True)
    return TestRows(manifest.task, classes, split.ids, split.sources, split.inputs, split.targets)


@dataclass(frozen=True)
class BatchAnswers:
    """What one hop answered to the first `len(outputs)` rows, so many in a batch."""

    batch_size: int
    outputs: NDArray[np.float32]  # these two as in `Measurement`
    scores: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Measurement:
    """What one hop answered and how fast."""

    actual: Execution
    outputs: NDArray[np.float32]  # (rows, classes) probabilities or (rows, 1) values
    latency_ms: float  # median for one row
    rows_per_second: float
    batch_noise: float = (
        0.0  # how far this runtime's own answers differ between batch sizes, as fp16's do on a GPU
    )
    scores: NDArray[np.float32] | None = None  # (rows,) outlier scores
    score_noise: float = 0.0  # as `batch_noise`, of the scores
    batches: tuple[
        BatchAnswers, ...
    ] = ()  # the largest last, whose answers are `outputs`; empty where requests make the batches
    calibration: Calibration | None = (
        None  # whose thresholds these scores are held to; None: outliers are not counted
    )


@dataclass(frozen=True)
class Tolerance:
    """How far a hop may be from its reference; a bound that is None is not asked for.

    `max_difference` is absolute on probabilities, relative to the largest answer (where above 1) on values,
    and with it every label has to be equal; outlier scores are as values. `noise` is absolute and comes on top; a label may flip where the
    two best probabilities are within twice of it. `max_metric_loss` is in accuracy points, or relative growth of the RMSE; for classes the
    macro F1 may not have lost more either. All are judged by the mild end of the paired interval:
    one row proves nothing, many do. A budget below one row means one row. With it no more rows may be
    called outliers than with the reference, by the share that was asked for, both at the mild end of
    their intervals.
    """

    max_difference: float | None = None
    max_metric_loss: float | None = None
    noise: float = 0.0
    score_noise: float = 0.0  # absolute, on top, of the outlier scores
    budget_key: str = "verify.max_metric_loss"  # in params.yaml, for messages
    is_served: bool = (
        True  # False: nothing serves it here, so a loss beyond the budget leaves it uncertified
    )


class HopComparison:
    """Compares hops over one set of rows, with intervals made by one resampling."""

    def __init__(self, rows: TestRows, resampling: Resampling) -> None:
        self.rows = rows
        self._resampling = resampling
        self._origin: NDArray[np.float32] | None = None  # answers of the first hop

    def first(self, name: str, requested: Execution, measured: Measurement) -> Hop:
        """The hop whose metrics all others' are compared with. It differs only if it does not answer, or is not what was requested."""
        metric, problems = self._metric(measured.outputs)
        self._origin = measured.outputs if metric else None
        problems += _changed_execution(requested, measured.actual)
        return self._hop(name, None, requested, measured, metric, {}, None, problems)

    def against(
        self,
        name: str,
        requested: Execution,
        measured: Measurement,
        reference: tuple[Hop, Measurement],
        tolerance: Tolerance,
    ) -> Hop:
        """The hop `name`, compared with a hop that was measured before."""
        before, expected = reference
        if measured.outputs.shape != expected.outputs.shape:
            found = f"answers of shape {measured.outputs.shape}, expected {expected.outputs.shape}"
            return failed(name, requested, found, before.name, measured.actual)
        metric, problems = self._metric(measured.outputs)
        changes = self._changes(measured.outputs) if metric else {}
        distances = self._distances(measured, expected)
        allowed = self._allowed(expected, tolerance, before.outliers)
        problems += _changed_execution(requested, measured.actual) + _beyond(
            distances, allowed, tolerance.noise
        )
        problems += _score_beyond(distances.score, allowed)
        lost = self._losses(before.metric, metric, changes, tolerance)
        is_one_row = (
            self._num_changed(measured.outputs) == 1
        )  # which costs a rare class more than its share
        losses = [loss.problem() for loss in lost if loss.is_proven and not is_one_row]
        losses += _outliers_beyond(self._outliers(measured), allowed)
        hop = self._hop(
            name,
            before.name,
            requested,
            measured,
            metric,
            changes,
            (distances, allowed),
            problems + losses,
        )
        if (
            losses
            and not problems
            and not tolerance.is_served
            and not _is_another_model(measured.outputs, expected.outputs)
        ):
            return hop.model_copy(update={"status": "uncertified"})
        within_chance = [loss.remark() for loss in lost if loss.is_seen]
        return (
            hop.model_copy(update={"reason": "; ".join(within_chance)})
            if hop.status == "agrees"
            else hop
        )

    def _metric(self, outputs: NDArray[np.float32]) -> tuple[Metric | None, list[str]]:
        name = headline(self.rows.task)
        try:
            return measure(
                self.rows.task, self.rows.targets, outputs, self._resampling, names=[name]
            )[name], []
        except MetricError as error:
            return None, [str(error).rstrip(".")]

    def _num_changed(self, outputs: NDArray[np.float32]) -> int | None:
        """Rows that the first hop gives another label, be it right or wrong; None of values."""
        if self._origin is None or not is_classification(self.rows.task):
            return None
        return int((self._origin.argmax(axis=1) != outputs.argmax(axis=1)).sum())

    def _changes(self, outputs: NDArray[np.float32]) -> dict[str, Metric]:
        """How far each metric moved from the first hop's, row against row; none where the first has no answers."""
        if self._origin is None or self._origin.shape != outputs.shape:
            return {}
        return {
            name: self._change(name, self._origin, outputs)
            for name in compared_metrics(self.rows.task)
        }

    def _change(
        self, metric: str, before: NDArray[np.float32], after: NDArray[np.float32]
    ) -> Metric:
        if _are_alike(
            metric, before, after
        ):  # in every resample: nothing to draw, which takes seconds for many rows
            return Metric(
                value=0.0,
                low=0.0,
                high=0.0,
                confidence=self._resampling.confidence,
                rows=len(before),
            )
        found = paired_difference(
            self.rows.task, metric, self.rows.targets, before, after, self._resampling
        )
        return Metric(
            value=found.difference,
            low=found.low,
            high=found.high,
            confidence=found.confidence,
            rows=found.rows,
        )

    def _distances(self, found: Measurement, expected: Measurement) -> "_Distances":
        """Over every batch size that was tried."""
        runs = [
            self._distance(run.outputs, expected.outputs, run.batch_size) for run in found.batches
        ]
        main = runs[-1] if runs else self._distance(found.outputs, expected.outputs, None)
        rank = (
            None
            if found.scores is None or expected.scores is None
            else score_rank(found.scores, expected.scores)
        )
        return _Distances(main, runs, _score_distance(found, expected), rank)

    def _distance(
        self, found: NDArray[np.float32], expected: NDArray[np.float32], batch_size: int | None
    ) -> "_Distance":
        expected = expected[: len(found)]
        differences = np.abs(found.astype(np.float64) - expected)
        differences = np.where(
            np.isfinite(differences), differences, np.inf
        )  # NaN would compare as no difference
        is_flipped = found.argmax(axis=1) != expected.argmax(axis=1)  # one column never flips
        worst = self.rows.ids[int(differences.max(axis=1).argmax())]
        leads = {
            self.rows.ids[row]: float(np.subtract(*np.sort(expected[row])[[-1, -2]]))
            for row in np.flatnonzero(is_flipped)
        }
        return _Distance(
            float(differences.max()),
            float(differences.mean()),
            leads,
            worst,
            len(found),
            batch_size,
        )

    def _outliers(self, measured: Measurement) -> Metric | None:
        if (
            measured.scores is None
            or measured.calibration is None
            or not np.isfinite(measured.scores).all()
        ):
            return None
        return ood_fraction(measured.scores, measured.calibration, self._resampling.confidence)

    def _allowed(
        self, expected: Measurement, tolerance: Tolerance, outliers: Metric | None
    ) -> HopBounds:
        scale = (
            1.0
            if is_classification(self.rows.task)
            else max(1.0, float(np.abs(expected.outputs).max()))
        )
        score_scale = 1.0 if expected.scores is None else max(1.0, float(expected.scores.max()))
        strict = tolerance.max_difference
        return HopBounds(
            max_difference=None if strict is None else strict * scale + tolerance.noise,
            max_score_difference=None
            if strict is None
            else strict * score_scale + tolerance.score_noise,
            max_metric_loss=tolerance.max_metric_loss,
            max_outliers=_most_outliers(outliers, expected.calibration)
            if tolerance.max_metric_loss is not None
            else None,
        )

    def _losses(
        self,
        expected: Metric | None,
        found: Metric | None,
        changes: dict[str, Metric],
        tolerance: Tolerance,
    ) -> "list[_MetricLoss]":
        """The loss of each judged metric, in the unit of the budget."""
        if tolerance.max_metric_loss is None or expected is None or found is None or not changes:
            return []
        moved = f"(from {expected.value:.4f} to {found.value:.4f})"
        if not is_classification(self.rows.task):
            growth, unit = changes["rmse"], 1 / max(expected.value, 1e-12)
            what = f"relative growth of the RMSE {moved}"
            return [_MetricLoss(what, growth.value * unit, growth.low * unit, 0.0, tolerance)]
        accuracy, per_class, row = changes["accuracy"], changes[_PER_CLASS], 1 / len(self.rows.ids)
        return [
            _MetricLoss(
                f"accuracy points lost {moved}", -accuracy.value, -accuracy.high, row, tolerance
            ),
            _MetricLoss(
                "points of macro F1 lost", -per_class.value, -per_class.high, row, tolerance
            ),
        ]

    def _hop(
        self,
        name: str,
        reference: str | None,
        requested: Execution,
        measured: Measurement,
        metric: Metric | None,
        changes: dict[str, Metric],
        compared: "tuple[_Distances, HopBounds] | None",
        problems: list[str],
    ) -> Hop:
        distances, allowed = compared or (None, None)
        return Hop(
            name=name,
            status="differs" if problems else "agrees",
            reason="; ".join(problems),
            requested=requested,
            actual=measured.actual,
            reference=reference,
            allowed=allowed,
            rows=len(self.rows.ids),
            max_difference=_finite(distances.worst.largest) if distances else None,
            mean_difference=_finite(distances.main.mean) if distances else None,
            max_score_difference=_finite(distances.score)
            if distances and distances.score is not None
            else None,
            outliers=self._outliers(measured),
            score_rank=distances.rank if distances else None,
            flipped=list(distances.leads) if distances else [],
            worst_row=distances.worst.worst_row if distances else None,
            batches=distances.checks() if distances else [],
            metric=metric,
            metric_changes=changes,
            latency_ms=measured.latency_ms,
            rows_per_second=measured.rows_per_second,
        )


@dataclass(frozen=True)
class _Distance:
    """Between two hops' answers to the same rows."""

    largest: float
    mean: float
    leads: dict[
        str, float
    ]  # of the best over the second best probability before, by the id of each flipped row
    worst_row: str
    rows: int
    batch_size: int | None  # None where requests make the batches

    def check(self, batch_size: int) -> BatchCheck:
        return BatchCheck(
            batch_size=batch_size,
            rows=self.rows,
            max_difference=_finite(self.largest),
            flipped=len(self.leads),
        )


@dataclass(frozen=True)
class _Distances:
    """The same between all answers, and for each batch size that was tried."""

    main: _Distance
    runs: list[_Distance]
    score: float | None  # the largest of an outlier score; None where none were measured
    rank: float | None  # as `Hop.score_rank`

    @property
    def worst(self) -> _Distance:
        """The run with the largest difference."""
        return max([self.main, *self.runs], key=lambda run: run.largest)

    @property
    def leads(self) -> dict[str, float]:
        """Of the rows that flipped in any run."""
        return {row: lead for run in [self.main, *self.runs] for row, lead in run.leads.items()}

    def checks(self) -> list[BatchCheck]:
        return [run.check(run.batch_size) for run in self.runs if run.batch_size is not None]


def _are_alike(metric: str, before: NDArray[np.float32], after: NDArray[np.float32]) -> bool:
    """Whether `metric` cannot tell the answers from each other."""
    if metric in ("accuracy", _PER_CLASS):
        return bool((before.argmax(axis=1) == after.argmax(axis=1)).all())
    return bool((before == after).all())


def _beyond(distances: _Distances, allowed: HopBounds, noise: float) -> list[str]:
    if allowed.max_difference is None:
        return []
    problems, worst = [], distances.worst
    if not worst.largest <= allowed.max_difference:
        in_other_batches = worst.largest != distances.main.largest
        where = f" in batches of {worst.batch_size}" if in_other_batches else ""
        problems.append(
            f"the largest difference is {worst.largest:.3g}{where}, expected at most {allowed.max_difference:.3g} (verify.max_difference)"
        )
    num_flipped = sum(not lead <= 2 * noise for lead in distances.leads.values())
    if num_flipped:
        problems.append(f"{num_flipped} labels flipped, expected none")
    return problems


@dataclass(frozen=True)
class _MetricLoss:
    """The loss of one metric; `mild` is the end of its paired interval that lost least."""

    what: str
    measured: float
    mild: float
    row: float  # what one row is of the metric; 0 where it is no fixed share
    tolerance: Tolerance

    @property
    def budget(self) -> float:
        """The loss that is allowed."""
        return self.tolerance.max_metric_loss or 0.0

    @property
    def is_proven(self) -> bool:
        """True if even the mild end lost more than the budget, and more than one row."""
        return not self.mild <= max(self.budget, self.row) + _ROUNDING

    @property
    def is_seen(self) -> bool:
        """True if these rows lost more than the budget."""
        return not self.measured <= self.budget + _ROUNDING

    def problem(self) -> str:
        """For a hop that is judged by it."""
        expected = f"{self.budget:g} ({self.tolerance.budget_key})"
        if self.row > self.budget:
            expected = f"one row, {self.row:.4g}, since {self.tolerance.budget_key} {self.budget:g} is less than that"
        return f"{self._text()}, expected at most {expected}"

    def remark(self) -> str:
        """For a hop that agrees all the same."""
        limit = f"{self.tolerance.budget_key} {self.budget:g}"
        return f"{self._text()}: above {limit}, but too few rows to tell it from chance"

    def _text(self) -> str:
        return f"{self.measured:.4g} {self.what}, {self.mild + 0.0:.4g} at the mild end of its interval"


def _is_another_model(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Whether the answers are further off than rounding can explain.

    Most labels are others; or values are further from the reference than their own mean is.
    """
    if found.shape[1] > 1:
        return bool((found.argmax(axis=1) != expected.argmax(axis=1)).mean() > 0.5)
    errors = found.astype(np.float64) - expected
    return bool((errors**2).mean() > expected.astype(np.float64).var())


def failed(
    name: str,
    requested: Execution,
    reason: str,
    reference: str | None = None,
    actual: Execution | None = None,
) -> Hop:
    """A hop that was tried and gave no answers that could be compared: it differs."""
    return _without_answers(name, "differs", requested, reason, reference, actual)


def not_executed(name: str, requested: Execution, reason: str) -> Hop:
    """A hop that cannot run on this machine. It is no pass."""
    return _without_answers(name, "not_executed", requested, reason, None, None)


def _without_answers(
    name: str,
    status: str,
    requested: Execution,
    reason: str,
    reference: str | None,
    actual: Execution | None,
) -> Hop:
    return Hop.model_validate(
        {
            "name": name,
            "status": status,
            "reason": reason,
            "requested": requested,
            "actual": actual,
            "reference": reference,
            "allowed": None,
            "rows": 0,
            "max_difference": None,
            "mean_difference": None,
            "max_score_difference": None,
            "flipped": [],
            "worst_row": None,
            "batches": [],
            "metric": None,
            "metric_changes": {},
            "latency_ms": None,
            "rows_per_second": None,
        }
    )


def _changed_execution(requested: Execution, actual: Execution) -> list[str]:
    fields = [
        name
        for name in Execution.model_fields
        if getattr(requested, name) not in ("auto", getattr(actual, name))
    ]
    return [
        f"{name}: {getattr(requested, name)} was requested, {getattr(actual, name)} ran"
        for name in fields
    ]


def _score_distance(found: Measurement, expected: Measurement) -> float | None:
    """The largest difference of an outlier score in any batch size; None where scores were not measured, as of other things."""
    if found.scores is None or expected.scores is None:
        return None
    runs = [found.scores, *(run.scores for run in found.batches if run.scores is not None)]
    largest = [
        float(np.abs(scores.astype(np.float64) - expected.scores[: len(scores)]).max())
        for scores in runs
    ]
    return float(
        np.max(np.where(np.isfinite(largest), largest, np.inf))
    )  # NaN would compare as no difference


def _score_beyond(largest: float | None, allowed: HopBounds) -> list[str]:
    if largest is None:
        return []
    if not np.isfinite(largest):
        return ["outlier scores are not finite"]
    if allowed.max_score_difference is None or largest <= allowed.max_score_difference:
        return []
    return [
        f"the largest difference of an outlier score is {largest:.3g}, expected at most {allowed.max_score_difference:.3g}"
    ]


def _most_outliers(reference: Metric | None, calibration: Calibration | None) -> float | None:
    """What the lower bound of a share of outliers may be: the reference's upper bound, and the share that was asked for on top."""
    return (
        None
        if reference is None or calibration is None
        else reference.high + calibration.outlier.share
    )


def _outliers_beyond(found: Metric | None, allowed: HopBounds) -> list[str]:
    if found is None or allowed.max_outliers is None or found.low <= allowed.max_outliers:
        return []
    told = f"{found.value:.1%} of the rows are called outliers, {found.low:.1%} at the mild end of its interval"
    return [f"{told}, expected at most {allowed.max_outliers:.1%}"]


def _finite(value: float) -> float | None:
    """JSON has no infinity; the reason tells of it."""
    return value if np.isfinite(value) else None
