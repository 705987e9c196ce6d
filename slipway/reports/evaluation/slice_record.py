"""What is kept of the slices: entries of `metrics/evaluate.json`, and `reports/slices.csv` for DVC's plots."""

import csv
import io
from pathlib import Path
from typing import Any

from slipway.reports.evaluation.slice_scores import SliceScores
from slipway.system import files

_COLUMNS = (
    "slice",
    "by",
    "value",
    "rows",
    "metric",
    "measured",
    "low",
    "high",
    "p_value",
    "is_worse",
)


def slice_content(scores: SliceScores) -> dict[str, Any]:
    """Two numbers, of which DVC makes columns, and the lists behind them."""
    judged = [
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
    too_small = [
        {"by": small.by, "value": small.value, "rows": small.rows} for small in scores.too_small
    ]
    return {
        "slices_judged": len(judged),
        "slices_worse": len(scores.worse),
        "slices": judged,
        "slices_too_small": too_small,
    }


def write_slices(path: Path, scores: SliceScores | None) -> None:
    """Write one line for each slice that was judged, the worst first; the header alone where there is none."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for entry, score in (
        zip(slice_content(scores)["slices"], scores.judged, strict=True) if scores else ()
    ):
        writer.writerow({"slice": score.title, **{name: entry[name] for name in _COLUMNS[1:]}})
    files.write_text(path, text.getvalue())
