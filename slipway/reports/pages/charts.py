"""Charts as SVG or HTML inside a page, in the colours of `slipway.reports.pages.html_page`.

A chart refuses numbers that are not finite instead of leaving them out silently.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipway.reports.console import number
from slipway.reports.pages.html_page import Html, join, paragraph
from slipway.system.errors import MetricError

_WIDTH, _HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 34, 42
_LINE_STYLES = ("first", "second", "third")
# Stacked bars: middle tones that stand out on the light and on the dark ground of a page.
_COLOURS = ("#e0792b", "#8a63c9", "#2f7de1", "#1553a8", "#c43d6b", "#189a74", "#8b95a5")
_STACK_WIDTH, _STACK_LEFT, _STACK_RIGHT, _BAR, _GAP, _STACK_TOP = 640, 132, 76, 26, 16, 8
_SPARK_WIDTH, _SPARK_HEIGHT = 144, 28
_LEGEND_ROW, _LEGEND_COLUMN = 22, 166


@dataclass(frozen=True)
class Series:
    """A named line or set of points; `x` and `y` have equal length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    are_dots: bool = False


@dataclass(frozen=True)
class StackedBar:
    """A name, and the parts of the bar in the unit of the scale."""

    name: str
    parts: Mapping[str, float]


@dataclass(frozen=True)
class BarGroup:
    """A name with one bar for each of `values`, which are 0 or more."""

    name: str
    values: Mapping[str, float]  # by series
    text: str  # shown at the end of the bars


@dataclass(frozen=True)
class LogBar:
    """One row of `log_bars`. Its value is 0 or more; for 0 and None no bar is drawn."""

    name: str
    value: float | None
    text: str  # shown at the end of the bar
    limit: float | None = None  # above 0: a mark on the bar's track
    is_bad: bool = False


@dataclass(frozen=True)
class _Axes:
    """The ticks of both axes, which map numbers to positions in the picture."""

    x_ticks: list[float]
    y_ticks: list[float]

    def x(self, value: float) -> str:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return f"{_LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        height = _HEIGHT - _TOP - _BOTTOM
        return f"{_HEIGHT - _BOTTOM - (value - low) / (high - low) * height:.1f}"


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> Html:
    """Draw up to three lines; if there are several, with a legend above them."""
    every_x = _finite([x for line in series for x in line.x])
    every_y = _finite([y for line in series for y in line.y])
    axes = _Axes(_ticks(every_x), _ticks(every_y))
    marks = []
    for place, (line, style) in enumerate(zip(series, _LINE_STYLES, strict=False)):
        places = [(axes.x(x), axes.y(y)) for x, y in zip(line.x, line.y, strict=True)]
        if line.are_dots:
            marks += [f'<circle class="dot {style}" cx="{x}" cy="{y}" r="4"/>' for x, y in places]
        else:
            points = " ".join(f"{x},{y}" for x, y in places)
            marks.append(f'<polyline class="line {style}" points="{points}"/>')
        if len(series) > 1:
            marks.append(_legend(style, [later.name for later in series[place:]]))
    return _svg(axes, marks, x_label, y_label)


def scatter(x: ArrayLike, y: ArrayLike, x_label: str, y_label: str) -> Html:
    """Draw points on axes of equal scale, with the diagonal of equal values."""
    across, up = _finite(x), _finite(y)
    ticks = _ticks(np.concatenate([across, up]))
    return _dots(_Axes(ticks, ticks), across, up, (ticks[0], ticks[-1]), x_label, y_label)


def residuals(x: ArrayLike, errors: ArrayLike, x_label: str, y_label: str) -> Html:
    """Draw errors as points over `x`, with a horizontal line at zero."""
    across, up = _finite(x), _finite(errors)
    axes = _Axes(_ticks(across), _ticks(np.append(up, 0.0)))
    return _dots(axes, across, up, (0.0, 0.0), x_label, y_label)


def histogram(values: ArrayLike, x_label: str, num_bins: int = 30) -> Html:
    """Draw a histogram of `values`, in bins of equal width between the outer ticks."""
    finite = _finite(values)
    ticks = _ticks(finite)
    counts, edges = np.histogram(finite, bins=num_bins, range=(ticks[0], ticks[-1]))
    return _bars(ticks, counts.tolist(), edges, x_label)


def bars(counts: Sequence[int], low: float, high: float, x_label: str) -> Html:
    """Draw a histogram from the counts of bins of equal width between `low` and `high`."""
    edges = np.linspace(low, high if high > low else low + 1, len(counts) + 1)
    return _bars(_ticks(edges), counts, edges, x_label)


def stacked_bars(bars: Sequence[StackedBar], unit: str) -> Html:
    """Draw horizontal bars of named parts, all on one scale.

    Every bar has the parts of the first one, or a single part named "", drawn as an outline.
    """
    totals = [sum(bar.parts.values()) for bar in bars]
    scale = (_STACK_WIDTH - _STACK_LEFT - _STACK_RIGHT) / max(*totals, 1e-9)
    colours = dict(zip(bars[0].parts, _COLOURS, strict=False))
    pieces = []
    for index, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        top, left = _STACK_TOP + index * (_BAR + _GAP), float(_STACK_LEFT)
        middle = top + _BAR / 2
        pieces.append(
            f'<text x="{_STACK_LEFT - 10}" y="{middle}" dy="4.5" text-anchor="end">'
            f"{escape(bar.name)}</text>"
        )
        for name, value in bar.parts.items():
            look = 'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
            if name in colours:
                look = f'fill="{colours[name]}"'
            pieces.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(value * scale, 0.3):.1f}" '
                f'height="{_BAR}" {look}><title>{escape(name or bar.name)} {value:.3g} '
                f"{escape(unit)}</title></rect>"
            )
            left += value * scale
        pieces.append(
            f'<text class="title" x="{left + 8:.1f}" y="{middle}" dy="4.5">'
            f"{total:.3g} {escape(unit)}</text>"
        )
    legend_top = _STACK_TOP + len(bars) * (_BAR + _GAP) + 8
    pieces += _colour_legend(colours, legend_top)
    height = legend_top + math.ceil(len(colours) / 3) * _LEGEND_ROW
    named = zip(bars, totals, strict=True)
    title = escape("; ".join(f"{bar.name} {total:.3g} {unit}" for bar, total in named))
    return Html(
        f'<svg viewBox="0 0 {_STACK_WIDTH} {height}" style="max-width:44rem" role="img" '
        f'aria-label="{title}">{"".join(pieces)}</svg>'
    )


def _colour_legend(colours: Mapping[str, str], top: int) -> Iterator[str]:
    """Draw the names of the colours, three in a row."""
    for index, (name, colour) in enumerate(colours.items()):
        x = _STACK_LEFT + index % 3 * _LEGEND_COLUMN
        y = top + index // 3 * _LEGEND_ROW
        yield (
            f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{colour}"/>'
            f'<text x="{x + 18}" y="{y + 10.5}">{escape(name)}</text>'
        )


def bar_groups(groups: Sequence[BarGroup], series: Sequence[str], description: str) -> Html:
    """Draw horizontal bars on one scale from 0, in groups below each other.

    They are HTML instead of SVG, so that the words keep their size on a phone.

    Args:
        series: up to three names, each with its own colour.
        description: replaces the picture for a screen reader.
    """
    styles = dict(zip(series, _LINE_STYLES, strict=False))
    most = max((value for group in groups for value in group.values.values()), default=0) or 1
    keys = "".join(
        f'<span><i class="{style}"></i>{escape(name)}</span>'
        for name, style in styles.items()
        if any(name in group.values for group in groups)
    )
    legend = f'<p class="legend soft">{keys}</p>' if len(styles) > 1 else ""
    lines = "".join(_bar_group(group, styles, most) for group in groups)
    return Html(f'<div role="img" aria-label="{escape(description)}">{legend}{lines}</div>')


def _bar_group(group: BarGroup, styles: Mapping[str, str], most: float) -> str:
    drawn = "".join(
        f'<i class="{styles[name]}" style="width:{100 * value / most:.1f}%" '
        f'title="{escape(f"{name}: {number(value)}")}"></i>'
        for name, value in group.values.items()
    )
    return (
        f'<div class="log"><span>{escape(group.name)}</span><span class="group">{drawn}</span>'
        f"<b>{escape(group.text)}</b></div>"
    )


def step_chart(counts: Mapping[str, Sequence[int]], low: float, high: float, x_label: str) -> Html:
    """Draw up to three overlaid histograms, each as fractions of its own rows."""
    width = len(next(iter(counts.values())))
    edges = np.linspace(low, high if high > low else low + 1, width + 1)
    lines = [
        Series(name, np.repeat(edges, 2)[1:-1].tolist(), np.repeat(heights, 2).tolist())
        for name, found in counts.items()
        for heights in [np.asarray(found, np.float64) / max(sum(found), 1)]
    ]
    return line_chart(lines, x_label, "fraction of the rows")


def spark_bars(counts: Sequence[int], description: str) -> Html:
    """Draw a small histogram, as high as a line of text, without axes."""
    most, width = max(counts, default=0) or 1, _SPARK_WIDTH / max(len(counts), 1)
    drawn = "".join(
        f'<rect class="bar" x="{index * width:.1f}" y="{_SPARK_HEIGHT * (1 - count / most):.1f}" '
        f'width="{max(width - 1, 1):.1f}" height="{_SPARK_HEIGHT * count / most:.1f}"/>'
        for index, count in enumerate(counts)
    )
    return Html(
        f'<svg class="spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" role="img" '
        f'aria-label="{escape(description)}">{drawn}</svg>'
    )


def log_bars(bars: Sequence[LogBar], unit: str, mark: str = "") -> Html:
    """Draw horizontal bars on one logarithmic scale, for numbers that are powers of ten apart.

    They are HTML instead of SVG, so that the words keep their size on a phone.

    Args:
        unit: describes the numbers.
        mark: describes the marks.
    """
    shown = [value for bar in bars for value in (bar.value, bar.limit) if value]
    if not shown:
        return join(
            [*(_log_bar(bar, 0, 1) for bar in bars), paragraph(f"{unit}: 0 everywhere.", "note")]
        )
    low, high = math.floor(math.log10(min(shown)) - 0.3), math.ceil(math.log10(max(shown)) + 0.1)
    scale = (
        f"{unit}, on a logarithmic scale from {number(10.0**low)} to {number(10.0**high)}: "
        "each line is ten times the one before."
    )
    note = paragraph(f"{scale} {mark}".strip(), "note")
    return join([*(_log_bar(bar, low, high) for bar in bars), note])


def _log_bar(bar: LogBar, low: int, high: int) -> Html:
    def percent(value: float) -> str:
        return f"{100 * (math.log10(value) - low) / (high - low):.1f}%"

    drawn = ""
    if bar.value:
        look = ' class="bad"' if bar.is_bad else ""
        drawn = f'<i{look} style="width:{percent(bar.value)}"></i>'
    if bar.limit:
        hint = escape(f"allowed: {number(bar.limit)}")
        drawn += f'<u style="left:{percent(bar.limit)}" title="{hint}"></u>'
    return Html(
        f'<div class="log"><span>{escape(bar.name)}</span>'
        f'<span class="track" style="--decades:{high - low}">{drawn}</span>'
        f"<b>{escape(bar.text)}</b></div>"
    )


def _dots(
    axes: _Axes,
    across: NDArray[np.float64],
    up: NDArray[np.float64],
    ideal: tuple[float, float],
    x_label: str,
    y_label: str,
) -> Html:
    """Draw dots and the dashed line from the first to the last x tick, at the heights `ideal`."""
    ends = (
        f'x1="{axes.x(axes.x_ticks[0])}" y1="{axes.y(ideal[0])}" '
        f'x2="{axes.x(axes.x_ticks[-1])}" y2="{axes.y(ideal[1])}"'
    )
    dots = [
        f'<circle class="dot" cx="{axes.x(a)}" cy="{axes.y(b)}" r="3"/>'
        for a, b in zip(across, up, strict=True)
    ]
    return _svg(axes, [f'<line class="ideal" {ends}/>', *dots], x_label, y_label)


def _bars(
    x_ticks: list[float], counts: Sequence[int], edges: NDArray[np.float64], x_label: str
) -> Html:
    axes = _Axes(x_ticks, _ticks(np.array([0.0, max(counts, default=0) or 1])))
    drawn = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            width = max(float(axes.x(right)) - float(axes.x(left)) - 1, 1)
            height = float(axes.y(0)) - float(axes.y(count))
            drawn.append(
                f'<rect class="bar" x="{axes.x(left)}" y="{axes.y(count)}" '
                f'width="{width:.1f}" height="{height:.1f}"/>'
            )
    return _svg(axes, drawn, x_label, "rows")


def _legend(style: str, names: Sequence[str]) -> str:
    """Draw the first of `names`, right-aligned at the top, to the left of the other names."""
    # 8 px for a letter is nearly the most.
    x = _WIDTH - _RIGHT - sum(max(80, 38 + 8 * len(name)) for name in names)
    return (
        f'<line class="line {style}" x1="{x}" y1="10" x2="{x + 16}" y2="10"/>'
        f'<text x="{x + 22}" y="14">{escape(names[0])}</text>'
    )


def _tick_text(tick: float) -> str:
    """Format the number at a tick, short enough to fit: 0.005, 250, 500k, 1.5M."""
    for unit, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tick) >= unit:
            return f"{tick / unit:g}{word}"
    return f"{tick:g}"


def _svg(axes: _Axes, marks: Sequence[str], x_label: str, y_label: str) -> Html:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    down = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{axes.y(tick)}" y2="{axes.y(tick)}"/>'
        f'<text x="{_LEFT - 8}" y="{axes.y(tick)}" dy="4" text-anchor="end">'
        f"{_tick_text(tick)}</text>"
        for tick in axes.y_ticks
    ]
    # A centred last text would leave the picture.
    anchors = ["middle"] * (len(axes.x_ticks) - 1) + ["end"]
    along = [
        f'<text x="{axes.x(tick)}" y="{bottom + 18}" text-anchor="{anchor}">'
        f"{_tick_text(tick)}</text>"
        for tick, anchor in zip(axes.x_ticks, anchors, strict=True)
    ]
    names = [
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        f'<text class="title" x="0" y="14">{escape(y_label)}</text>',
    ]
    title = escape(f"{y_label} against {x_label}")
    return Html(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join([*down, *along, *marks, *names])}</svg>"
    )


def _ticks(values: NDArray[np.float64]) -> list[float]:
    """Choose about five round numbers that enclose all values."""
    low, high = float(values.min()), float(values.max())
    if low == high and 0 <= low <= 1:  # fractions stay between 0 and 1
        low, high = 0.0, 1.0
    elif low == high:  # half around it, so that counts do not go below 0
        low, high = low - abs(low) / 2, high + abs(high) / 2
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        num_wrong = int((~np.isfinite(numbers)).sum())
        raise MetricError(
            f"a chart of {len(numbers)} numbers, {num_wrong} of them not finite: "
            "expected at least one, all finite."
        )
    return numbers
