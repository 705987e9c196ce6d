"""Builds the evaluation page's section on slices, with the worst slice first."""

from slipway.artifacts.bundle import Metric
from slipway.reports.console import interval, number
from slipway.reports.evaluation.slice_scores import SliceScore, SliceScores
from slipway.reports.pages.html_page import Html, paragraph, section, table
from slipway.reports.pages.intervals import IntervalRow, interval_bars

_MOST_SHOWN = 25


def slices_section(scores: SliceScores, overall: Metric) -> Html:
    """Build the section; `overall` is the same metric over all test rows."""
    if not scores.judged:
        text = "No slice has enough rows to be judged."
        return section("Slices", paragraph(text, "soft"), *_notes(scores))
    shown = scores.judged[:_MOST_SHOWN]
    name = {"rmse": "RMSE"}.get(scores.metric, scores.metric.replace("_", " "))
    note = (
        f"The worst first, by the better bound of the {overall.confidence * 100:g} % interval. "
        f"The line is the {name} of all test rows, {number(overall.value)}."
    )
    if num_hidden := len(scores.judged) - len(shown):
        note += f" {num_hidden} more are in reports/slices.csv."
    verdict = (
        f"{len(scores.worse)} of {len(scores.judged)} slices are worse than the other rows. "
        "The test accounts for the number of slices: if all are equally good, it calls one worse "
        f"in at most {(1 - scores.confidence) * 100:.3g} % of evaluations."
    )
    return section(
        "Slices",
        paragraph(verdict, "bad" if scores.worse else "good"),
        _table(shown, overall, name),
        paragraph(note, "note"),
        *_notes(scores),
    )


def _table(shown: list[SliceScore], overall: Metric, name: str) -> Html:
    rows = [
        [
            "✗ worse" if score.is_worse else "",
            score.title,
            str(score.metric.rows),
            number(score.metric.value),
            interval(score.metric),
            f"{score.p_value:.3f}",
        ]
        for score in shown
    ]
    columns = ["", "slice", "rows", name, "interval", "adjusted p"]
    bars = interval_bars([IntervalRow(score.metric, score.is_worse) for score in shown], overall)
    return table(columns, rows, numeric=["rows", name, "adjusted p"], last=bars)


def _notes(scores: SliceScores) -> list[Html]:
    notes = []
    if scores.too_small:
        listed = "; ".join(
            f"{small.by} {small.value}, {small.rows} row{'s' * (small.rows > 1)}"
            for small in scores.too_small
        )
        notes.append(f"Too few rows to be judged: {listed}.")
    if scores.constant:
        notes.append(f"One value in all test rows, so no slices: {', '.join(scores.constant)}.")
    return [paragraph(note, "note") for note in notes]
