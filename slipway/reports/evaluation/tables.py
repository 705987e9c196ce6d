"""Writes the tables of an evaluation: `artifacts/predictions.parquet`, and those for `dvc plots`.

A table for `dvc plots` that does not apply to the task is written without rows: DVC has the same
plots for every task, and complains about missing columns.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from slipway.data.engine.rows import write_table
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import wilson_interval
from slipway.reports.evaluation.record import Evaluation, slice_entries
from slipway.system import files

# Tools that detect pickles mistake a file that begins with the word "confidence" for one.
_RELIABILITY = ("rows", "confidence", "accuracy", "ideal", "low", "high")
_SLICE = ("by", "value", "rows", "metric", "measured", "low", "high", "p_value", "is_worse")
_ROW = [
    pa.field("id", pa.string(), nullable=False),
    pa.field("source", pa.string(), nullable=False),  # path inside the data set, or row number
    pa.field("leaked", pa.bool_(), nullable=False),  # a duplicate or its group in another split
]


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """Write one row for each test row, in the order of the packed split."""
    leaked = evaluation.leaked
    if leaked is None:
        leaked = np.zeros(len(evaluation.ids), np.bool_)
    row = {"id": evaluation.ids, "source": evaluation.sources, "leaked": leaked}
    columns = row | evaluation.results.prediction_columns(evaluation)
    schema = predictions_schema(evaluation.task)
    write_table(path, pa.table(columns, schema=schema), schema)


def predictions_schema(task: Task) -> pa.Schema:
    """Return the schema of `predictions.parquet` for a task."""
    return pa.schema([*_ROW, *kind_of(task).target.load_part("results").PREDICTION_FIELDS])


def write_plots(
    evaluation: Evaluation, confusion: Path, scatter: Path, reliability: Path, slices: Path
) -> None:
    """Write the four tables for `dvc plots`; the other arguments are their paths."""
    columns = evaluation.results.prediction_columns(evaluation)
    pairs = list(zip(columns["target"], columns["prediction"], strict=True))
    target = kind_of(evaluation.task).target
    has_classes = target.has_classes
    is_confused = has_classes and not target.several
    _write_table(confusion, ("actual", "predicted"), pairs if is_confused else [])
    _write_table(scatter, ("target", "prediction"), [] if has_classes else pairs)
    _write_table(reliability, _RELIABILITY, _reliability_rows(evaluation))
    _write_table(slices, ("slice", *_SLICE), _slice_rows(evaluation))


def _reliability_rows(evaluation: Evaluation) -> list[tuple[float, ...]]:
    """Return confidence and accuracy of the calibrated answers by bin, with Wilson's interval."""
    report = evaluation.uncertainty
    if report is None or report.before is None:
        return []
    rows: list[tuple[float, ...]] = []
    for found in report.reliability_bins(report.answers.outputs):
        num_right = round(found.accuracy * found.rows)
        low, high = wilson_interval(num_right, found.rows, report.resampling.confidence)
        rows.append((found.rows, found.confidence, found.accuracy, found.confidence, low, high))
    return rows


def _slice_rows(evaluation: Evaluation) -> list[tuple[object, ...]]:
    """Return a row for each judged slice, the worst first."""
    if evaluation.slices is None:
        return []
    return [
        (score.title, *(entry[name] for name in _SLICE))
        for score, entry in zip(
            evaluation.slices.judged, slice_entries(evaluation.slices), strict=True
        )
    ]


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    files.write_text(path, text.getvalue())
