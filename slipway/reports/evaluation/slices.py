"""Cuts the test rows into slices: by class, image size and brightness, group, flag, or any column.

A dimension, such as image size, cuts the rows into slices; each row is in at most one of them. Each
category is a slice; numbers and dates are cut at their quartiles. Bounds are rounded before rows
are assigned, so the name of a slice states exactly which rows it has.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from slipway.config.sections import DataParams
from slipway.data.sources.joined import origin_of, source_names
from slipway.data.store.packed import Inputs, PackedManifest, PackedSplit
from slipway.data.tables.raw_columns import RawCells
from slipway.data.texts.scripts import main_script
from slipway.inputs.texts import TextContract, decode_row
from slipway.kinds.registry import kind_of
from slipway.system.errors import IntegrityError

MISSING = "missing"
_QUARTILES = (0.25, 0.5, 0.75)
_MAX_DISTINCT = 8  # distinct numbers; more are cut at their quartiles
_DIGITS = (3, 4, 6, 9, 17)  # significant digits of a bound: the fewest that separate the slices
_MINUTES_PER_DAY = 1440
_BLOCK_ROWS = 256  # inputs read at a time

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Dimension:
    """One way to cut N rows into slices named by `values`."""

    name: str
    values: list[str]
    codes: NDArray[np.int64]  # (N,) index of each row's slice in `values`, -1 for none

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows in each slice, (len(values),)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    @property
    def varies(self) -> bool:
        """True if no slice has all rows."""
        return bool((self.counts < len(self.codes)).all())


def built_in_dimensions(
    test: PackedSplit, manifest: PackedManifest, rows: pa.Table
) -> list[Dimension]:
    """Return the default dimensions that have more than one value.

    Args:
        rows: table with the schema `rows.SPLIT_ROWS` and every test row, in any order.

    Raises:
        IntegrityError: a test row is missing in `rows`.
    """
    rows = _in_order(rows, test.ids)
    several = kind_of(manifest.task).target.several
    found = (_of_labels if several else _of_target)(test, manifest.classes)
    if kind_of(manifest.task).input.has_pixels:
        width, height = (_floats(rows[name]) for name in ("width", "height"))
        found += [by_number("size", width * height, "px")]
        found.append(by_number("aspect", np.round(width / height, 2)))
        found.append(by_number("brightness", brightness(test.inputs)))
    elif isinstance(manifest.input, TextContract):
        found += _of_texts(test.inputs, manifest.input)
    if rows["group"].null_count < len(rows):
        found.append(by_category("group", [text or "" for text in rows["group"].to_pylist()]))
    return [dimension for dimension in [*found, *_flags(rows)] if dimension.varies]


def of_column(cells: RawCells) -> Dimension:
    """Return the dimension of a column of the raw data; its kind decides how it is cut."""
    if cells.kind == "category":
        return by_category(cells.name, [str(text) for text in cells.values], cells.elsewhere)
    numbers = cells.values.astype(np.float64)
    if cells.kind == "boolean":
        words = {0.0: "false", 1.0: "true"}
        return by_category(cells.name, [words.get(number, "") for number in numbers.tolist()])
    return by_date(cells.name, numbers) if cells.kind == "date" else by_number(cells.name, numbers)


def of_sources(data: DataParams, sources: Sequence[str]) -> list[Dimension]:
    """Return the dimension of the joined sources, if there are several; else []."""
    if data.sources is None:
        return []
    names = source_names(data)
    found = by_category("source", [origin_of(source, names) for source in sources])
    return [found] if found.varies else []


def by_category(name: str, texts: Sequence[str], elsewhere: Sequence[str] = ()) -> Dimension:
    """Make each text a slice, in alphabetical order; "" is a missing value.

    Each text of `elsewhere`, which only other rows have, is a slice without rows.
    """
    named = np.array([text or MISSING for text in [*texts, *elsewhere]], object).astype(str)
    values, codes = np.unique(named, return_inverse=True)
    return Dimension(name, values.tolist(), codes[: len(texts)].astype(np.int64))


def by_number(name: str, numbers: ArrayLike, unit: str = "") -> Dimension:
    """Make a slice of each distinct number (N,) if there are few, else cut at the quartiles.

    NaN stands for a missing value.
    """
    values = np.asarray(numbers, dtype=np.float64)

    def write(value: float) -> str:
        return f"{value:,.12g} {unit}".rstrip()

    distinct = np.unique(values[~np.isnan(values)])
    if len(distinct) <= _MAX_DISTINCT:
        return _with_missing(
            name, [write(value) for value in distinct], np.searchsorted(distinct, values), values
        )
    roundings = [_rounding(digits) for digits in _DIGITS]
    return _at_quartiles(name, values, roundings, write, "below")


def by_date(name: str, days: ArrayLike) -> Dimension:
    """Cut days since 1970 UTC (N,) at their quartiles; NaN is missing.

    Bounds are whole days, or minutes if all dates are within a few days.
    """
    values = np.asarray(days, dtype=np.float64)
    return _at_quartiles(
        name,
        values,
        [np.floor, lambda bounds: np.floor(bounds * _MINUTES_PER_DAY) / _MINUTES_PER_DAY],
        _date,
        "before",
    )


def brightness(images: Inputs, most: int | None = None) -> Numbers:
    """Return the mean pixel of each image (N, ...) uint8, (N,) in [0, 255].

    With `most`, only of the first `most` images.
    """
    end = len(images) if most is None else min(most, len(images))
    means = []
    for start in range(0, end, _BLOCK_ROWS):
        block = np.asarray(images[start : min(start + _BLOCK_ROWS, end)])
        means.append(block.reshape(len(block), -1).mean(axis=1))
    return np.concatenate(means)


def _in_order(rows: pa.Table, ids: Sequence[str]) -> pa.Table:
    places = pc.index_in(pa.array(ids), rows["id"].combine_chunks())
    if places.null_count:
        raise IntegrityError(
            f"{places.null_count} of {len(ids)} packed test rows are not in "
            "data/split/rows.parquet. Run `dvc repro --force precompute`."
        )
    return rows.take(places)


def _of_target(test: PackedSplit, classes: list[str]) -> list[Dimension]:
    if classes:
        return [Dimension("class", classes, test.targets.astype(np.int64))]
    return [by_number("target", test.targets)]


def _of_labels(test: PackedSplit, labels: list[str]) -> list[Dimension]:
    """Make a dimension for each label, with one slice, and a dimension for the number of labels."""
    own = [
        Dimension("label", [label], np.where(test.targets[:, place] > 0, 0, -1).astype(np.int64))
        for place, label in enumerate(labels)
    ]
    return [*own, by_number("labels", test.targets.sum(axis=1, dtype=np.float64))]


def _of_texts(inputs: Inputs, contract: TextContract) -> list[Dimension]:
    """Cut texts by the length that the network sees, and by the script of most letters."""
    unit = "tokens" if contract.tokenizer else "bytes"
    lengths, scripts = [], []
    for start in range(0, len(inputs), _BLOCK_ROWS):
        block = np.asarray(inputs[start : start + _BLOCK_ROWS])
        lengths.append(np.count_nonzero(block, axis=1))
        scripts += [main_script(decode_row(row, contract, mark="")) for row in block]
    return [by_number("length", np.concatenate(lengths), unit), by_category("script", scripts)]


def _flags(rows: pa.Table) -> list[Dimension]:
    """Make a dimension of each rule of `clean` that flagged rows; a row may have several flags."""
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
    """Return the quartiles above the smallest value; empty if all values are equal.

    If over three quarters of the values are the smallest, the only bound is the next value.
    """
    distinct = np.unique(values)
    if len(distinct) < 2:
        return distinct[:0]
    # Bounds are values that occur, so that no slice is empty.
    bounds = np.unique(np.quantile(values, _QUARTILES, method="higher"))
    bounds = bounds[bounds > distinct[0]]
    return bounds if len(bounds) else distinct[1:2]


def _with_missing(name: str, names: list[str], codes: ArrayLike, values: Numbers) -> Dimension:
    """Give NaN its own slice, after all others."""
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
