"""Formats tables and numbers as plain text, for terminals and logs."""

from collections.abc import Sequence

from slipway.artifacts.bundle import Metric

_LARGEST_IN_FULL = 1e12  # larger numbers are written with an exponent


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Format a table with columns as wide as their widest cell; numbers are right-aligned."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    right = [_is_numeric([row[index] for row in rows]) for index in range(len(columns))]
    return "\n".join(_line(row, widths, right, indent) for row in cells)


def _line(row: list[str], widths: list[int], right: list[bool], indent: str) -> str:
    cells = [
        cell.rjust(width) if flush else cell.ljust(width)
        for cell, width, flush in zip(row, widths, right, strict=True)
    ]
    return (indent + "  ".join(cells)).rstrip()


def _is_numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(
        cell[0].isdigit() or (cell[0] in "-+." and cell[1:2].isdigit()) for cell in filled
    )


def number(value: float) -> str:
    """Format a number with four significant digits, or four decimals for a fraction.

    0.98765 -> "0.9877", 46238.7 -> "46,240", 1e-7 -> "1e-07"
    """
    if 0.001 <= abs(value) <= 1:
        return f"{value:.4f}"
    short = f"{value:.4g}"
    if 10_000 <= abs(float(short)) < _LARGEST_IN_FULL:
        return f"{float(short):,.0f}"
    return "0" if value == 0 else short


def interval(metric: Metric) -> str:
    """Format the bounds of a metric's interval: "0.9741 to 0.9963"."""
    return f"{number(metric.low)} to {number(metric.high)}"


def baseline_cells(metric: Metric, baseline: float | None) -> list[str]:
    """Format the baseline and the signed difference from it; two empty cells without a baseline."""
    return ["", ""] if baseline is None else [number(baseline), f"{metric.value - baseline:+.4g}"]


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that tells them apart: "48 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(num_bytes: int) -> str:
    """Format a number of bytes in the largest unit with a digit before the point: "1.2 MB"."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
