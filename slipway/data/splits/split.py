"""Splits rows into train, val and test, as a pure function of their content and the seed.

The split does not depend on the order of rows, on names or on machines. There are three ways: the
user's own split (rows have `given_split`), by time (rows have `time`), else by a hash of each
unit's key (a unit is a set of rows that must stay together, see `units`); docs/explanation/split.md
has the rules. An empty split, or one that lacks a class, is refused. If the user's split has no val
or no test, the missing split is cut from train. A missing val is cut from the latest rows of train
if rows have `time`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.artifacts.label_sets import set_text
from slipway.config.sections import SplitParams
from slipway.data.engine.label_sets import label_counts, labels_of_rows
from slipway.data.engine.rows import PURGED, SPLIT_ROWS, SPLITS
from slipway.data.splits.assignment import assign_exact, assign_stable
from slipway.data.splits.leakage import Leaks, check_leaks, find_leaks
from slipway.data.splits.time_order import assign_by_time, cut_val_by_time, latest_parts
from slipway.data.splits.units import Int, Units, find_units
from slipway.system.errors import DataError

Way = Literal["given", "time", "stable", "exact"]
_TEST = SPLITS.index("test")
_MAX_SHOWN = 5
_OTHER_SPLIT = (
    "To let Slipway split, set data.split_column and data.split_file to null, "
    "or data.split_folders to pool where folders or shards give the split."
)


@dataclass(frozen=True)
class Split:
    """The rows with their splits, the purged rows, and the leaks found."""

    way: Way
    rows: pa.Table  # `rows.SPLIT_ROWS`, by id
    purged: pa.Table  # `rows.PURGED`, by id; empty unless a cut is by time
    leaks: Leaks
    # Requested value; None if the user's own split or fixed times decide.
    fractions: tuple[float, float, float] | None
    unit_sizes: Int  # rows of each unit
    val_is_cut: bool = False  # from train, because the user's own split holds out only one split
    cut_by_time: bool = False  # val is the latest rows of train
    val_is_test: bool = False  # the user's val became test, because there was no other
    several: bool = False  # labels of rows are sets

    @property
    def has_classes(self) -> bool:
        """True if the target has classes, False if it is numeric."""
        return bool(self.rows["label"].null_count == 0)


@dataclass(frozen=True)
class _Assigned:
    """The split of each row, as an index into SPLITS, before rows are purged."""

    parts: Int  # (N,)
    # (N,) latest split among the rows of the unit: later than `parts` only across a cut by time
    reaches: Int
    folds: pa.Array | None = None
    val_is_cut: bool = False  # see `Split`, as for the next two
    cut_by_time: bool = False
    val_is_test: bool = False


def split_rows(rows: pa.Table, params: SplitParams, seed: int, *, several: bool = False) -> Split:
    """Split rows of the schema ROWS.

    Raises DataError for an empty split or class, or for a leak that is not allowed.
    """
    split = assign_rows(rows, params, seed, several=several)
    check_split(split, params)
    return split


def assign_rows(rows: pa.Table, params: SplitParams, seed: int, *, several: bool = False) -> Split:
    """Split rows of the schema ROWS, without a check that the splits are complete.

    With `several`, the label of a row is a set: exact fractions are met in each set, and in the
    rarest label of sets that have fewer rows than splits need.
    """
    rows = rows.sort_by([("id", "ascending"), ("source", "ascending")])
    units = find_units(rows, seed)
    way = _way(rows, params)
    if way == "given":
        check_given(params)
        assigned = _assign_given(strata(rows, params, several), units, params, seed)
    elif way == "time":
        parts = assign_by_time(rows, params)
        assigned = _Assigned(parts, latest_parts(units, parts))
    else:
        parted = strata(rows, params, several)
        assigned = _assign_by_hash(parted, units, way, params, seed, several=several)

    parts, reaches = assigned.parts, assigned.reaches
    folds = pa.nulls(rows.num_rows, pa.int32()) if assigned.folds is None else assigned.folds
    table = _with_columns(rows, {"split": _names(parts), "fold": folds})
    table = table.filter(pa.array(parts == reaches))
    leaks = find_leaks(table)
    return Split(
        way=way,
        rows=_with_columns(table, {"leaked": pa.array(leaks.rows)}).cast(SPLIT_ROWS),
        purged=_purged(rows, parts, reaches),
        leaks=leaks,
        fractions=_fractions(way, params),
        unit_sizes=units.sizes,
        val_is_cut=assigned.val_is_cut,
        cut_by_time=assigned.cut_by_time,
        val_is_test=assigned.val_is_test,
        several=several,
    )


def check_split(split: Split, params: SplitParams) -> None:
    """Raise DataError for an empty split or class, or for a leak that is not allowed."""
    check_complete(split)
    is_own = split.way == "given"
    if not is_own or params.on_leak == "fail":  # auto: only the user's own split may leak
        check_leaks(split.leaks, is_own_split=is_own)


def check_given(params: SplitParams) -> None:
    """Raise DataError if `params` set folds or time cuts, which a given split would ignore."""
    problems = []
    if params.folds:
        problems.append(
            f"split.folds is {params.folds}, but the given split already says which rows are val. "
            f"{_OTHER_SPLIT} Or set split.folds to null."
        )
    if params.time_cuts is not None:
        problems.append(
            f"split.time_cuts is {params.time_cuts}, but the given split already says where val "
            f"and test begin. {_OTHER_SPLIT} Or set split.time_cuts to null."
        )
    if problems:
        raise DataError("\n".join(problems))


def check_columns(rows: pa.Table, split_column: str | None, time_column: str | None) -> None:
    """Raise DataError if a requested split or time column is empty in every row."""
    problems = [
        f"  data.{key} is {name!r}, but no row has a value there"
        for column, key, name in (
            ("given_split", "split_column", split_column),
            ("time", "time_column", time_column),
        )
        if name is not None and rows[column].null_count == rows.num_rows
    ]
    if problems:
        raise DataError(
            "columns that decide the split are empty:\n"
            + "\n".join(problems)
            + "\nFill them in, or set the key to null."
        )


def strata(rows: pa.Table, params: SplitParams, several: bool) -> pa.Table:
    """Replace each row's label by its stratum, which is its set of labels or its rarest label.

    A set with too few rows for every split joins the rows whose rarest label is the same, the first
    step of iterative stratification (Sechidis, Tsoumakas and Vlahavas 2011, "On the Stratification
    of Multi-label Data").
    """
    if not several or not rows.num_rows:
        return rows
    fewest = math.ceil(1 / min(params.train, params.val, params.test) - 1e-9)
    sets, indices = labels_of_rows(rows["label"])
    counts, by_label = np.bincount(indices, minlength=len(sets)), label_counts(rows["label"])
    names = [
        set_text(labels)
        if counts[place] >= fewest or not labels
        else min(labels, key=lambda label: (by_label[label], label))
        for place, labels in enumerate(sets)
    ]
    return rows.set_column(
        rows.schema.get_field_index("label"), "label", pa.array(names).take(indices)
    )


def count_classes(table: pa.Table, *, several: bool = False) -> dict[str, list[int]]:
    """Return the number of rows of each class in each split; empty for a numeric target.

    With `several`, a row counts for each of its labels.
    """
    if several:
        by_split = [
            label_counts(table["label"].filter(pc.equal(table["split"], split))) for split in SPLITS
        ]
        labels = sorted({label for counts in by_split for label in counts})
        return {label: [counts.get(label, 0) for counts in by_split] for label in labels}
    labelled = table.filter(pc.is_valid(table["label"])).group_by(["label", "split"])
    found = labelled.aggregate([([], "count_all")]).sort_by("label").to_pylist()
    counts = {entry["label"]: [0] * len(SPLITS) for entry in found}
    for entry in found:
        counts[entry["label"]][SPLITS.index(entry["split"])] = entry["count_all"]
    return counts


def count_rows(table: pa.Table) -> dict[str, int]:
    """Return the number of rows in each split."""
    return {split: int(pc.sum(pc.equal(table["split"], split)).as_py() or 0) for split in SPLITS}


def check_complete(split: Split) -> None:
    """Raise DataError if a split is empty, or lacks a class that it must have."""
    counts = count_rows(split.rows)
    if missing := [name for name, count in counts.items() if not count]:
        purged = f", and {split.purged.num_rows} were purged" if split.purged.num_rows else ""
        largest = split.unit_sizes.max(initial=0)
        units = ""
        if largest > 1:
            units = (
                f" The largest group or chain of near duplicates has {largest} rows, "
                "which stay together."
            )
        raise DataError(
            f"split {', '.join(missing)} is empty: {split.rows.num_rows} rows became "
            f"{counts}{purged}.{units} {_remedy(split)}"
        )
    if short := short_classes(split):
        lines = [
            f"  {label!r}: train {train}, val {val}, test {test}"
            for label, (train, val, test) in short.items()
        ]
        if len(lines) > _MAX_SHOWN:
            lines[_MAX_SHOWN:] = ["  ..."]
        where = "a split" if len(_needed(split)) > 1 else "train"
        num_classes = len(count_classes(split.rows, several=split.several))
        raise DataError(
            f"{len(short)} of {num_classes} classes lack rows in {where}:\n"
            + "\n".join(lines)
            + f"\n{_remedy(split)}"
        )


def short_classes(split: Split) -> dict[str, list[int]]:
    """Return the rows in each split of every class that lacks rows where it must have some."""
    num_needed = len(_needed(split))
    classes = count_classes(split.rows, several=split.several)
    return {label: found for label, found in classes.items() if not all(found[:num_needed])}


def _needed(split: Split) -> Sequence[str]:
    """Return the splits that must have every class; a split of the user's or by time may not."""
    return SPLITS if split.way in ("stable", "exact") else SPLITS[:1]


def _way(rows: pa.Table, params: SplitParams) -> Way:
    if rows["given_split"].null_count < rows.num_rows:
        return "given"
    return "time" if rows["time"].null_count < rows.num_rows else params.assignment


def _assign_by_hash(
    rows: pa.Table, units: Units, way: Way, params: SplitParams, seed: int, *, several: bool
) -> _Assigned:
    """Assign each row by the hash of its unit; with folds, val is one of them."""
    fractions = (params.train, params.val, params.test)
    # Of sets of labels a split may lack some, if it has each label.
    parts = _assign(rows, units, way, fractions, seed, "split", is_filled=not several)
    if not params.folds:
        return _Assigned(parts, parts)
    in_folds = parts != _TEST
    folds = np.full(len(parts), -1)
    equal = [1 / params.folds] * params.folds
    chosen = rows.filter(pa.array(in_folds))
    folds[in_folds] = _assign(chosen, units.select(in_folds), way, equal, seed, "fold")
    parts = np.where(in_folds, (folds == params.fold).astype(np.int64), parts)
    return _Assigned(parts, parts, pa.array(folds.astype(np.int32), mask=~in_folds))


def _assign(
    rows: pa.Table,
    units: Units,
    way: Way,
    fractions: Sequence[float],
    seed: int,
    stream: str,
    *,
    is_filled: bool = False,
) -> Int:
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    if way == "stable":
        return assign_stable(units, fractions, seed, stream)
    return assign_exact(rows, units, fractions, seed, stream, is_filled=is_filled)


def _given(rows: pa.Table) -> Int:
    """Return the split that the user gave each row, (N,). Raises DataError if a row has none."""
    parts = pc.index_in(rows["given_split"].combine_chunks(), pa.array(SPLITS))
    wrong = rows.filter(pc.is_null(parts))
    if wrong.num_rows:
        lines = [
            f"  {row['source']}: {row['given_split']!r}"
            for row in wrong.slice(0, _MAX_SHOWN).to_pylist()
        ]
        raise DataError(
            f"{wrong.num_rows} of {rows.num_rows} rows have no split of your own, "
            "expected train, val or test in every row:\n"
            + "\n".join(lines)
            + f"\nFill them in. {_OTHER_SPLIT}"
        )
    return np.asarray(parts.to_numpy(zero_copy_only=False), np.int64)


def _assign_given(rows: pa.Table, units: Units, params: SplitParams, seed: int) -> _Assigned:
    """Take the user's own split. If it holds out one split, that is test; val is cut from train."""
    parts = _given(rows)
    has_train, has_val, has_test = (bool((parts == part).any()) for part in range(len(SPLITS)))
    if not has_train or has_val == has_test:
        return _Assigned(parts, parts)
    if has_val:
        parts[parts == SPLITS.index("val")] = SPLITS.index("test")
    is_training = parts == 0
    training = rows.filter(pa.array(is_training))
    training_units = units.select(is_training)
    by_time = rows["time"].null_count < rows.num_rows
    if by_time:
        is_cut = cut_val_by_time(training, params)
    else:
        total = params.train + params.val
        fractions = [params.train / total, params.val / total]
        is_cut = _assign(training, training_units, params.assignment, fractions, seed, "split")
        is_cut = np.minimum(is_cut, 1)
    parts[is_training] = is_cut * SPLITS.index("val")
    reaches = parts.copy()
    if by_time:
        reaches[is_training] = latest_parts(training_units, parts[is_training])
    return _Assigned(parts, reaches, None, True, by_time, has_val)


def _names(parts: Int) -> pa.Array:
    return pa.array(SPLITS).take(pa.array(parts))


def _with_columns(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def _purged(rows: pa.Table, parts: Int, reaches: Int) -> pa.Table:
    table = _with_columns(rows, {"split": _names(parts), "reaches": _names(reaches)})
    return table.filter(pa.array(parts < reaches)).cast(PURGED)


def _fractions(way: Way, params: SplitParams) -> tuple[float, float, float] | None:
    """Return the fractions of train, val and test that params request; None if they do not apply.

    With folds, train and val follow from the number of folds.
    """
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
        return (
            "Move split.time_cuts or the fractions, use finer groups "
            "(a group that reaches a later split leaves the earlier), or add data."
        )
    assert split.fractions is not None
    enough = len(SPLITS)
    if split.several or split.rows["fold"].null_count < split.rows.num_rows:
        # With so many rows, even the smallest fraction is one row.
        enough = math.ceil(1 / min(split.fractions) - 1e-9)
    exact = (
        f"With split.assignment exact and {enough} different rows (or groups) of a class it is in "
        "every split"
    )
    if split.way == "stable":
        return (
            "The assignment is stable, which meets the fractions on average only. "
            f"{exact}. Set split.assignment to exact, add data, merge the class into another, "
            "or change the fractions in params.yaml's section split."
        )
    return (
        f"{exact}. Add data, merge the class into another, remove it, "
        "or change the fractions in params.yaml's section split."
    )
