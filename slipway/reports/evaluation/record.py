"""What the trained network reached on the test split: the record of it, and its file.

`metrics/evaluate.json` has the headline numbers as flat keys, because DVC makes a column of each; DVC skips
lists, so every metric with its interval is in the list `metrics`, the same metrics of the baseline are in the list
`baseline`, and every class is in the list `per_class`.
Where test rows leak from another split, the same numbers without them are beside these, under names that end in `_without_leaked`.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from slipway.artifacts.bundle import Metric
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.scores import (
    ClassScores,
    Resampling,
    class_scores,
    confusion_matrix,
    count_classes,
    log_losses,
    measure,
)
from slipway.metrics.target_errors import TargetErrors
from slipway.reports.evaluation.reference_comparison import ReleasedComparison
from slipway.reports.evaluation.slice_record import slice_content
from slipway.reports.evaluation.slice_scores import SliceScores
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SchemaError


def headlines(task: Task) -> tuple[str, ...]:
    """The metrics that are shown first."""
    return (
        ("accuracy", "precision_macro", "recall_macro", "f1_macro", "log_loss")
        if is_classification(task)
        else ("rmse", "mae", "r2", "mse")
    )


_FEWEST_ROWS = 2  # below which R2 is not defined


class _NamedMetric(Metric):
    name: str


class _NamedValue(Contract):
    name: str
    value: float


_Entry = TypeVar("_Entry", bound=Contract)


@dataclass(frozen=True)
class Evaluation:
    """The test rows, what the network answered, and the metrics of it."""

    task: Task
    classes: list[str]  # empty for a numeric target
    ids: list[str]
    sources: list[str]
    targets: NDArray[np.float64]  # (N,) class index, or the number itself
    outputs: NDArray[np.float32]  # (N, K) probabilities, or (N, 1) values
    metrics: dict[str, Metric]
    leaked: NDArray[np.bool_] | None = (
        None  # (N,) rows with a twin, or their group, in another split; None where none has
    )
    without_leaked: dict[str, Metric] = field(
        default_factory=dict
    )  # of the other rows; empty where none leaks, or too few are left
    slices: SliceScores | None = None
    released: ReleasedComparison | None = None  # None where evaluate.reference_model asks for none
    target_errors: list[TargetErrors] = field(
        default_factory=list
    )  # of a numeric target, by ranges of it
    worth: UncertaintyReport | None = None  # of the answers; None where nothing was calibrated
    baseline: dict[str, float] = field(default_factory=dict)  # each metric of the trivial predictor

    @property
    def num_leaked(self) -> int:
        """How many rows are `leaked`."""
        return 0 if self.leaked is None else int(self.leaked.sum())

    @property
    def is_classification(self) -> bool:
        """Whether `outputs` are probabilities."""
        return is_classification(self.task)

    @cached_property
    def predictions(self) -> NDArray[np.float64]:
        """(N,) the index of the most probable class (the first of equals), or the value itself."""
        return (
            self.outputs.argmax(axis=1) if self.is_classification else self.outputs[:, 0]
        ).astype(np.float64)

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """(K, K) rows by actual and predicted class; of a classification only."""
        return confusion_matrix(self.targets, self.predictions, len(self.classes))

    @cached_property
    def per_class(self) -> ClassScores:
        """Precision, recall and F1 of each class; of a classification only."""
        return class_scores(count_classes(self.confusion))

    def worst(self, num_rows: int) -> list[int]:
        """The rows with the largest loss, worst first; of a classification only rows with a wrong label."""
        if self.is_classification:
            loss = np.where(
                self.predictions != self.targets, log_losses(self.targets, self.outputs), -1.0
            )
        else:
            loss = np.abs(self.predictions - self.targets)
        worst_first = np.argsort(-loss, kind="stable")[:num_rows]
        return [int(row) for row in worst_first if loss[row] > 0]

    def least_certain(self, num_rows: int) -> list[int]:
        """The rows whose two best probabilities are closest, the closest first, right or wrong; none for a numeric target."""
        if not self.is_classification or len(self.classes) < 2:
            return []
        return [int(row) for row in np.argsort(self.margins, kind="stable")[:num_rows]]

    @cached_property
    def margins(self) -> NDArray[np.float64]:
        """(N,) the best probability less the second; of a classification only."""
        best = np.sort(self.outputs.astype(np.float64), axis=1)[:, -2:]
        return best[:, 1] - best[:, 0]


def measure_without_leaked(
    task: Task,
    targets: NDArray[np.float64],
    outputs: NDArray[np.float32],
    leaked: NDArray[np.bool_],
    resampling: Resampling,
    top_k: int | None = None,
) -> dict[str, Metric]:
    """Every metric over the rows that are not `leaked` (N,); empty where none is, or where too few others are left to measure."""
    honest = ~leaked
    if honest.all() or honest.sum() < _FEWEST_ROWS:
        return {}
    return measure(task, targets[honest], outputs[honest], resampling, top_k=top_k)


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write `metrics/evaluate.json`."""
    files.write_json(path, _content(evaluation))


def read_metrics(path: Path) -> dict[str, Metric]:
    """Every metric by name from `metrics/evaluate.json`; SchemaError if it is missing or not understood."""
    named = _read_list(path, "metrics", _NamedMetric)
    return {entry.name: Metric(**entry.model_dump(exclude={"name"})) for entry in named}


def read_baseline(path: Path) -> dict[str, float]:
    """Every metric of the baseline by name from `metrics/evaluate.json`; SchemaError as for `read_metrics`."""
    return {entry.name: entry.value for entry in _read_list(path, "baseline", _NamedValue)}


def baseline_words(task: Task) -> str:
    """The baseline in words."""
    if is_classification(task):
        return "the majority class of the training rows for every row, with the classes' shares as probabilities"
    return "the mean target of the training rows for every row"


def _read_list(path: Path, key: str, kind: type[_Entry]) -> list[_Entry]:
    try:
        return [kind.model_validate(entry) for entry in json.loads(path.read_text())[key]]
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro evaluate`.") from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise SchemaError(
            f"{path} is not what the evaluate stage writes: {error!r}. Run `dvc repro --force evaluate`."
        ) from error


def read_coverage(path: Path) -> Metric | None:
    """The measured share of sets or intervals that held the truth, from a file that `read_metrics` takes."""
    named = json.loads(path.read_text()).get("calibration", [])
    found = [_NamedMetric.model_validate(entry) for entry in named if entry["name"] == "coverage"]
    return Metric(**found[0].model_dump(exclude={"name"})) if found else None


def _content(evaluation: Evaluation) -> dict[str, Any]:
    first = {name: evaluation.metrics[name].value for name in headlines(evaluation.task)}
    metrics = [{"name": name, **metric.model_dump()} for name, metric in evaluation.metrics.items()]
    baseline = [{"name": name, "value": value} for name, value in evaluation.baseline.items()]
    content = {
        **first,
        "rows": len(evaluation.targets),
        "metrics": metrics,
        "baseline": baseline,
        **_leak_content(evaluation),
    }
    content |= evaluation.worth.content() if evaluation.worth else {}
    content |= slice_content(evaluation.slices) if evaluation.slices else {}
    content |= _released_content(evaluation.released) if evaluation.released else {}
    content |= (
        {"by_target": [entry.model_dump() for entry in evaluation.target_errors]}
        if evaluation.target_errors
        else {}
    )
    return (
        content | {"per_class": _class_entries(evaluation)}
        if evaluation.is_classification
        else content
    )


def _leak_content(evaluation: Evaluation) -> dict[str, Any]:
    """Nothing where no row leaks."""
    if not evaluation.num_leaked:
        return {}
    without = evaluation.without_leaked
    first = {
        f"{name}_without_leaked": without[name].value
        for name in headlines(evaluation.task)
        if name in without
    }
    metrics = [{"name": name, **metric.model_dump()} for name, metric in without.items()]
    return {"leaked_rows": evaluation.num_leaked, **first, "metrics_without_leaked": metrics}


def _released_content(released: ReleasedComparison) -> dict[str, Any]:
    name = f"{released.difference.metric}_from_released"
    return {name: released.difference.difference, "released": [released.model_dump()]}


def _class_entries(evaluation: Evaluation) -> list[dict[str, Any]]:
    scores, rows = evaluation.per_class, evaluation.confusion.sum(axis=1)
    return [
        {
            "class": name,
            "rows": int(rows[index]),
            "precision": float(scores.precision[index]),
            "recall": float(scores.recall[index]),
            "f1": float(scores.f1[index]),
        }
        for index, name in enumerate(evaluation.classes)
    ]
