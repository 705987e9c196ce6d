"""Reads an experiment's predictions for its test rows, and its training curves.

Both are read from DVC's cache, or from its remote if the cache does not have them.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.locations import CALIBRATION, LIVE, METRICS, PREDICTIONS
from slipway.artifacts.uncertainty import decided_classes, read_calibration
from slipway.data.engine.rows import read_table
from slipway.experiments import repository
from slipway.experiments.records import ExperimentRecord
from slipway.kinds.registry import Task, kind_of
from slipway.reports.evaluation.record import read_metrics
from slipway.reports.evaluation.tables import predictions_schema
from slipway.reports.pages.charts import Series
from slipway.system.errors import UnavailableError
from slipway.training.telemetry.curves import read_curves


@dataclass(frozen=True)
class ExperimentAnswers:
    """An experiment's metrics, its predictions for the test rows, and its training curves."""

    task: Task
    classes: list[str]  # empty for a numeric target
    metrics: dict[str, Metric]
    ids: list[str]
    targets: NDArray[np.float64]  # (N,) class indices, or numbers
    outputs: NDArray[np.float32]  # (N, K) probabilities, or (N, 1) values
    curves: dict[str, list[Series]]
    thresholds: list[float] | None = None  # decision thresholds of two classes, if any

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The predicted class index of each row, (N,); only for tasks with one class per row."""
        return decided_classes(self.outputs, self.thresholds)

    def rows(self, ids: list[str]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Return the targets (rows,) and outputs (rows, K) of the rows in `ids`, in this order.

        KeyError if an id is not in `self.ids`.
        """
        places = {name: place for place, name in enumerate(self.ids)}
        chosen = [places[name] for name in ids]
        return self.targets[chosen], self.outputs[chosen]


def read_answers(record: ExperimentRecord) -> ExperimentAnswers:
    """Read the stored results of an experiment.

    Raises:
        UnavailableError: the results are not stored; the message says why.
        SchemaError: a file is damaged.
    """
    commit = repository.experiments().get(record.name)
    if commit is None:
        ended = f"it ended with {record.stage}" if record.stage else f"it is {record.ended}"
        raise UnavailableError(
            f"DVC keeps no answers of {record.name}: {ended}, expected a run of all stages that "
            "is done. Repeat it with `slipway run`."
        )
    task = record.params.get("data.task", "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        has_decision = any(key.startswith("evaluate.decision.") for key in record.params)
        _fetch(commit, folder, [CALIBRATION] if has_decision else [])
        table = read_table(folder / PREDICTIONS, predictions_schema(task))
        metrics, curves = read_metrics(folder / METRICS), read_curves(folder / LIVE)
        content = json.loads((folder / METRICS).read_bytes())
        calibration = read_calibration(folder / CALIBRATION) if has_decision else None
    classes = [entry["class"] for entry in content.get("per_class", [])]
    return ExperimentAnswers(
        task,
        classes,
        metrics,
        table["id"].to_pylist(),
        *_numbers(table, task, classes),
        curves,
        calibration.thresholds if calibration else None,
    )


def _fetch(commit: str, folder: Path, more: list[Path]) -> None:
    """Write the files of the experiment's commit below `folder`."""
    try:
        kept = DVCFileSystem(rev=commit)
        for path in (METRICS, PREDICTIONS, LIVE, *more):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            kept.get(path.as_posix(), str(folder / path), recursive=path == LIVE)
    except (DvcException, OSError) as error:
        raise UnavailableError(
            f"DVC cannot read the outputs of experiment {commit[:7]}: {error}. Expected them in "
            "its cache or its remote. Try `dvc pull`, or repeat the run with `slipway run`."
        ) from error


def _numbers(
    table: pa.Table, task: Task, classes: list[str]
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    if not kind_of(task).target.has_classes:
        values = table["prediction"].to_numpy().astype(np.float32)
        return table["target"].to_numpy(), values[:, np.newaxis]
    if kind_of(task).target.several:
        # What was given stands for the probabilities, so no threshold is needed.
        return (
            np.array(_members(table["target"], classes), np.float64),
            np.array(_members(table["prediction"], classes), np.float32),
        )
    codes = {name: code for code, name in enumerate(classes)}
    targets = np.array([codes[name] for name in table["target"].to_pylist()], np.float64)
    flat = table["probabilities"].combine_chunks().flatten().to_numpy()
    return targets, flat.reshape(len(targets), len(classes))


def _members(labels: pa.ChunkedArray, classes: list[str]) -> list[list[bool]]:
    return [[name in own for name in classes] for own in map(set, labels.to_pylist())]
