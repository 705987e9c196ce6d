"""Builds the sections of `reports/data.html` on the columns of a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.data.tables.target_copies import best_score
from slipway.inputs.columns import Column, ColumnContract, positions_of
from slipway.reports.pages.cells import number_text
from slipway.reports.pages.charts import BarGroup, bar_groups, spark_bars
from slipway.reports.pages.html_page import Html, paragraph, section, table

_MOST_ROWS, _MOST_NUMBERS = 50_000, 20_000_000  # read, from the front
_MOST_COLUMNS = 100
_MOST_SCORES = 20
_NUM_BINS, _MOST_CATEGORIES = 24, 24  # bars of a small histogram
_FREQUENT, _LONGEST = 3, 20  # shown frequent values, and characters of each
_LEAST_FRACTION = 0.01  # smallest fraction of rows with a frequent value


@dataclass(frozen=True)
class ColumnProfile:
    """Statistics of a column over the training rows; texts that do not apply are empty."""

    name: str
    kind: str
    missing: int
    distinct: int  # number of distinct values without missing ones
    bounds: tuple[str, str, str]  # min, median, max
    frequent: str  # values with their fractions of the rows
    bars: list[int]  # rows by bin, or by category
    score: float | None  # how well only this column predicts the target; None if unknown


def column_sections(
    splits: Mapping[str, PackedSplit], manifest: PackedManifest
) -> list[Html | None]:
    """Show a profile of each column, and how well it predicts the target alone."""
    assert isinstance(manifest.input, ColumnContract)
    train, columns = splits["train"], manifest.input.columns[:_MOST_COLUMNS]
    most = min(_MOST_ROWS, _MOST_NUMBERS // manifest.input.shape[0])
    block, targets = np.asarray(train.inputs[:most]), train.target_keys[:most]
    places = positions_of(manifest.input)[: len(columns)]
    profiles = [
        _profile(column, block[:, own], targets, of_classes=bool(manifest.classes))
        for column, own in zip(columns, places, strict=True)
    ]
    return [_columns(profiles, len(targets), len(manifest.input.columns)), _scores(profiles)]


def _columns(profiles: Sequence[ColumnProfile], num_rows: int, num_columns: int) -> Html:
    columns = ["column", "kind", "missing", "distinct", "min", "median", "max", "most frequent"]
    rows = [
        [one.name, one.kind, f"{one.missing:,}", f"{one.distinct:,}", *one.bounds, one.frequent]
        for one in profiles
    ]
    bars = [spark_bars(one.bars, f"distribution of {one.name}") for one in profiles]
    note = f"{num_rows:,} training rows as they are packed; unknown categories count as missing."
    if more := num_columns - len(profiles):
        note += f" {more:,} more columns are not shown."
    return section(
        "Columns", table(columns, rows, numeric=columns[2:7], last=bars), paragraph(note, "note")
    )


def _scores(profiles: Sequence[ColumnProfile]) -> Html | None:
    found = [(one.score, one.name) for one in profiles if one.score is not None]
    if not found:
        return None
    groups = [
        BarGroup(name, {"score": max(score, 0.0)}, f"{score:.3f}")
        for score, name in sorted(found, key=lambda one: (-one[0], one[1]))[:_MOST_SCORES]
    ]
    note = (
        "The prediction of the target by each column alone, leaving out the predicted row, the "
        "best first. 1 is perfect. reports/split.html explains the score."
    )
    drawn = bar_groups(groups, ["score"], "Scores of the columns; reports/split.html has them too")
    return section("Relation with the target", drawn, paragraph(note, "note"))


def _profile(
    column: Column, block: NDArray[np.float32], targets: NDArray[np.float64], *, of_classes: bool
) -> ColumnProfile:
    """Compute the profile of a column from its encoded values, (N, positions of the column)."""
    is_category = column.kind == "category"
    if is_category:
        is_missing = block[:, 0] == 0
    else:
        is_missing = block[:, 1] == 1 if block.shape[1] > 1 else np.zeros(len(block), bool)
    values, counts = np.unique(block[~is_missing, 0], return_counts=True)
    order = np.lexsort((values, -counts))
    cells = pa.array(_original(column, block[:, 0]), mask=is_missing)
    if is_category:
        cells = cells.cast(pa.int64()).cast(pa.string())
    score = best_score(pa.chunked_array([cells]), targets, of_classes=of_classes)
    bounds = ("", "", "")
    if column.kind in ("number", "date") and len(values):
        median = values[np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)]
        low, middle, high = (
            number_text(float(value), column) for value in (values[0], median, values[-1])
        )
        bounds = low, middle, high
    return ColumnProfile(
        name=column.name,
        kind=column.kind,
        missing=int(is_missing.sum()),
        distinct=len(values),
        bounds=bounds,
        frequent=_frequent(column, values[order], counts[order], len(block)),
        bars=_bars(column, values, counts[order] if is_category else counts),
        score=score[0] if score else None,
    )


def _original(column: Column, values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Undo the standardisation, and round off the digits that float32 lost.

    So equal differences between values stay equal.
    """
    numbers = values.astype(np.float64) * column.std + column.mean
    largest = float(np.abs(values).max(initial=1e-6)) * column.std
    digits = -math.ceil(math.log10(largest * np.finfo(np.float32).eps))
    return np.round(numbers, digits)


def _bars(column: Column, values: NDArray[np.float32], counts: NDArray[np.int64]) -> list[int]:
    if column.kind == "category" or len(values) < 2:
        return [int(count) for count in counts[:_MOST_CATEGORIES]]
    sums, _ = np.histogram(values.astype(np.float64), _NUM_BINS, weights=counts)
    return [round(count) for count in sums.tolist()]


def _frequent(
    column: Column, values: NDArray[np.float32], counts: NDArray[np.int64], num_rows: int
) -> str:
    """Format the most frequent values that occur at least twice and in 1 % of the rows."""
    shown = []
    for value, count in zip(values[:_FREQUENT], counts[:_FREQUENT], strict=True):
        if count > 1 and count / num_rows >= _LEAST_FRACTION:
            text = (
                column.categories[int(value) - 1]
                if column.kind == "category"
                else number_text(float(value), column)
            )
            short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
            shown.append(f"{short} {count / num_rows:.1%}")
    return ", ".join(shown)
