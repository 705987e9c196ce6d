"""Draws intervals below each other on one scale, as the last column of a table or as a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from slipway.artifacts.bundle import Metric
from slipway.reports.console import number
from slipway.reports.pages.html_page import Html, paragraph


@dataclass(frozen=True)
class IntervalRow:
    """A metric with its interval; a bad one is drawn in another colour."""

    metric: Metric
    is_bad: bool = False
    line: float | None = None  # of a chart: the value of a thin line, such as the baseline


def interval_chart(rows: Mapping[str, IntervalRow], line_name: str) -> Html:
    """Draw named intervals, each with a reference line; `line_name` explains the line."""
    least, most = _scale(list(rows.values()))
    drawings = zip(rows.items(), interval_bars(list(rows.values())), strict=True)
    lines = "".join(
        f'<div class="log"><span>{escape(name)}</span>{bar}<b>{number(row.metric.value)}</b></div>'
        for (name, row), bar in drawings
    )
    scale = "".join(f"<span>{number(bound)}</span>" for bound in (least, most))
    ends = f'<div class="log"><span></span><span class="scale">{scale}</span><b></b></div>'
    note = paragraph(f"Line: {line_name}.", "note") if line_name else ""
    return Html(f"<div>{lines}{ends}{note}</div>")


def _scale(rows: Sequence[IntervalRow], *others: float) -> tuple[float, float]:
    lines = [row.line for row in rows if row.line is not None]
    lows, highs = ([getattr(row.metric, name) for row in rows] for name in ("low", "high"))
    return min([*lows, *lines, *others]), max([*highs, *lines, *others])


def interval_bars(rows: Sequence[IntervalRow], overall: Metric | None = None) -> list[Html]:
    """Draw each interval with a dot at its value, and a thin line at the overall value."""
    least, most = _scale(rows, *([overall.low, overall.high] if overall else []))

    def percent(value: float) -> float:
        return 100 * (value - least) / (most - least) if most > least else 50.0

    bars = []
    for row in rows:
        place = overall.value if overall else row.line
        line = "" if place is None else f'<u style="left:{percent(place):.1f}%"></u>'
        metric, style = row.metric, "range bad" if row.is_bad else "range"
        low, high = percent(metric.low), percent(metric.high)
        bars.append(
            Html(
                f'<span class="{style}" role="img" '
                f'aria-label="{metric.low:.4g} to {metric.high:.4g}">{line}'
                f'<i style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
                f'<b style="left:{percent(metric.value):.1f}%"></b></span>'
            )
        )
    return bars
