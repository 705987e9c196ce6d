"""The slices on the page of an evaluation: the worst first, each with its interval as a bar, and how many were looked at."""

from dataclasses import dataclass

from slipway.artifacts.bundle import Metric
from slipway.reports.console import interval, number
from slipway.reports.evaluation.slice_scores import SliceScore, SliceScores, SmallSlice
from slipway.reports.pages.html_page import Html, PageSection, join, paragraph, table

_MOST_SHOWN = 25


def slices_section(scores: SliceScores, overall: Metric) -> PageSection:
    """`overall` is the same metric over all test rows."""
    if not scores.judged:
        return PageSection(
            "Slices",
            join([paragraph("No slice has enough rows to be judged.", "soft"), *_notes(scores)]),
        )
    shown = scores.judged[:_MOST_SHOWN]
    num_hidden = len(scores.judged) - len(shown)
    more = f" {num_hidden} more are in reports/slices.csv." if num_hidden else ""
    name = {"accuracy": "accuracy", "rmse": "RMSE"}[scores.metric]
    note = (
        f"The worst first, by the best that the {overall.confidence * 100:g} % interval leaves possible. "
        f"The line is the {name} of all test rows, {number(overall.value)}.{more}"
    )
    return PageSection(
        "Slices",
        join(
            [
                verdict(scores),
                _table(shown, overall, name),
                paragraph(note, "note"),
                *_notes(scores),
            ]
        ),
    )


def verdict(scores: SliceScores) -> Html:
    """How many are worse, of how many."""
    text = (
        f"{len(scores.worse)} of {len(scores.judged)} slices are worse than the other rows. That so many were looked at is taken into "
        f"account: where all are equally good, any is named in at most {(1 - scores.confidence) * 100:.3g} % of evaluations."
    )
    return paragraph(text, "bad" if scores.worse else "good")


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
    scale = _Scale(
        min([overall.low, *(score.metric.low for score in shown)]),
        max([overall.high, *(score.metric.high for score in shown)]),
    )
    bars = [_bar(score.metric, overall.value, scale, is_bad=score.is_worse) for score in shown]
    columns = ["", "slice", "rows", name, "interval", "adjusted p"]
    return table(columns, rows, numeric=["rows", name, "adjusted p"], last=bars)


@dataclass(frozen=True)
class _Scale:
    """From what to what bars below each other reach."""

    least: float
    most: float

    def place(self, value: float) -> float:
        """In percent of the width."""
        return (
            100 * (value - self.least) / (self.most - self.least)
            if self.most > self.least
            else 50.0
        )


def _bar(metric: Metric, line: float, scale: _Scale, *, is_bad: bool) -> Html:
    """The interval with a dot at its value, and a thin line across at `line`, which the bars have in common."""
    low, high, value = (scale.place(number) for number in (metric.low, metric.high, metric.value))
    style = "range bad" if is_bad else "range"
    return Html(
        f'<span class="{style}" role="img" aria-label="{metric.low:.4g} to {metric.high:.4g}"><u style="left:{scale.place(line):.1f}%"></u>'
        f'<i style="left:{low:.1f}%;width:{high - low:.1f}%"></i><b style="left:{value:.1f}%"></b></span>'
    )


def _notes(scores: SliceScores) -> list[Html]:
    notes = []
    if scores.too_small:
        notes.append(f"Too few rows to be judged: {_listed(scores.too_small)}.")
    if scores.constant:
        notes.append(f"One value in all test rows, so no slices: {', '.join(scores.constant)}.")
    return [paragraph(note, "note") for note in notes]


def _listed(small: list[SmallSlice]) -> str:
    return "; ".join(f"{one.by} {one.value}, {one.rows} row{'s' * (one.rows > 1)}" for one in small)
