"""Measures the trained network on the test split, and writes `metrics/evaluate.json`.

The headline numbers are flat keys, because DVC shows each flat key as a column. The details are
lists, which DVC skips: `metrics` has every metric with its interval, `baseline` the metrics of the
baseline, and `per_class` every class. If test rows leak from another split, metrics without these
rows have names that end in `_without_leaked`.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import leads
from slipway.config.sections import EvaluateParams
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import TargetErrors, baseline_outputs, baseline_scores, measure
from slipway.metrics.user_metrics import UserMetric, measure_user_metrics
from slipway.reports.evaluation.importance import ColumnImportance
from slipway.reports.evaluation.members import (
    EnsembleAnswers,
    MemberComparison,
    compare_members,
)
from slipway.reports.evaluation.reference_comparison import (
    ReferenceAnswers,
    ReferenceComparison,
    compare,
)
from slipway.reports.evaluation.slice_scores import RowAnswers, SliceScores, score_slices
from slipway.reports.evaluation.slices import Dimension
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import MetricError, SchemaError
from slipway.system.user_code import UserCode

_MIN_ROWS = 2  # R2 is undefined for fewer rows


class _NamedMetric(Metric):
    name: str


class _NamedValue(Contract):
    name: str
    value: float


_Entry = TypeVar("_Entry", bound=Contract)


@dataclass(frozen=True)
class Evaluation:
    """The test rows, the network's predictions, and their metrics."""

    task: Task
    classes: list[str]  # empty for a numeric target
    ids: list[str]
    sources: list[str]
    targets: NDArray[Any]  # (N,) class index, or the number itself; (N, K) labels, 0 or 1
    outputs: NDArray[np.float32]  # (N, K) probabilities, or (N, 1) values
    metrics: dict[str, Metric]
    leaked: NDArray[np.bool_] | None = None  # (N,) rows with a duplicate or group in another split
    without_leaked: dict[str, Metric] = field(default_factory=dict)  # empty if none leaks
    slices: SliceScores | None = None
    reference: ReferenceComparison | None = None
    target_errors: list[TargetErrors] = field(default_factory=list)  # by range of the target
    uncertainty: UncertaintyReport | None = None  # None if nothing was calibrated
    baseline: dict[str, float] = field(default_factory=dict)  # metrics of the trivial predictor
    user_metrics: Sequence[UserMetric] = ()
    importance: Sequence[ColumnImportance] = ()  # of a table's columns, the most important first
    members: MemberComparison | None = None  # None unless several networks answer together

    @property
    def num_leaked(self) -> int:
        """The number of test rows that leak from another split."""
        return 0 if self.leaked is None else int(self.leaked.sum())

    @property
    def shown_metrics(self) -> list[str]:
        """The names of the headline metrics: those of the kind of target, then the user's own."""
        own = [metric.name for metric in self.user_metrics]
        return [*kind_of(self.task).target.shown_metrics, *own]

    @property
    def results(self) -> Any:
        """The results object for this kind of target, such as `ClassResults`."""
        return kind_of(self.task).target.load_part("results")

    @property
    def thresholds(self) -> Sequence[float] | None:
        """The thresholds of the labels, if rows have several."""
        return self.uncertainty.calibration.thresholds if self.uncertainty else None

    @cached_property
    def predictions(self) -> NDArray[np.float64]:
        """The class index or value of each row (N,); for several labels (N, K), 0 or 1."""
        return cast(NDArray[np.float64], self.results.predictions(self.outputs, self.thresholds))

    @cached_property
    def is_wrong(self) -> NDArray[np.bool_]:
        """Mask (N,) of the rows whose prediction differs from the target."""
        different = self.predictions != self.targets
        return np.asarray(different if different.ndim == 1 else different.any(axis=1))

    def worst(self, num_rows: int) -> list[int]:
        """Return the rows with the largest loss, worst first; correct rows are left out."""
        severities = self.results.severities(self)
        worst_first = np.argsort(-severities, kind="stable")[:num_rows]
        return [int(row) for row in worst_first if severities[row] > 0]

    def least_certain(self, num_rows: int) -> list[int]:
        """Return the rows with the smallest margin, smallest first; none for a numeric target."""
        if len(self.classes) < 2:
            return []
        several = kind_of(self.task).target.several
        halves = [0.5] * len(self.classes) if several else None
        margins = leads(self.outputs, self.thresholds or halves)
        return [int(row) for row in np.argsort(margins, kind="stable")[:num_rows]]


def evaluate_rows(
    test: PackedSplit,
    manifest: PackedManifest,
    train_targets: NDArray[Any],
    uncertainty: UncertaintyReport,
    dimensions: Sequence[Dimension],
    reference: ReferenceAnswers | None,
    params: EvaluateParams,
    user_metrics: Sequence[UserMetric] = (),
    importance: Sequence[ColumnImportance] = (),
    ensemble: EnsembleAnswers | None = None,
) -> Evaluation:
    """Measure the network's predictions for the rows of `test`.

    Args:
        train_targets: training targets, to which the baseline is fitted.
        uncertainty: contains the predictions of the network.
        dimensions: define the slices of the rows.
        reference: contains the predictions of the reference model.
        ensemble: contains the predictions of an ensemble's members and of its student.

    Raises MetricError if a user-defined metric has no value.
    """
    task, targets, resampling = manifest.task, test.targets, uncertainty.resampling
    outputs, top_k = uncertainty.answers.outputs, params.top_k
    thresholds = uncertainty.calibration.thresholds
    answers = RowAnswers(task, targets, outputs, top_k, user_metrics, thresholds)
    own = {
        metric.name: metric.measure(task, targets, outputs, resampling) for metric in user_metrics
    }
    is_honest, without_leaked = ~test.leaked, {}
    if not is_honest.all() and is_honest.sum() >= _MIN_ROWS:
        honest = task, targets[is_honest], outputs[is_honest]
        without_leaked = measure(*honest, resampling, top_k=top_k, thresholds=thresholds)
        without_leaked |= measure_user_metrics(user_metrics, *honest, resampling)
    target = kind_of(task).target
    target_errors = []
    if not target.has_classes:
        target_errors = target.load_part("results").target_errors(targets, outputs, resampling)
    return Evaluation(
        task=task,
        classes=manifest.classes,
        ids=test.ids,
        sources=test.sources,
        targets=targets,
        outputs=outputs,
        metrics=measure(task, targets, outputs, resampling, top_k=top_k, thresholds=thresholds)
        | own,
        leaked=test.leaked,
        without_leaked=without_leaked,
        slices=score_slices(dimensions, answers, params.slice_min_rows, resampling),
        reference=compare(answers, reference, resampling) if reference else None,
        target_errors=target_errors,
        uncertainty=uncertainty,
        baseline=baseline_scores(task, train_targets, targets, len(manifest.classes), top_k)
        | _baseline_of(user_metrics, task, train_targets, targets, len(manifest.classes)),
        user_metrics=user_metrics,
        importance=importance,
        members=compare_members(answers, ensemble, resampling) if ensemble else None,
    )


def _baseline_of(
    user_metrics: Sequence[UserMetric],
    task: Task,
    train_targets: NDArray[Any],
    targets: NDArray[Any],
    num_classes: int,
) -> dict[str, float]:
    """Score the trivial predictor; metrics that it does not define are left out."""
    outputs = baseline_outputs(task, train_targets, len(targets), num_classes)
    found = {}
    for metric in user_metrics:
        with contextlib.suppress(MetricError):
            found[metric.name] = metric.score(task, targets, outputs)
    return found


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write `metrics/evaluate.json`."""
    files.write_json(path, _content(evaluation))


def read_metrics(path: Path) -> dict[str, Metric]:
    """Read every metric by name; SchemaError if the file is missing or has another format."""
    named = _read_list(path, "metrics", _NamedMetric)
    return {entry.name: Metric(**entry.model_dump(exclude={"name"})) for entry in named}


def read_baseline(path: Path) -> dict[str, float]:
    """Read every metric of the baseline by name."""
    return {entry.name: entry.value for entry in _read_list(path, "baseline", _NamedValue)}


def read_user_code(path: Path) -> list[UserCode]:
    """Read the origin of each user-defined metric: its name and the digest of its code."""
    named = json.loads(path.read_text()).get("user_code", [])
    return [UserCode.model_validate(entry) for entry in named]


def read_coverage(path: Path) -> Metric | None:
    """Read the coverage of the sets or intervals; None if there are none."""
    named = json.loads(path.read_text()).get("calibration", [])
    found = [_NamedMetric.model_validate(entry) for entry in named if entry["name"] == "coverage"]
    return Metric(**found[0].model_dump(exclude={"name"})) if found else None


def slice_entries(scores: SliceScores) -> list[dict[str, Any]]:
    """Return an entry for each judged slice, as in `metrics/evaluate.json`."""
    return [
        {
            "by": score.by,
            "value": score.value,
            "rows": score.metric.rows,
            "metric": scores.metric,
            "measured": score.metric.value,
            "low": score.metric.low,
            "high": score.metric.high,
            "p_value": score.p_value,
            "is_worse": score.is_worse,
        }
        for score in scores.judged
    ]


def _read_list(path: Path, key: str, kind: type[_Entry]) -> list[_Entry]:
    try:
        return [kind.model_validate(entry) for entry in json.loads(path.read_text())[key]]
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro evaluate`.") from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise SchemaError(
            f"{path} does not have the format of the stage evaluate: {error!r}. "
            "Run `dvc repro --force evaluate`."
        ) from error


def _content(evaluation: Evaluation) -> dict[str, Any]:
    names, without_leaked = evaluation.shown_metrics, evaluation.without_leaked
    content: dict[str, Any] = {name: evaluation.metrics[name].value for name in names}
    content["rows"] = len(evaluation.targets)
    content["metrics"] = _named(evaluation.metrics)
    content["baseline"] = [
        {"name": name, "value": value} for name, value in evaluation.baseline.items()
    ]
    if evaluation.num_leaked:
        content["leaked_rows"] = evaluation.num_leaked
        content |= {
            f"{name}_without_leaked": without_leaked[name].value
            for name in names
            if name in without_leaked
        }
        content["metrics_without_leaked"] = _named(without_leaked)
    if evaluation.uncertainty:
        content |= evaluation.uncertainty.content()
    if slices := evaluation.slices:
        content["slices_judged"] = len(slices.judged)
        content["slices_worse"] = len(slices.worse)
        content["slices"] = slice_entries(slices)
        content["slices_too_small"] = [
            {"by": small.by, "value": small.value, "rows": small.rows} for small in slices.too_small
        ]
    if reference := evaluation.reference:
        name = f"{reference.difference.metric}_from_reference_model"
        content |= {
            name: reference.difference.difference,
            "reference_model": [reference.model_dump()],
        }
    if members := evaluation.members:
        content[f"{members.metric}_gain_over_best_member"] = members.members[0].gain.value
        content["members"] = [members.model_dump()]
    content |= evaluation.results.entries(evaluation)
    if evaluation.importance:
        content["importance"] = [one.model_dump(exclude_none=True) for one in evaluation.importance]
    if evaluation.user_metrics:
        content["user_code"] = [metric.code.model_dump() for metric in evaluation.user_metrics]
    return content


def _named(metrics: Mapping[str, Metric]) -> list[dict[str, Any]]:
    return [{"name": name, **metric.model_dump()} for name, metric in metrics.items()]
