"""Builds the evaluation page's section on the importance of columns."""

from collections.abc import Sequence

from slipway.reports.console import number
from slipway.reports.evaluation.importance import ColumnImportance
from slipway.reports.pages.charts import BarGroup, bar_groups
from slipway.reports.pages.html_page import Html, paragraph, section, table

_MOST_BARS = 20


def importance_section(found: Sequence[ColumnImportance], metric: str) -> Html:
    """Draw the most important columns as a chart, above a table of all columns."""
    groups = [
        BarGroup(one.column, {"loss": max(one.loss, 0.0)}, number(one.loss))
        for one in found[:_MOST_BARS]
    ]
    note = (
        f"Change of the {metric} for the worse if the column is shuffled among {found[0].rows:,} "
        "test rows: mean, smallest and largest of three shuffles. Columns that carry the same "
        "information hide each other."
    )
    columns = ["column", "loss", "smallest", "largest"]
    rows = [[one.column, number(one.loss), number(one.low), number(one.high)] for one in found]
    if any(one.gain is not None for one in found):
        columns.append("gain")
        for row, one in zip(rows, found, strict=True):
            row.append(f"{one.gain or 0:.1%}")
        note += (
            " Gain is the column's fraction of what all splits of the trees improve the loss of "
            "the training rows; it favours columns of many values."
        )
    return section(
        "Importance of columns",
        bar_groups(groups, ["loss"], f"Loss of the {metric} by shuffled column"),
        table(columns, rows, numeric=columns[1:]),
        paragraph(note, "note"),
    )
