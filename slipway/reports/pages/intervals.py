"""Draws intervals below each other on one scale, as the last column of a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipway.artifacts.bundle import Metric
from slipway.reports.pages.html_page import Html


@dataclass(frozen=True)
class IntervalRow:
    """A metric with its interval; a bad one is drawn in another colour."""

    metric: Metric
    is_bad: bool = False


def interval_bars(rows: Sequence[IntervalRow], overall: Metric | None = None) -> list[Html]:
    """Draw each interval with a dot at its value, and a thin line at the overall value."""
    every = [row.metric for row in rows] + ([overall] if overall else [])
    least, most = min(found.low for found in every), max(found.high for found in every)

    def percent(value: float) -> float:
        return 100 * (value - least) / (most - least) if most > least else 50.0

    line = f'<u style="left:{percent(overall.value):.1f}%"></u>' if overall else ""
    bars = []
    for row in rows:
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
