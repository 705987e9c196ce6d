"""Finds rows of a table that are equal in every column, or only in their inputs.

Two rows of a table that are equal in every column may be two real cases, such as two passengers
with the same data: they are kept, and stay in one split. They are copies if they also repeat an id,
which no two cases share. Rows with equal inputs only are treated like near duplicates of images:
they may be valid repetitions, but they must stay in one split.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import RuleParams
from slipway.data.engine.scratch import (
    each_true,
    first_equal_rows,
    key_slices,
    order_by,
    scratch_array,
    slices,
    take,
    true_rows,
)
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.data.sources.raw_tables import RawColumn
from slipway.data.sources.shards import MAX_SHOWN, listed
from slipway.data.tables.cells import GOOD, is_missing, typed_column
from slipway.data.tables.column_types import infer
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.targets import Annotations, CellTexts

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_ID_NAME = re.compile(r"(?i:(.*[^a-z])?(id|uuid|guid))|.*[a-z](Id|ID)")


def refuse_duplicates(
    digests: NDArray[np.uint8],
    rows: NDArray[np.int64],
    ledger: Ledger,
    given_splits: CellTexts | NDArray[np.object_] | None = None,
) -> None:
    """Keep the first of the `rows` with equal `digests`, and refuse the others as duplicates."""
    for group in _groups(digests.view(np.uint64)[:, 0], lambda index: digests[index].tobytes()):
        first, *others = (int(rows[index]) for index in group)
        details = ((row, _copy_of(first, row, ledger, given_splits)) for row in others)
        ledger.apply("refuse", "exact_duplicate", details)


def _copy_of(
    first: int, row: int, ledger: Ledger, given_splits: CellTexts | NDArray[np.object_] | None
) -> str:
    detail = f"the same row as {ledger.source(first)}"
    if given_splits is not None and given_splits[row] != given_splits[first]:
        detail += f"{IN_ANOTHER_SPLIT}{given_splits[first]}"
    return detail


def apply_duplicate_rules(
    digests: NDArray[np.uint8],
    rows: NDArray[np.int64],
    columns: Sequence[RawColumn],
    rules: RuleParams,
    ledger: Ledger,
    given_splits: CellTexts | NDArray[np.object_] | None = None,
) -> None:
    """Refuse rows that repeat an id, and apply `duplicate_row` to the other rows that are equal.

    Args:
        digests: (R, 32) of all cells of the `rows`, (R,), which no rule has refused so far.
        columns: those that may hold the ids of rows.
    """
    firsts = first_equal_rows(digests.view(np.uint64)[:, :2])
    is_repeat = scratch_array((len(firsts),), np.bool_)
    for part in slices(len(firsts)):
        is_repeat[part] = firsts[part] != np.arange(part.start, part.stop)
    if not is_repeat.any():
        return
    for column in columns:
        copies = _copies_by_id(column, rows, firsts, is_repeat)
        for index in each_true(copies):
            first, row = int(rows[firsts[index]]), int(rows[index])
            detail = _copy_of(first, row, ledger, given_splits)
            ledger.apply("refuse", "exact_duplicate", [(row, f"{column.name!r} repeats: {detail}")])
        if copies.any():
            break
    if rules.duplicate_row is None:
        return
    for group in _groups(digests.view(np.uint64)[:, 0], lambda index: digests[index].tobytes()):
        equal = [row for row in rows[group].tolist() if ledger.alive[row]]
        details: dict[int, str] = {}
        if rules.duplicate_row == "refuse":
            details = {row: _copy_of(equal[0], row, ledger, given_splits) for row in equal[1:]}
        elif len(equal) > 1:
            named = _others(equal, ledger)
            details = {row: f"the same row as {others}" for row, others in named.items()}
        ledger.apply(rules.duplicate_row, "duplicate_row", details.items())


def _copies_by_id(
    column: RawColumn,
    rows: NDArray[np.int64],
    firsts: NDArray[np.int64],
    is_repeat: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return a mask (R,) of the rows that repeat an earlier row and its id.

    The mask is empty if the column has no ids: if a cell is missing, two rows that are no copies
    have the same, or nothing but this difference suggests ids (see `_are_ids`).
    """
    none = np.zeros(0, np.bool_)
    if len(column.values) < len(rows) - np.count_nonzero(is_repeat):
        return none
    copies = scratch_array((len(rows),), np.bool_)
    is_used = scratch_array((len(column.values) + 1,), np.bool_)  # the last is for missing cells
    is_used[:] = False
    for part in slices(len(rows)):
        codes = column.codes[rows[part]]
        copies[part] = is_repeat[part] & (codes == column.codes[rows[firsts[part]]])
        is_used[codes[~copies[part]]] = True
    num_own = len(rows) - np.count_nonzero(copies)
    if np.count_nonzero(is_used[:-1]) < num_own or is_used[-1]:
        return none
    own = take(column.codes, take(rows, true_rows(~copies)))
    return copies if _are_ids(replace(column, codes=own), len(rows)) else none


def _are_ids(column: RawColumn, num_rows: int) -> bool:
    """Return True for a column of different cells that is named like ids, or is no input as such.

    The latter are texts that nearly all differ, and numbers that count the rows. If most of all
    `num_rows` repeat others, such a column is no evidence.
    """
    if column.stored not in ("number", "text") or is_missing(column)[column.codes].any():
        return False
    if _ID_NAME.fullmatch(column.name) is None:
        return 2 * len(column.codes) >= num_rows and infer(column).kind == "ignore"
    typed = typed_column(column, "number")
    numbers = np.asarray(typed.values[typed.states == GOOD], np.float64)
    return bool((numbers == np.floor(numbers)).all())


def apply_equal_input_rules(
    inputs: Sequence[NDArray[np.int64]],
    annotations: Annotations,
    digests: NDArray[np.uint8],
    rules: RuleParams,
    ledger: Ledger,
) -> NDArray[np.int64]:
    """Apply the rules for rows with equal inputs.

    Returns for each flagged row the first of the rows with equal inputs, (N,), and -1 for other
    rows.
    """
    rows = true_rows(ledger.alive)
    matrix = scratch_array((len(rows), len(inputs)), np.int64)
    for part in slices(len(rows)):
        matrix[part] = np.stack([keys[rows[part]] for keys in inputs], axis=1)
    clusters = scratch_array((len(ledger.alive),), np.int64)
    clusters[:] = -1
    for group in _groups(_mixed(matrix), lambda index: matrix[index].tobytes()):
        equal = [int(rows[index]) for index in group]
        equal.sort(key=lambda row: digests[row].tobytes())
        _apply_conflict_rule(equal, annotations, rules, ledger)
        left = [row for row in equal if ledger.alive[row]]
        if len(left) < 2 or rules.near_duplicate is None:
            continue
        first, *others = left
        is_flag = rules.near_duplicate == "flag"
        named = (
            _others(sorted(left), ledger)
            if is_flag
            else dict.fromkeys(others, ledger.source(first))
        )
        details = ((row, f"the same inputs as {found}") for row, found in named.items())
        ledger.apply(rules.near_duplicate, "near_duplicate", details)
        if is_flag:
            clusters[left] = first
    return clusters


def _apply_conflict_rule(
    rows: list[int], annotations: Annotations, rules: RuleParams, ledger: Ledger
) -> None:
    has_classes = annotations.labels is not None
    targets = annotations.labels if has_classes else annotations.targets
    assert targets is not None
    found = sorted({targets[row] for row in rows})
    if len(found) > 1:
        rule = "conflicting_label" if has_classes else "conflicting_target"
        shown = listed([str(target) for target in found])
        detail = f"the same inputs with {shown}: rows {_named(sorted(rows), ledger)}"
        ledger.apply(rules.conflicting_label, rule, ((row, detail) for row in rows))


def number_equal_rows(
    order: NDArray[np.int64], digests: NDArray[np.uint8], annotations: Annotations
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count equal rows by their targets, then by their weights.

    `order` (R,) are row numbers in the order of the rows' digests (N, 32). Returns them again, with
    equal rows in the order in which they are counted, and the number of each from 1. So the numbers
    do not depend on the order of the rows in the file.
    """
    counted, numbers = (scratch_array((len(order),), np.int64) for _ in range(2))
    for part in key_slices(len(order), lambda part: _first_words(digests[order[part]])):
        rows, own, places = order[part], digests[order[part]], np.arange(part.stop - part.start)
        is_first = np.append(True, (own[1:] != own[:-1]).any(axis=1))
        numbers[part] = places - np.maximum.accumulate(np.where(is_first, places, 0)) + 1
        keys = [] if is_first.all() else [*_content_keys(annotations, rows)]
        counted[part] = rows[np.lexsort([*keys, np.cumsum(is_first)])]
    return counted, numbers


def _content_keys(
    annotations: Annotations, rows: NDArray[np.int64]
) -> Iterator[NDArray[np.generic]]:
    """Yield keys of the `rows` by which equal ones are sorted, the least significant first."""
    if annotations.weights is not None:
        yield annotations.weights[rows]
    if annotations.targets is not None:
        yield annotations.targets[rows]
    if annotations.labels is not None:
        yield annotations.labels[rows].astype(str)


def _first_words(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


def _named(rows: Sequence[int], ledger: Ledger) -> str:
    """Return the names of the first rows, and the number of the others."""
    return listed([ledger.source(row) for row in rows[:MAX_SHOWN]], len(rows))


def _others(rows: list[int], ledger: Ledger) -> dict[int, str]:
    """Return a text for each of the ascending `rows` that names the other rows."""
    # Rows that `listed` does not show have the same text, so the time stays linear.
    places = range(min(len(rows), MAX_SHOWN + 1))
    texts = [_named([*rows[:place], *rows[place + 1 :]], ledger) for place in places]
    return {row: texts[min(place, MAX_SHOWN)] for place, row in enumerate(rows)}


def _mixed(matrix: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each row of the matrix, (N,). Hashes may collide, see `_groups`."""
    found = scratch_array((len(matrix),), np.uint64)
    for part in slices(len(matrix)):
        mixed = np.zeros(part.stop - part.start, np.uint64)
        for column in matrix[part].T:
            mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(_MULTIPLIERS[0])
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MULTIPLIERS[1])
        found[part] = mixed
    return found


def _groups(keys: NDArray[np.uint64], identity: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Yield ascending groups of two or more indices that have equal keys and equal identities."""
    order = order_by(keys)
    for part in key_slices(len(keys), lambda part: keys[order[part]]):
        rows = order[part]
        edges = np.flatnonzero(np.concatenate([[True], keys[rows[1:]] != keys[rows[:-1]], [True]]))
        for begin in np.flatnonzero(np.diff(edges) > 1):
            equal: dict[Hashable, list[int]] = defaultdict(list)
            for index in rows[edges[begin] : edges[begin + 1]].tolist():
                equal[identity(index)].append(index)
            yield from (group for group in equal.values() if len(group) > 1)
