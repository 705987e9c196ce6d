"""Builds self-contained HTML pages: one file that loads nothing else, in light and dark colours.

A page is a list of sections, and each section is built by the functions below. They escape every
text. Only their results, of the type `Html`, are inserted without escaping.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Html = NewType("Html", str)
_SENTENCE = 24  # characters of a cell that keeps some width beside many columns
_LARGE = 10  # characters of a tile that fit in large letters
_LONG = ' class="long"'

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #ffffff; --ink: #1b2330;
  --soft: #667085; --line: #e3e6eb;
  --good: #0f7b5f; --bad: #c2410c; --mark: #2563eb; --other: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ground: #10141b; --card: #181e28;
  --ink: #e6eaf1; --soft: #97a1b3; --line: #2a3240;
  --good: #34d399; --bad: #fb923c; --mark: #60a5fa; --other: #fb923c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui,
  sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
.soft, figcaption, .note { color: var(--soft); font-size: .875rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .75rem;
  padding: 1.25rem; margin-top: 1.25rem; }
.note { margin: .75rem 0 0; }
.wide { overflow-x: auto; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 1.5rem 2.5rem; align-items: start; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .75rem .35rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: baseline; }
th { white-space: nowrap; color: var(--soft); font-weight: 500; }
td { overflow-wrap: break-word; } td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.words { min-width: 11rem; }
tr:last-child td, .control tr:last-child th { border-bottom: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr));
  gap: 1.25rem; }
.tiles + figure, .tiles + svg, .note + .beside { margin-top: 1.25rem; }
.tiles + p { margin-top: .75rem; }
.note + .wide, figure + .wide, .wide + .wide, div + .wide, svg + .wide { margin-top: .75rem; }
.tile b { display: block; font-size: 1.75rem; line-height: 1.2; font-weight: 600;
  font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tile b.long { font-size: 1.3rem; line-height: 1.6; }
.good { color: var(--good); } .bad { color: var(--bad); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr));
  gap: 1.25rem 1rem; }
figure { margin: 0; min-width: 0; } figcaption { overflow-wrap: anywhere; margin-top: .35rem; }
figcaption b { display: block; color: var(--ink); font-weight: 600; }
.gallery + .gallery { margin-top: 1.25rem; }
.gallery img { width: 100%; border: 1px solid var(--line); border-radius: .4rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr));
  gap: 1.75rem 1.5rem; margin-top: 1.5rem; }
.view { display: block; aspect-ratio: 4 / 3; overflow: hidden; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; position: relative; }
.view iframe { width: 400%; height: 400%; border: 0; transform: scale(.25);
  transform-origin: 0 0; pointer-events: none; }
.view img { width: 100%; height: 100%; object-fit: contain; object-position: 0 0; }
.view:hover, .view:focus { border-color: var(--mark); }
.view::after { content: ""; position: absolute; inset: 0; }
img { display: block; image-rendering: pixelated; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; font: 13px system-ui,
  sans-serif; fill: var(--soft); }
svg.spark { width: 9rem; }
.commands { margin: .5rem 0 1rem; padding: .75rem 1rem; overflow-x: auto; font-size: .85rem;
  background: var(--ground); border: 1px solid var(--line); border-radius: .5rem; }
.strip { display: flex; flex-wrap: wrap; gap: .25rem; }
tr:has(.strip) td { vertical-align: middle; }
.strip img { width: 4rem; height: 4rem; object-fit: contain; }
svg .title { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--line); } svg .line { fill: none; stroke-width: 2;
  stroke-linejoin: round; }
svg .first { stroke: var(--mark); } svg .second { stroke: var(--other); }
svg .third { stroke: var(--good); }
svg .dot { fill: var(--mark); fill-opacity: .45; stroke: none; }
svg .dot.second { fill: var(--other); } svg .dot.third { fill: var(--good); }
svg .bar { fill: var(--mark); }
svg .knob { stroke-width: 13; stroke-linecap: round; }
.control label { display: block; color: var(--soft); font-size: .875rem; }
.control input { display: block; width: 100%; margin: .35rem 0 .75rem; accent-color: var(--mark); }
.control td { overflow-wrap: anywhere; user-select: all; }
.slider + .wide { margin-top: 1.25rem; }
svg .ideal { stroke: var(--soft); stroke-dasharray: 4 4; }
.log { display: grid; grid-template-columns: 17rem 1fr 6rem; gap: .15rem .75rem;
  align-items: center;
  margin-bottom: .4rem; }
.log > span:first-child { font-size: .9rem; overflow-wrap: anywhere; }
.log b { font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.track { position: relative; height: 1.1rem; border-right: 1px solid var(--line);
  background: repeating-linear-gradient(to right, var(--line) 0 1px,
  transparent 1px calc(100% / var(--decades))); }
.track i { position: absolute; inset: .15rem auto .15rem 0; background: var(--mark);
  border-radius: 0 .2rem .2rem 0; }
.track i.bad { background: var(--bad); }
.track u { position: absolute; top: -.1rem; bottom: -.1rem; width: 2px; background: var(--ink); }
@media (max-width: 40rem) { .log { grid-template-columns: 1fr 6rem; }
.log > span:first-child { grid-column: 1 / -1; } }
.heat td, .heat th { padding: 0; border: 2px solid var(--card); text-align: center;
  vertical-align: middle; white-space: nowrap;
  min-width: 2.1rem; height: 2.1rem; border-radius: .3rem; }
.heat th { padding: 0 .35rem; }
.heat th[scope=row] { text-align: right; }
.heat td { background: color-mix(in srgb, var(--cell, var(--bad)) var(--strength),
  var(--ground)); }
@media (max-width: 40rem) { td, td.number, th { white-space: normal; padding-right: .6rem; }
td.words { min-width: 8rem; } }
@media (max-width: 32rem) { .heat td, .heat th { min-width: 1.6rem; height: 1.7rem;
  border-width: 1px; font-size: .75rem; } }
.range { position: relative; display: block; width: 9rem; height: .9rem; }
.range i, .range b, .range u { position: absolute; background: var(--mark); }
.range i { top: .4rem; height: 2px; min-width: 2px; }
.range b { top: .2rem; width: .5rem; height: .5rem; margin-left: -.25rem; border-radius: 50%; }
.range u { top: -.2rem; bottom: -.2rem; width: 1px; background: var(--soft); }
.log .range { width: 100%; height: 1.1rem; }
.scale { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem; }
.group { display: grid; gap: 1px; border-left: 1px solid var(--line); }
.group i { height: .5rem; min-width: 1px; border-radius: 0 .2rem .2rem 0; }
.group i, .legend i { background: var(--mark); }
.group .second, .legend .second { background: var(--other); }
.group .third, .legend .third { background: var(--good); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; margin-right: .4rem;
  border-radius: .15rem; }
.range.bad i, .range.bad b { background: var(--bad); }
.heat td.right { --cell: var(--good); } .heat td.strong { color: var(--card); font-weight: 600; }
"""


def page(title: str, subtitle: str, sections: Iterable[Html | None]) -> str:
    """Build the whole document, without the sections that are None."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n{join(sections)}\n'
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: Html | None) -> Html:
    """Put a heading above the `parts` that are not None."""
    return Html(f"<section>\n<h2>{escape(title)}</h2>\n{join(parts)}\n</section>")


def join(parts: Iterable[Html | None]) -> Html:
    """Stack the pieces that are not None vertically."""
    return Html("\n".join(part for part in parts if part is not None))


def paragraph(text: str, style: str = "") -> Html:
    """Build a paragraph; `style` may be "soft", "note", "good" or "bad"."""
    return Html(f'<p class="{escape(style)}">{escape(text)}</p>')


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[str] = (),
    last: Sequence[Html] = (),
) -> Html:
    """Build a table that scrolls sideways if it is too wide; `numeric` columns are right-aligned.

    `last` holds one drawing for each row, for an unnamed last column.
    """
    kinds = [' class="number"' if column in numeric else "" for column in columns]
    head = "".join(
        f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, columns, strict=True)
    )
    lines = [
        "".join(
            f"<td{kind or _words(cell)}>{escape(cell)}</td>"
            for kind, cell in zip(kinds, row, strict=True)
        )
        for row in rows
    ]
    if last:
        head += "<th></th>"
        lines = [f"{line}<td>{drawing}</td>" for line, drawing in zip(lines, last, strict=True)]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return Html(f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>')


def _words(cell: str) -> str:
    return ' class="words"' if len(cell) > _SENTENCE and " " in cell else ""


def commands(*lines: str) -> Html:
    """Show shell commands to copy, one per line."""
    return Html(f'<pre class="commands">{escape(chr(10).join(lines))}</pre>')


def tiles(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Show large numbers side by side: (name, number, small print)."""
    boxes = (
        f'<div class="tile"><span class="soft">{escape(name)}</span>'
        f"<b{_LONG if len(value) > _LARGE else ''}>{escape(value)}</b>"
        f'<span class="soft">{escape(detail)}</span></div>'
        for name, value, detail in entries
    )
    return Html(f'<div class="tiles">{"".join(boxes)}</div>')


def beside(parts: Iterable[Html]) -> Html:
    """Put pieces side by side if the page is wide enough, else stack them."""
    return Html(f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts)}</div>')


def figure(content: Html, caption: str, detail: str) -> Html:
    """Put a chart or a picture above its caption and a second line in small print."""
    return Html(
        f"<figure>{content}<figcaption><b>{escape(caption)}</b>{escape(detail)}</figcaption>"
        "</figure>"
    )


def gallery(figures: Iterable[Html]) -> Html:
    """Show small figures side by side, as many in a row as fit."""
    return Html(f'<div class="gallery">{"".join(figures)}</div>')


def cards(figures: Iterable[Html]) -> Html:
    """Show large figures side by side, as many in a row as fit."""
    return Html(f'<div class="cards">{"".join(figures)}</div>')


def image(pixels: NDArray[np.uint8], description: str) -> Html:
    """Embed (H, W), (H, W, 1) or (H, W, 3) uint8 in [0, 255] as a PNG, enlarged without blur."""
    array = np.asarray(pixels)
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array).save(
        buffer, format="PNG"
    )
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Html(f'<img src="data:image/png;base64,{encoded}" alt="{escape(description)}">')


def heat_map(matrix: NDArray[np.int64], labels: Sequence[str]) -> Html:
    """Show (K, K) counts, row = actual, column = predicted, coloured by their fraction of the row.

    The colour grows with the square root, so that one error among many rows is still visible.
    """
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in labels)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th>{_heat_row(counts, labels, index)}</tr>'
        for index, (label, counts) in enumerate(zip(labels, matrix, strict=True))
    )
    return Html(
        f'<div class="wide"><table class="heat">\n<tr><th></th>{head}</tr>\n{rows}\n</table></div>'
    )


def _heat_row(counts: NDArray[np.int64], labels: Sequence[str], actual: int) -> str:
    total = max(int(counts.sum()), 1)
    cells = []
    for predicted, count in enumerate(counts.tolist()):
        strength = round(100 * (count / total) ** 0.5)
        kind = " ".join(["right"] * (predicted == actual) + ["strong"] * (strength > 60))
        hint = f"{count} of {total} rows of {labels[actual]} were predicted {labels[predicted]}"
        cells.append(
            f'<td class="{kind}" style="--strength:{strength}%" title="{escape(hint)}">'
            f"{count or ''}</td>"
        )
    return "".join(cells)
