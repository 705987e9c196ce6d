"""Slices of the test rows: by class, by size and brightness of an image, by group, by flag, and by any column the user names.

A dimension cuts the rows into slices; each row is in one of them at most. Categories are slices as they are, numbers and dates are cut at
their quartiles, and the bounds are rounded before rows are sorted in, so that a slice's name says exactly which rows are inside.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from slipway.data.store.packed import Inputs, PackedManifest, PackedSplit
from slipway.data.tables.raw_columns import RawCells
from slipway.kinds.registry import is_table
from slipway.system.errors import IntegrityError

MISSING = "missing"
_QUARTILES = (0.25, 0.5, 0.75)
_MOST_DISTINCT = 8  # numbers that are slices of their own; more are cut at their quartiles
_DIGITS = (3, 4, 6, 9, 17)  # significant ones of a bound: as few as keep the slices apart
_MINUTES_PER_DAY = 1440
_BLOCK_ROWS = 256  # of pixels, whose mean is taken at a time

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Dimension:
    """One way to cut N rows: `codes` (N,) int64 is the place of each row's slice in `values`, -1 for a row that is in none."""

    name: str
    values: list[str]
    codes: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """(len(values),) the rows of each slice."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @property
    def varies(self) -> bool:
        """Whether any slice is less than all rows."""
        return bool((self.counts < len(self.codes)).all())


def built_in_dimensions(
    test: PackedSplit, manifest: PackedManifest, rows: pa.Table
) -> list[Dimension]:
    """All that can be told without the user, but those that do not vary. `rows` (`rows.SPLIT_ROWS`) hold every test row, in any order.

    IntegrityError if a test row is not among them.
    """
    rows = _in_order(rows, test.ids)
    found = [_of_target(test, manifest.classes)]
    if not is_table(manifest.task):
        width, height = (_floats(rows[name]) for name in ("width", "height"))
        found += [by_number("size", width * height, "px"), by_number("aspect", width / height)]
        found.append(by_number("brightness", brightness(test.inputs)))
    if rows["group"].null_count < len(rows):
        found.append(by_category("group", [text or "" for text in rows["group"].to_pylist()]))
    return [dimension for dimension in [*found, *_flags(rows)] if dimension.varies]


def of_column(cells: RawCells) -> Dimension:
    """A column of the user's, by its kind."""
    if cells.kind == "category":
        return by_category(cells.name, [str(text) for text in cells.values])
    numbers = cells.values.astype(np.float64)
    if cells.kind == "boolean":
        return by_category(
            cells.name, [{0.0: "false", 1.0: "true"}.get(number, "") for number in numbers.tolist()]
        )
    return by_date(cells.name, numbers) if cells.kind == "date" else by_number(cells.name, numbers)


def by_category(name: str, texts: Sequence[str]) -> Dimension:
    """Each text is a slice, in the order of the alphabet; "" is a missing one."""
    values, codes = np.unique(
        np.array([text or MISSING for text in texts], object).astype(str), return_inverse=True
    )
    return Dimension(name, values.tolist(), codes.astype(np.int64))


def by_number(name: str, numbers: ArrayLike, unit: str = "") -> Dimension:
    """Few distinct numbers (N,) are slices as they are, others are cut at their quartiles; NaN is a missing one."""
    values = np.asarray(numbers, dtype=np.float64)

    def write(value: float) -> str:
        return f"{value:,.12g} {unit}".rstrip()

    distinct = np.unique(values[~np.isnan(values)])
    if len(distinct) <= _MOST_DISTINCT:
        return _with_missing(
            name, [write(value) for value in distinct], np.searchsorted(distinct, values), values
        )
    roundings = [_rounding(digits) for digits in _DIGITS]
    return _at_quartiles(name, values, roundings, write, "below")


def by_date(name: str, days: ArrayLike) -> Dimension:
    """Days since 1970 UTC (N,), cut at their quartiles on whole days, or minutes where all is within a few days; NaN is a missing one."""
    values = np.asarray(days, dtype=np.float64)
    return _at_quartiles(
        name,
        values,
        [np.floor, lambda bounds: np.floor(bounds * _MINUTES_PER_DAY) / _MINUTES_PER_DAY],
        _date,
        "before",
    )


def brightness(images: Inputs) -> Numbers:
    """(N, ...) uint8 pixels -> (N,) their mean, in [0, 255]."""
    starts = range(0, len(images), _BLOCK_ROWS)
    blocks = [np.asarray(images[start : start + _BLOCK_ROWS]) for start in starts]
    return np.concatenate([block.reshape(len(block), -1).mean(axis=1) for block in blocks])


def _in_order(rows: pa.Table, ids: Sequence[str]) -> pa.Table:
    places = pc.index_in(pa.array(ids), rows["id"].combine_chunks())
    if places.null_count:
        raise IntegrityError(
            f"{places.null_count} of {len(ids)} packed test rows are not in data/split/rows.parquet. Run `dvc repro --force precompute`."
        )
    return rows.take(places)


def _of_target(test: PackedSplit, classes: list[str]) -> Dimension:
    return (
        Dimension("class", classes, test.targets.astype(np.int64))
        if classes
        else by_number("target", test.targets)
    )


def _flags(rows: pa.Table) -> list[Dimension]:
    """Rows that a rule of `clean` flagged; a row may have several."""
    flags: list[list[str]] = rows["flags"].to_pylist()
    names = sorted({name for row in flags for name in row})
    return [
        Dimension("flag", [name], np.array([0 if name in row else -1 for row in flags], np.int64))
        for name in names
    ]


def _at_quartiles(
    name: str,
    values: Numbers,
    roundings: Sequence[Callable[[Numbers], Numbers]],
    write: Callable[[float], str],
    below: str,
) -> Dimension:
    bounds = _quartiles(values[~np.isnan(values)])
    for rounded in roundings:
        kept = np.unique(rounded(bounds))
        codes = np.searchsorted(kept, values, side="right")
        if len(np.unique(codes[~np.isnan(values)])) == len(bounds) + 1:
            break
    written = [write(bound) for bound in kept]
    between = [f"{low} to {below} {high}" for low, high in itertools.pairwise(written)]
    names = [f"{below} {written[0]}", *between, f"from {written[-1]}"] if written else ["all"]
    return _with_missing(name, names, codes, values)


def _quartiles(values: Numbers) -> Numbers:
    """Those above the smallest value; where more than three quarters are the smallest, the next one. Empty where all are equal."""
    distinct = np.unique(values)
    if len(distinct) < 2:
        return distinct[:0]
    bounds = np.unique(
        np.quantile(values, _QUARTILES, method="higher")
    )  # values that are there, so that no slice is empty
    bounds = bounds[bounds > distinct[0]]
    return bounds if len(bounds) else distinct[1:2]


def _with_missing(name: str, names: list[str], codes: ArrayLike, values: Numbers) -> Dimension:
    """NaN is sorted in behind all others, and has a slice of its own."""
    missing = np.isnan(values)
    placed = np.where(missing, len(names), codes).astype(np.int64)
    return Dimension(name, [*names, MISSING] if missing.any() else names, placed)


def _rounding(digits: int) -> Callable[[Numbers], Numbers]:
    return lambda bounds: np.array([float(f"{bound:.{digits}g}") for bound in bounds], np.float64)


def _date(days: float) -> str:
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
            minutes=round(days * _MINUTES_PER_DAY)
        )
    except OverflowError:
        return f"{days:,.12g} days since 1970"
    return (
        moment.date().isoformat() if days == np.floor(days) else moment.strftime("%Y-%m-%d %H:%M")
    )


def _floats(column: pa.ChunkedArray) -> Numbers:
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
