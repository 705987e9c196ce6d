"""Rows of a table that are equal: in everything, or in their inputs.

A row that is equal to another in every column is a duplicate. Rows that share their inputs alone are what near duplicates are among
pictures: they may be honest repetitions, but must not be divided between training and test.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import RuleParams
from slipway.data.engine.scratch import key_slices, order_by, scratch_array, slices
from slipway.data.rules.rules import IN_ANOTHER_SPLIT
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.targets import Annotations

_MAX_SHOWN = 3
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


def refuse_duplicates(
    digests: NDArray[np.uint8],
    rows: NDArray[np.int64],
    ledger: Ledger,
    given_splits: NDArray[np.object_] | None = None,
) -> None:
    """Keep the first of the `rows` with equal `digests`, and refuse the others."""
    for group in _groups(digests.view(np.uint64)[:, 0], lambda index: digests[index].tobytes()):
        first, *others = (int(rows[index]) for index in group)
        for row in others:
            across = given_splits is not None and given_splits[row] != given_splits[first]
            where = (
                f"{IN_ANOTHER_SPLIT}{given_splits[first]}"
                if given_splits is not None and across
                else ""
            )
            ledger.apply(
                "refuse",
                "exact_duplicate",
                [(row, f"the same row as {ledger.source(first)}{where}")],
            )


def apply_equal_input_rules(
    inputs: Sequence[NDArray[np.int64]],
    annotations: Annotations,
    digests: NDArray[np.uint8],
    rules: RuleParams,
    ledger: Ledger,
) -> dict[int, int]:
    """Apply the rules for rows with equal inputs; return the representative of each flagged row."""
    rows = np.flatnonzero(ledger.alive)
    matrix = scratch_array((len(rows), len(inputs)), np.int64)
    for part in slices(len(rows)):
        matrix[part] = np.stack([keys[rows[part]] for keys in inputs], axis=1)
    clusters: dict[int, int] = {}
    for group in _groups(_mixed(matrix), lambda index: matrix[index].tobytes()):
        twins = sorted(
            (int(rows[index]) for index in group), key=lambda row: digests[row].tobytes()
        )
        _judge_conflict(twins, annotations, rules, ledger)
        left = [row for row in twins if ledger.alive[row]]
        if len(left) < 2 or rules.near_duplicate is None:
            continue
        first, *others = left
        named = others if rules.near_duplicate == "refuse" else left
        detail = (
            f"the same inputs as {_names([row for row in left if row != named[0]] or left, ledger)}"
        )
        ledger.apply(rules.near_duplicate, "near_duplicate", ((row, detail) for row in named))
        if rules.near_duplicate == "flag":
            clusters |= dict.fromkeys(left, first)
    return clusters


def _judge_conflict(
    twins: list[int], annotations: Annotations, rules: RuleParams, ledger: Ledger
) -> None:
    answers = annotations.labels if annotations.labels is not None else annotations.targets
    assert answers is not None
    found = sorted({answers[row] for row in twins})
    if len(found) < 2:
        return
    rule = "conflicting_label" if annotations.labels is not None else "conflicting_target"
    shown = ", ".join(str(answer) for answer in found[:_MAX_SHOWN]) + ", ..." * (
        len(found) > _MAX_SHOWN
    )
    detail = f"the same inputs with {shown}: rows {_names(twins, ledger)}"
    ledger.apply(rules.conflicting_label, rule, ((row, detail) for row in twins))


def _names(rows: list[int], ledger: Ledger) -> str:
    return ", ".join(ledger.source(row) for row in sorted(rows)[:_MAX_SHOWN]) + ", ..." * (
        len(rows) > _MAX_SHOWN
    )


def _mixed(matrix: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(N,) hash of each row of the matrix; `_groups` resolves collisions."""
    found = scratch_array((len(matrix),), np.uint64)
    for part in slices(len(matrix)):
        mixed = np.zeros(part.stop - part.start, np.uint64)
        for column in matrix[part].T:
            mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(_MULTIPLIERS[0])
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MULTIPLIERS[1])
        found[part] = mixed
    return found


def _groups(keys: NDArray[np.uint64], identity: Callable[[int], Hashable]) -> list[list[int]]:
    """Return groups of two or more indices with equal keys and identities, ascending."""
    order = order_by(keys)
    groups = []
    for part in key_slices(len(keys), lambda part: keys[order[part]]):
        rows = order[part]
        edges = np.flatnonzero(np.concatenate([[True], keys[rows[1:]] != keys[rows[:-1]], [True]]))
        for begin, end in zip(
            edges[:-1][np.diff(edges) > 1], edges[1:][np.diff(edges) > 1], strict=True
        ):
            alike: dict[Hashable, list[int]] = defaultdict(list)
            for index in rows[begin:end]:
                alike[identity(int(index))].append(int(index))
            groups += [group for group in alike.values() if len(group) > 1]
    return groups
