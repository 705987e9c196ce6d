"""Splitting: train, val and test as a pure function of the content and the seed, never of the order of rows, names or machines.

One of three ways: the user's own split (rows have `given_split`), by time (rows have `time`), else by a hash of each unit's key.
docs/split.md has the laws. A split that is empty, or a class that it lacks, is refused. If the user's own split has no val or no test,
it is cut from train; val is its latest rows if rows have `time`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import SplitParams
from slipway.data.engine.rows import PURGED, SPLIT_ROWS, SPLITS
from slipway.data.splits.assignment import assign_exact, assign_stable
from slipway.data.splits.leakage import Leaks, check_leaks, find_leaks
from slipway.data.splits.time_order import assign_by_time, cut_val_by_time, latest_parts
from slipway.data.splits.units import Int, Units, find_units
from slipway.system.errors import DataError

Way = Literal["given", "time", "stable", "exact"]
_VAL, _TEST = SPLITS.index("val"), SPLITS.index("test")
_MAX_SHOWN = 5
_OTHER_SPLIT = "To let Slipway split, set data.split_column to null, or data.split_folders to pool where folders or shards give the split."


@dataclass(frozen=True)
class Split:
    """The rows with their splits, the purged rows, and the leaks found."""

    way: Way
    rows: pa.Table  # `rows.SPLIT_ROWS`, by id
    purged: pa.Table  # `rows.PURGED`, by id; empty unless by time, or val is cut by time
    leaks: Leaks
    shares: (
        tuple[float, float, float] | None
    )  # asked for; None where the user's own split or fixed times decide
    unit_sizes: Int  # rows of each unit
    cut: tuple[str, ...] = ()  # the splits that the user's own split lacks, cut from train
    cut_by_time: bool = False  # `cut` is val, the latest rows of train

    @property
    def has_classes(self) -> bool:
        """False for a numeric target."""
        return bool(self.rows["label"].null_count == 0)


def split_rows(rows: pa.Table, params: SplitParams, seed: int) -> Split:
    """Split `rows.ROWS`; DataError for an empty split or class, or a leak that is not allowed."""
    rows = rows.sort_by([("id", "ascending"), ("source", "ascending")])
    units, way = find_units(rows, seed), _way(rows, params)
    if way == "given":
        check_given(params)
    parts, folds = _parts(rows, units, way, params, seed)
    reaches = _reaches(rows, units, parts, way)
    kept = pa.array(parts == reaches)
    table = _with_columns(rows, {"split": _names(parts), "fold": folds}).filter(kept)
    leaks = find_leaks(table)
    table = _with_columns(table, {"leaked": pa.array(leaks.rows)}).cast(SPLIT_ROWS)
    cut = tuple(SPLITS[part] for part in _missing_parts(rows)) if way == "given" else ()
    by_time = way == "given" and _is_cut_by_time(rows)
    purged = _purged(rows, parts, reaches)
    split = Split(way, table, purged, leaks, _shares(way, params), units.sizes, cut, by_time)
    check_complete(split)
    if way != "given" or params.on_leak == "fail":  # auto: only what the user gave may leak
        check_leaks(leaks, is_own_split=way == "given")
    return split


def check_given(params: SplitParams) -> None:
    """DataError for folds or time cuts beside a given split, where they have no effect."""
    problems = []
    if params.folds:
        problems.append(
            f"split.folds is {params.folds}, but the given split already says which rows are val. {_OTHER_SPLIT} Or set split.folds to null."
        )
    if params.time_cuts is not None:
        problems.append(
            f"split.time_cuts is {params.time_cuts}, but the given split already says where val "
            f"and test begin. {_OTHER_SPLIT} Or set split.time_cuts to null."
        )
    if problems:
        raise DataError("\n".join(problems))


def check_columns(rows: pa.Table, split_column: str | None, time_column: str | None) -> None:
    """DataError if a requested split or time column is empty in all rows."""
    asked = {
        "given_split": ("data.split_column", split_column),
        "time": ("data.time_column", time_column),
    }
    problems = [
        f"  {key} is {name!r}, but no row has a value there"
        for column, (key, name) in asked.items()
        if name is not None and rows[column].null_count == rows.num_rows
    ]
    if problems:
        raise DataError(
            "columns that decide the split are empty:\n"
            + "\n".join(problems)
            + "\nFill them in, or set the key to null."
        )


def count_classes(table: pa.Table) -> dict[str, list[int]]:
    """Count rows of each class in train, val and test; empty for a numeric target."""
    counted = table.group_by(["label", "split"]).aggregate([([], "count_all")]).to_pylist()
    counts: dict[str, list[int]] = {}
    for entry in sorted(
        (entry for entry in counted if entry["label"] is not None),
        key=lambda entry: str(entry["label"]),
    ):
        counts.setdefault(entry["label"], [0] * len(SPLITS))[SPLITS.index(entry["split"])] = entry[
            "count_all"
        ]
    return counts


def count_rows(table: pa.Table) -> dict[str, int]:
    """Count the rows of train, val and test."""
    return {split: int(pc.sum(pc.equal(table["split"], split)).as_py() or 0) for split in SPLITS}


def check_complete(split: Split) -> None:
    """DataError if a split is empty or lacks a class that it needs."""
    counts = count_rows(split.rows)
    if missing := [name for name, count in counts.items() if not count]:
        purged = f", and {split.purged.num_rows} were purged" if split.purged.num_rows else ""
        largest = split.unit_sizes.max(initial=0)
        units = (
            f" The largest group or chain of near duplicates has {largest} rows, which stay together."
            if largest > 1
            else ""
        )
        raise DataError(
            f"split {', '.join(missing)} is empty: {split.rows.num_rows} rows became {counts}{purged}.{units} {_remedy(split)}"
        )
    classes = count_classes(split.rows)
    needed = SPLITS if split.way in ("stable", "exact") else SPLITS[:1]
    short = {label: found for label, found in classes.items() if not all(found[: len(needed)])}
    if short:
        shown = [
            f"  {label!r}: "
            + ", ".join(f"{name} {count}" for name, count in zip(SPLITS, found, strict=True))
            for label, found in list(short.items())[:_MAX_SHOWN]
        ] + ["  ..."] * (len(short) > _MAX_SHOWN)
        where = "a split" if len(needed) > 1 else "train"
        raise DataError(
            f"{len(short)} of {len(classes)} classes lack rows in {where}:\n"
            + "\n".join(shown)
            + f"\n{_remedy(split)}"
        )


def _way(rows: pa.Table, params: SplitParams) -> Way:
    if rows["given_split"].null_count < rows.num_rows:
        return "given"
    return "time" if rows["time"].null_count < rows.num_rows else params.assignment


def _parts(
    rows: pa.Table, units: Units, way: Way, params: SplitParams, seed: int
) -> tuple[Int, pa.Array]:
    """(N,) the index of each row's split, and its fold."""
    no_folds = pa.nulls(rows.num_rows, pa.int32())
    if way == "given":
        return _with_cuts(rows, units, params, seed), no_folds
    if way == "time":
        return assign_by_time(rows, params), no_folds
    parts = _assign(rows, units, way, (params.train, params.val, params.test), seed, "split")
    if not params.folds:
        return parts, no_folds
    learnt = parts != _TEST
    folds = np.full(len(parts), -1)
    shares = [1 / params.folds] * params.folds
    folds[learnt] = _assign(
        rows.filter(pa.array(learnt)), units.select(learnt), way, shares, seed, "fold"
    )
    parts = np.where(learnt, (folds == params.fold).astype(np.int64), parts)
    return parts, pa.array(folds.astype(np.int32), mask=~learnt)


def _assign(
    rows: pa.Table,
    units: Units,
    way: Way,
    shares: tuple[float, ...] | list[float],
    seed: int,
    stream: str,
) -> Int:
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    return (
        assign_stable(units, shares, seed, stream)
        if way == "stable"
        else assign_exact(rows, units, shares, seed, stream)
    )


def _given(rows: pa.Table) -> Int:
    parts = pc.index_in(rows["given_split"].combine_chunks(), pa.array(SPLITS))
    wrong = rows.filter(pc.is_null(parts))
    if wrong.num_rows:
        lines = [
            f"  {row['source']}: {row['given_split']!r}"
            for row in wrong.slice(0, _MAX_SHOWN).to_pylist()
        ]
        raise DataError(
            f"{wrong.num_rows} of {rows.num_rows} rows have no split of your own in data.split_column, expected train, val or test "
            "in every row:\n" + "\n".join(lines) + f"\nFill them in. {_OTHER_SPLIT}"
        )
    found: Int = parts.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _missing_parts(rows: pa.Table) -> list[int]:
    """Return the split without rows, val or test, that is cut from train."""
    given = _given(rows)
    missing = [part for part in range(1, len(SPLITS)) if not (given == part).any()]
    return missing if len(missing) == 1 and (given == 0).any() else []


def _is_cut_by_time(rows: pa.Table) -> bool:
    """True if a given split lacks only val and rows have times: val is the latest of train."""
    return rows["time"].null_count < rows.num_rows and _missing_parts(rows) == [_VAL]


def _reaches(rows: pa.Table, units: Units, parts: Int, way: Way) -> Int:
    """(N,) the latest split that each row's unit reaches across cuts in time."""
    if way == "time":
        return latest_parts(units, parts)
    reaches = parts.copy()
    if way == "given" and _is_cut_by_time(rows):
        learnt = _given(rows) == 0
        reaches[learnt] = latest_parts(units.select(learnt), parts[learnt])
    return reaches


def _with_cuts(rows: pa.Table, units: Units, params: SplitParams, seed: int) -> Int:
    """(N,) the given split of each row; a missing split is cut from the rows of train."""
    parts = _given(rows)
    if _is_cut_by_time(rows):
        learnt = parts == 0
        parts[learnt] = cut_val_by_time(rows.filter(pa.array(learnt)), params)
        return parts
    for missing in _missing_parts(rows):
        learnt = parts == 0
        share = params.val if missing != _TEST else params.test
        shares = [params.train / (params.train + share), share / (params.train + share)]
        cut = _assign(
            rows.filter(pa.array(learnt)),
            units.select(learnt),
            params.assignment,
            shares,
            seed,
            "split",
        )
        parts[learnt] = np.minimum(cut, 1) * missing
    return parts


def _names(parts: Int) -> pa.Array:
    return pa.array(SPLITS).take(pa.array(parts))


def _with_columns(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def _purged(rows: pa.Table, parts: Int, reaches: Int) -> pa.Table:
    table = _with_columns(rows, {"split": _names(parts), "reaches": _names(reaches)})
    return table.filter(pa.array(parts < reaches)).cast(PURGED)


def _shares(way: Way, params: SplitParams) -> tuple[float, float, float] | None:
    """Return the requested fractions of train, val and test; folds replace train and val."""
    if way == "given" or (way == "time" and params.time_cuts is not None):
        return None
    if params.folds and way != "time":
        learnt = 1 - params.test
        return learnt * (1 - 1 / params.folds), learnt / params.folds, params.test
    return params.train, params.val, params.test


def _remedy(split: Split) -> str:
    if split.way == "given":
        return f"Change the given split. {_OTHER_SPLIT}"
    if split.way == "time":
        return "Move split.time_cuts or the shares, use finer groups (a group that reaches a later split leaves the earlier), or add data."
    assert split.shares is not None
    enough = f"With split.assignment exact and {_enough(split.shares)} rows (or groups) of a class it is in every split, for these shares"
    if split.way == "stable":
        return (
            f"The assignment is stable, which meets the shares on average only. {enough}. Set split.assignment to exact, add data, "
            "merge the class into another, or change the shares in params.yaml's section split."
        )
    return f"{enough}. Add data, merge the class into another, remove it, or change the shares in params.yaml's section split."


def _enough(shares: tuple[float, float, float]) -> int:
    """Return the number of rows of which even the smallest fraction is one."""
    return math.ceil(1 / min(shares) - 1e-9)
