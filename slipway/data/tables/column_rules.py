"""Finds columns that cannot be inputs: constants, copies of another column, copies of the target.

A copy of the target is leakage, because the network would only repeat it. It is always dropped and
reported, unless `data.columns` names it as an input.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import RuleParams
from slipway.data.tables.cells import TypedColumn, merges_integers, shown_cell
from slipway.data.tables.targets import Annotations
from slipway.system.files import sha256_bytes

_EXACT = 1e-9  # deviation from an exact line due to rounding, in standard deviations
_ROWS_PER_CLASS = 10  # with fewer rows a column may separate the classes by chance
_MIN_ROWS = 20


def constant_columns(columns: Sequence[TypedColumn], alive: NDArray[np.bool_]) -> dict[str, str]:
    """Return the columns with only one value, with reasons; a missing cell counts as a value."""
    found = {}
    for column in columns:
        keys = column.keys[alive]
        if keys.size and (keys == keys[0]).all():
            found[column.raw.name] = (
                "its integers beyond 2**53 are one number in float64; give it the kind category"
                if column.kind == "number" and merges_integers(column.raw)
                else f"every row has {shown_cell(column.raw, int(np.flatnonzero(alive)[0]))}"
            )
    return found


def duplicate_columns(columns: Sequence[TypedColumn], alive: NDArray[np.bool_]) -> dict[str, str]:
    """Return the columns that equal an earlier column, with reasons."""
    first: dict[tuple[str, str], list[TypedColumn]] = {}
    found = {}
    for column in columns:
        alike = first.setdefault((column.kind, sha256_bytes(column.keys[alive].data)), [])
        twin = next((other for other in alike if _same_cells(column, other, alive)), None)
        if twin is not None:
            found[column.raw.name] = f"equal to {twin.raw.name!r} in every row"
        else:
            alike.append(column)
    return found


def _same_cells(one: TypedColumn, other: TypedColumn, alive: NDArray[np.bool_]) -> bool:
    cells, other_cells = one.cells[alive], other.cells[alive]
    if one.kind == "category":
        return bool((cells == other_cells).all())
    return np.array_equal(cells.astype(float), other_cells.astype(float), equal_nan=True)


def leaking_columns(
    columns: Sequence[TypedColumn], annotations: Annotations, alive: NDArray[np.bool_]
) -> dict[str, str]:
    """Return the columns that equal the target or a linear function of it, with reasons."""
    if alive.sum() < _MIN_ROWS:
        return {}
    if annotations.labels is not None:
        _, classes = np.unique(annotations.labels[alive].astype(str), return_inverse=True)
        copies = [column for column in columns if tells_classes(column.keys[alive], classes)]
        reason = "leakage: its values are other names of the classes"
        return {column.raw.name: reason for column in copies}
    assert annotations.targets is not None
    targets = annotations.targets[alive]
    return {
        column.raw.name: "leakage: it is the target, or an exact linear function of it"
        for column in columns
        if column.kind != "category" and is_line(column.cells[alive].astype(float), targets)
    }


def is_copy(column: TypedColumn, target: TypedColumn, rows: NDArray[np.bool_]) -> bool:
    """Return True if a column repeats the target in each of the (N,) rows, under other names.

    A target of kind category is compared by its classes, a number by an exact line.
    """
    if target.kind == "category":
        _, classes = np.unique(target.keys[rows], return_inverse=True)
        return len(classes) > 0 and tells_classes(column.keys[rows], classes)
    if column.kind == "category":
        return False
    cells, targets = (one.cells[rows].astype(np.float64) for one in (column, target))
    return is_line(cells, targets)


def tells_classes(keys: NDArray[np.int64], classes: NDArray[np.int64]) -> bool:
    """Return True if the values of a column map one to one to the classes.

    `keys` (N,) stand for the values of the rows, `classes` (N,) for their classes.
    """
    num_classes, num_keys = int(classes.max()) + 1, len(np.unique(keys))
    if num_keys != num_classes or num_classes < 2 or len(keys) < num_classes * _ROWS_PER_CLASS:
        return False
    return len(np.unique(keys * num_classes + classes)) == num_classes


def is_line(cells: NDArray[np.float64], targets: NDArray[np.float64]) -> bool:
    """Return True if (N,) targets are an exact linear function of (N,) cells, where both are."""
    present = ~np.isnan(cells) & ~np.isnan(targets)
    if present.sum() < _MIN_ROWS:
        return False
    cells, targets = cells[present], targets[present]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        cells, targets = cells - cells.mean(), targets - targets.mean()
        cells, targets = cells / np.abs(cells).max(), targets / np.abs(targets).max()
        slope = (cells @ targets) / (cells @ cells)
        return bool(np.abs(targets - slope * cells).max() < _EXACT)


class ColumnVerdicts(NamedTuple):
    """The columns that broke a rule, with the reasons."""

    leaking: dict[str, str]  # copies of the target, which are not inputs
    dropped: dict[str, str]  # other columns that are not inputs
    noted: dict[str, str]  # columns that stay inputs


def apply_column_rules(
    columns: Sequence[TypedColumn],
    annotations: Annotations,
    alive: NDArray[np.bool_],
    rules: RuleParams,
    insisted: frozenset[str],
) -> ColumnVerdicts:
    """Find columns that are constant, copy the target, or copy another column.

    A copy of the target whose name is in `insisted` stays an input.
    """
    found = leaking_columns(columns, annotations, alive)
    leaking = {name: reason for name, reason in found.items() if name not in insisted}
    included = "still an input, because data.columns names its kind"
    noted = {name: f"{reason}; {included}" for name, reason in found.items() if name in insisted}
    dropped: dict[str, str] = {}
    for action, find in (
        (rules.constant_column, constant_columns),
        (rules.duplicate_column, duplicate_columns),
    ):
        if action is not None:
            left = [column for column in columns if column.raw.name not in leaking | dropped]
            found = find(left, alive)
            if action == "refuse":
                dropped |= found
            else:
                noted = found | noted  # the note of leakage takes precedence
    return ColumnVerdicts(leaking, dropped, noted)
