"""Tables for `dvc plots`, one line for each point: the confusion matrix or the scatter of numbers, the reliability diagram, the slices.

What the task does not have is a table without lines: DVC has the same plots for every task, and complains where a column is missing.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipway.metrics.scores import wilson_interval
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.evaluation.slice_record import write_slices
from slipway.system import files

# A machine that reads pickles takes a file that begins with the word "confidence" for one.
_RELIABILITY = ("rows", "confidence", "accuracy", "ideal", "low", "high")


def write_plots(
    evaluation: Evaluation, confusion: Path, scatter: Path, reliability: Path, slices: Path
) -> None:
    """Write the four tables."""
    pairs = list(zip(evaluation.targets.tolist(), evaluation.predictions.tolist(), strict=True))
    names = (
        [tuple(evaluation.classes[int(index)] for index in pair) for pair in pairs]
        if evaluation.is_classification
        else []
    )
    _write_table(confusion, ("actual", "predicted"), names)
    _write_table(scatter, ("target", "prediction"), [] if evaluation.is_classification else pairs)
    _write_table(reliability, _RELIABILITY, _reliability_rows(evaluation))
    write_slices(slices, evaluation.slices)


def _reliability_rows(evaluation: Evaluation) -> list[tuple[float, ...]]:
    """Of the calibrated answers: for each bin its mean confidence, and its accuracy with the interval of Wilson."""
    worth = evaluation.worth
    if worth is None or worth.before is None:
        return []
    rows: list[tuple[float, ...]] = []
    for found in worth.reliability_bins(worth.answers.outputs):
        low, high = wilson_interval(
            round(found.accuracy * found.rows), found.rows, worth.resampling.confidence
        )
        rows.append((found.rows, found.confidence, found.accuracy, found.confidence, low, high))
    return rows


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    files.write_text(path, text.getvalue())
