"""Horizontal bars of named parts, as SVG inside a page: one bar for each account, all on one scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from slipway.reports.pages.html_page import Html

# Middle tones that stand out on the light and on the dark ground of a page.
_COLOURS = ("#e0792b", "#8a63c9", "#2f7de1", "#1553a8", "#c43d6b", "#189a74", "#8b95a5")
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 640, 132, 76, 26, 16, 8
_LEGEND_ROW, _LEGEND_COLUMN = 22, 166


@dataclass(frozen=True)
class Bar:
    """One account: a name, and its parts in the unit of the scale."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The length."""
        return sum(self.parts.values())


def stacked_bars(bars: Sequence[Bar], unit: str) -> Html:
    """Every bar has the parts of the first, or one part alone named "", which is drawn as an outline."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(max(bar.total for bar in bars), 1e-9)
    names = list(bars[0].parts)
    drawn = [_bar(bar, index, scale, names, unit) for index, bar in enumerate(bars)]
    legend_top = _TOP + len(bars) * (_BAR + _GAP) + 8
    legend = [_legend(name, index, legend_top) for index, name in enumerate(names)]
    rows = -(-len(names) // 3)
    height = legend_top + rows * _LEGEND_ROW
    title = escape("; ".join(f"{bar.name} {bar.total:.3g} {unit}" for bar in bars))
    style = "max-width:44rem"
    return Html(
        f'<svg viewBox="0 0 {_WIDTH} {height}" style="{style}" role="img" aria-label="{title}">{"".join([*drawn, *legend])}</svg>'
    )


def _bar(bar: Bar, index: int, scale: float, names: list[str], unit: str) -> str:
    top, left = _TOP + index * (_BAR + _GAP), float(_LEFT)
    middle = top + _BAR / 2
    pieces = [
        f'<text x="{_LEFT - 10}" y="{middle}" dy="4.5" text-anchor="end">{escape(bar.name)}</text>'
    ]
    for name, value in bar.parts.items():
        width = value * scale
        look = (
            f'fill="{_COLOURS[names.index(name)]}"'
            if name in names
            else 'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
        )
        hint = f"<title>{escape(name or bar.name)} {value:.3g} {escape(unit)}</title>"
        pieces.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max(width, 0.3):.1f}" height="{_BAR}" {look}>{hint}</rect>'
        )
        left += width
    pieces.append(
        f'<text class="title" x="{left + 8:.1f}" y="{middle}" dy="4.5">{bar.total:.3g} {escape(unit)}</text>'
    )
    return "".join(pieces)


def _legend(name: str, index: int, top: int) -> str:
    x, y = _LEFT + index % 3 * _LEGEND_COLUMN, top + index // 3 * _LEGEND_ROW
    square = f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{_COLOURS[index]}"/>'
    return f'{square}<text x="{x + 18}" y="{y + 10.5}">{escape(name)}</text>'
