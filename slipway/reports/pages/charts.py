"""Charts as SVG inside a page: lines, a scatter of pairs, a histogram. Colours come from the style of `slipway.reports.pages.html_page`.

Numbers that are not finite are refused: what cannot be drawn is not left out in silence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.reports.pages.html_page import Html
from slipway.system.errors import MetricError

_WIDTH, _HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 34, 42
_LINE_STYLES = ("first", "second", "third")


@dataclass(frozen=True)
class Series:
    """A named line: `x` and `y` of equal length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class _Frame:
    """From numbers to places in the picture, with the ticks of both axes."""

    x_ticks: list[float]
    y_ticks: list[float]

    def x(self, value: float) -> str:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return f"{_LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return (
            f"{_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM):.1f}"
        )


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> Html:
    """Up to three lines in one frame, named above it where there are several."""
    every_x = _finite([x for line in series for x in line.x])
    every_y = _finite([y for line in series for y in line.y])
    frame = _Frame(_ticks(every_x), _ticks(every_y))
    marks = []
    for place, (line, style) in enumerate(zip(series, _LINE_STYLES, strict=False)):
        points = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in zip(line.x, line.y, strict=True))
        marks.append(f'<polyline class="line {style}" points="{points}"/>')
        marks += (
            [_legend(line.name, style, [later.name for later in series[place + 1 :]])]
            if len(series) > 1
            else []
        )
    return _svg(frame, marks, x_label, y_label)


def scatter(x: ArrayLike, y: ArrayLike, x_label: str, y_label: str) -> Html:
    """Pairs as dots on equal axes, with the line where both are the same."""
    across, up = _finite(x), _finite(y)
    ticks = _ticks(np.concatenate([across, up]))
    frame = _Frame(ticks, ticks)
    ends = f'x1="{frame.x(ticks[0])}" y1="{frame.y(ticks[0])}" x2="{frame.x(ticks[-1])}" y2="{frame.y(ticks[-1])}"'
    dots = [
        f'<circle class="dot" cx="{frame.x(a)}" cy="{frame.y(b)}" r="3"/>'
        for a, b in zip(across, up, strict=True)
    ]
    return _svg(frame, [f'<line class="ideal" {ends}/>', *dots], x_label, y_label)


def residuals(x: ArrayLike, errors: ArrayLike, x_label: str, y_label: str) -> Html:
    """Errors as dots over `x`, with the line where there is none."""
    across, up = _finite(x), _finite(errors)
    frame = _Frame(_ticks(across), _ticks(np.append(up, 0.0)))
    zero = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{frame.y(0)}" y2="{frame.y(0)}"'
    dots = [
        f'<circle class="dot" cx="{frame.x(a)}" cy="{frame.y(b)}" r="3"/>'
        for a, b in zip(across, up, strict=True)
    ]
    return _svg(frame, [f'<line class="ideal" {zero}/>', *dots], x_label, y_label)


def histogram(values: ArrayLike, x_label: str, num_bins: int = 30) -> Html:
    """How often values fall between the ticks' ends, in bins of equal width."""
    finite = _finite(values)
    x_ticks = _ticks(finite)
    counts, edges = np.histogram(finite, bins=num_bins, range=(x_ticks[0], x_ticks[-1]))
    frame = _Frame(x_ticks, _ticks(np.array([0.0, counts.max()])))
    bars = [
        _bar(frame, left, right, int(count))
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    return _svg(frame, bars, x_label, "rows")


def bars(counts: Sequence[int], low: float, high: float, x_label: str) -> Html:
    """Counts that were made before, in bins of equal width between `low` and `high`."""
    edges = np.linspace(low, high if high > low else low + 1, len(counts) + 1)
    frame = _Frame(_ticks(edges), _ticks(np.array([0.0, max(counts, default=0) or 1])))
    drawn = [
        _bar(frame, left, right, count)
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    return _svg(frame, drawn, x_label, "rows")


def _bar(frame: _Frame, left: float, right: float, count: int) -> str:
    height, width = (
        float(frame.y(0)) - float(frame.y(count)),
        float(frame.x(right)) - float(frame.x(left)),
    )
    return f'<rect class="bar" x="{frame.x(left)}" y="{frame.y(count)}" width="{max(width - 1, 1):.1f}" height="{height:.1f}"/>'


def _legend(name: str, style: str, right_of_it: Sequence[str]) -> str:
    """Set flush right at the top, left of the other names."""
    x = (
        _WIDTH - _RIGHT - sum(max(80, 38 + 8 * len(text)) for text in (name, *right_of_it))
    )  # 8 px a letter at most, nearly
    return f'<line class="line {style}" x1="{x}" y1="10" x2="{x + 16}" y2="10"/><text x="{x + 22}" y="14">{escape(name)}</text>'


def _tick_text(tick: float) -> str:
    """Short enough to stand beside the next: 0.005, 250, 500k, 1.5M."""
    for unit, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tick) >= unit:
            return f"{tick / unit:g}{word}"
    return f"{tick:g}"


def _svg(frame: _Frame, marks: Sequence[str], x_label: str, y_label: str) -> Html:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    down = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{frame.y(tick)}" y2="{frame.y(tick)}"/>'
        f'<text x="{_LEFT - 8}" y="{frame.y(tick)}" dy="4" text-anchor="end">{_tick_text(tick)}</text>'
        for tick in frame.y_ticks
    ]
    anchors = ["middle"] * (len(frame.x_ticks) - 1) + [
        "end"
    ]  # the last would stick out of the picture
    along = [
        f'<text x="{frame.x(tick)}" y="{bottom + 18}" text-anchor="{anchor}">{_tick_text(tick)}</text>'
        for tick, anchor in zip(frame.x_ticks, anchors, strict=True)
    ]
    names = [
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text class="title" x="0" y="14">{escape(y_label)}</text>',
    ]
    title = escape(f"{y_label} against {x_label}")
    return Html(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join([*down, *along, *marks, *names])}</svg>'
    )


def _ticks(values: NDArray[np.float64]) -> list[float]:
    """About five round numbers, the first not above the smallest value, the last not below the largest."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = (
            (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
        )  # no shares or counts below 0
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise MetricError(
            f"a chart of {len(numbers)} numbers of which {int((~np.isfinite(numbers)).sum())} are not finite, expected some, all finite."
        )
    return numbers
