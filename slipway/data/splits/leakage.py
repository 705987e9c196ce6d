"""Finds leakage: content that several splits share, or rows not later than the training rows.

The search reads the finished table, whatever method split it. The check is independent: it shares
no code with the splitting.
"""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.rows import SPLITS
from slipway.system.errors import DataError

COLUMNS = {
    "id": "the same id",
    "sha256": "the same content",
    "group": "the same group",
    "cluster": "near duplicates",
}
_MAX_SHOWN = 5


@dataclass(frozen=True)
class Overlap:
    """The number of distinct values that two splits share in a column, and the first few."""

    values: int
    examples: list[str]


@dataclass(frozen=True)
class TimeOrder:
    """The order in time of two splits; `rows_not_later` counts violations."""

    latest_before: float
    earliest_after: float
    rows_not_later: int


@dataclass(frozen=True)
class Leaks:
    """The leaks by pair of splits ("train/test"): shared values by column, and order in time."""

    shared: dict[str, dict[str, Overlap]]  # column -> pair -> overlap
    time: dict[str, TimeOrder]  # pair -> order; empty if rows have no time
    rows: NDArray[np.bool_]  # (N,) rows of val and test that are leaked

    @property
    def found(self) -> bool:
        """True if there is any leak."""
        overlaps = [overlap for pairs in self.shared.values() for overlap in pairs.values()]
        return any(overlap.values for overlap in overlaps) or any(
            order.rows_not_later for order in self.time.values()
        )


def find_leaks(table: pa.Table) -> Leaks:
    """Return the leaks in a table with the columns of SPLIT_ROWS, except `leaked`."""
    positions = pc.index_in(table["split"].combine_chunks(), pa.array(SPLITS))
    parts = positions.to_numpy(zero_copy_only=False).astype(np.int64)
    leaked = np.zeros(table.num_rows, np.bool_)
    shared = {}
    for column in COLUMNS:
        shared[column], rows = _overlaps(table[column], parts)
        leaked |= rows
    time: dict[str, TimeOrder] = {}
    if table.num_rows and not table["time"].null_count:
        time, rows = _orders(table["time"].to_numpy(), parts)
        leaked |= rows
    return Leaks(shared, time, leaked & (parts > 0))


def check_leaks(leaks: Leaks, *, is_own_split: bool) -> None:
    """Raise DataError, which lists all leaks. `is_own_split` is True if the user gave the split."""
    if not leaks.found:
        return
    lines = [
        f"  {COLUMNS[column]} in {pair}: {overlap.values} ({', '.join(overlap.examples)})"
        for column, pairs in leaks.shared.items()
        for pair, overlap in pairs.items()
        if overlap.values
    ]
    lines += [
        f"  time order of {pair}: {_describe(pair, order)}"
        for pair, order in leaks.time.items()
        if order.rows_not_later
    ]
    remedy = "Run `dvc repro --force clean split`."
    if is_own_split:
        remedy = (
            "Move these rows, let Slipway split (data.split_column and data.split_file null, or "
            "data.split_folders pool), or set split.on_leak to report: the leaked rows are then "
            "marked, and metrics come with and without them."
        )
    raise DataError(
        f"{leaks.rows.sum()} rows of val and test leak from another split:\n"
        + "\n".join(lines)
        + f"\n{remedy}"
    )


def leak_report(leaks: Leaks) -> dict[str, Any]:
    """Return the leaks as part of `reports/split.json`."""
    found = asdict(leaks)
    num_rows = int(leaks.rows.sum())
    return {"rows": num_rows, "shared": found["shared"], "time_order": found["time"] or None}


def _describe(pair: str, order: TimeOrder) -> str:
    earlier, later = pair.split("/")
    return (
        f"{order.rows_not_later} rows of {later} are not later than "
        f"{earlier}'s latest ({order.latest_before:g})"
    )


def _overlaps(
    column: pa.ChunkedArray, parts: NDArray[np.int64]
) -> tuple[dict[str, Overlap], NDArray[np.bool_]]:
    """Return the values shared by each pair of splits, and a mask (N,) of rows with such values."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    values = encoded.dictionary
    null = len(values)
    index = pc.fill_null(encoded.indices, null).to_numpy(zero_copy_only=False)
    present = np.zeros((len(values) + 1, len(SPLITS)), np.bool_)
    present[index, parts] = True
    present[null] = False
    overlaps = {
        f"{SPLITS[one]}/{SPLITS[other]}": _overlap(values, present[:-1, one] & present[:-1, other])
        for one, other in itertools.combinations(range(len(SPLITS)), 2)
    }
    return overlaps, (present.sum(axis=1) > 1)[index]


def _overlap(values: pa.Array, in_both: NDArray[np.bool_]) -> Overlap:
    found = values.filter(pa.array(in_both))
    return Overlap(len(found), sorted(found.to_pylist())[:_MAX_SHOWN])


def _orders(
    times: NDArray[np.float64], parts: NDArray[np.int64]
) -> tuple[dict[str, TimeOrder], NDArray[np.bool_]]:
    """Return the time order of each pair of splits, and a mask (N,) of rows that violate it."""
    orders: dict[str, TimeOrder] = {}
    leaked = np.zeros(len(times), np.bool_)
    for one, other in itertools.combinations(range(len(SPLITS)), 2):
        before, after = times[parts == one], times[parts == other]
        if len(before) and len(after):
            late = (parts == other) & (times <= before.max())
            orders[f"{SPLITS[one]}/{SPLITS[other]}"] = TimeOrder(
                float(before.max()), float(after.min()), int(late.sum())
            )
            leaked |= late
    return orders, leaked
