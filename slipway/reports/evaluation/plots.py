"""Writes the tables for `dvc plots`: confusion or scatter, reliability, slices.

A table that the task does not have gets no lines: DVC has the same plots for every task, and
complains about missing columns.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipway.metrics.scores import wilson_interval
from slipway.reports.evaluation.record import Evaluation, slice_entries
from slipway.system import files

# Tools that detect pickles take a file that starts with the word "confidence" for one.
_RELIABILITY = ("rows", "confidence", "accuracy", "ideal", "low", "high")
_SLICE = ("by", "value", "rows", "metric", "measured", "low", "high", "p_value", "is_worse")


def write_plots(
    evaluation: Evaluation, confusion: Path, scatter: Path, reliability: Path, slices: Path
) -> None:
    """Write the four tables."""
    pairs = list(zip(evaluation.targets.tolist(), evaluation.predictions.tolist(), strict=True))
    if evaluation.is_classification:
        names = [tuple(evaluation.classes[int(index)] for index in pair) for pair in pairs]
        pairs = []
    else:
        names = []
    _write_table(confusion, ("actual", "predicted"), names)
    _write_table(scatter, ("target", "prediction"), pairs)
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
