"""Finds rows of a table that are equal in every column, or only in their inputs.

A row that equals another in every column is an exact duplicate. Rows with equal inputs only are
treated like near duplicates of images: they may be valid repetitions, but they must stay in one
split.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import RuleParams
from slipway.data.engine.scratch import (
    key_slices,
    order_by,
    scratch_array,
    slices,
    true_rows,
)
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.data.sources.shards import MAX_SHOWN, listed
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.targets import Annotations, CellTexts

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


def refuse_duplicates(
    digests: NDArray[np.uint8],
    rows: NDArray[np.int64],
    ledger: Ledger,
    given_splits: CellTexts | NDArray[np.object_] | None = None,
) -> None:
    """Keep the first of the `rows` with equal `digests`, and refuse the others as duplicates."""
    for group in _groups(digests.view(np.uint64)[:, 0], lambda index: digests[index].tobytes()):
        first, *others = (int(rows[index]) for index in group)
        for row in others:
            detail = f"the same row as {ledger.source(first)}"
            if given_splits is not None and given_splits[row] != given_splits[first]:
                detail += f"{IN_ANOTHER_SPLIT}{given_splits[first]}"
            ledger.apply("refuse", "exact_duplicate", [(row, detail)])


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
        sources = listed([ledger.source(row) for row in sorted(rows)])
        detail = f"the same inputs with {shown}: rows {sources}"
        ledger.apply(rules.conflicting_label, rule, ((row, detail) for row in rows))


def _others(rows: list[int], ledger: Ledger) -> dict[int, str]:
    """Return a text for each of the ascending `rows` that names the other rows."""
    names = [ledger.source(row) for row in rows]
    # Rows that `listed` does not show have the same text, so the time stays linear.
    texts = [listed(names[:place] + names[place + 1 :]) for place in range(MAX_SHOWN + 1)]
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
