"""Horizontal bars on a logarithmic scale: numbers that are powers of ten apart, each with the mark that it may reach.

Made of HTML and not of SVG, so that the words keep their size on a phone, where they stand above their bars.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipway.reports.console import number
from slipway.reports.pages.html_page import Html, join, paragraph


@dataclass(frozen=True)
class LogBar:
    """A name and its number, 0 or more; one that is 0 or None has no bar."""

    name: str
    value: float | None
    text: str  # what stands at the end of the bar
    limit: float | None = None  # above 0: a mark on the bar's track
    is_bad: bool = False


def log_bars(bars: Sequence[LogBar], unit: str, mark: str = "") -> Html:
    """All bars on one scale. `unit` is what they measure; `mark` is what the marks stand for."""
    shown = [value for bar in bars for value in (bar.value, bar.limit) if value]
    if not shown:
        return join(
            [*(_bar(bar, 0, 1) for bar in bars), paragraph(f"{unit}: 0 everywhere.", "note")]
        )
    low, high = math.floor(math.log10(min(shown)) - 0.3), math.ceil(math.log10(max(shown)) + 0.1)
    scale = f"{unit}, on a logarithmic scale from {number(10.0**low)} to {number(10.0**high)}: each line is ten times the one before."
    note = paragraph(f"{scale} {mark}".strip(), "note")
    return join([*(_bar(bar, low, high) for bar in bars), note])


def _bar(bar: LogBar, low: int, high: int) -> Html:
    pieces = []
    if bar.value:
        look = ' class="bad"' if bar.is_bad else ""
        pieces.append(f'<i{look} style="width:{_place(bar.value, low, high)}%"></i>')
    if bar.limit:
        hint = escape(f"allowed: {number(bar.limit)}")
        pieces.append(f'<u style="left:{_place(bar.limit, low, high)}%" title="{hint}"></u>')
    track = f'<span class="track" style="--decades:{high - low}">{"".join(pieces)}</span>'
    return Html(
        f'<div class="log"><span>{escape(bar.name)}</span>{track}<b>{escape(bar.text)}</b></div>'
    )


def _place(value: float, low: int, high: int) -> str:
    """Where it lies between the powers of ten, in percent."""
    return f"{100 * (math.log10(value) - low) / (high - low):.1f}"
