"""Tests of audit folds: related rows stay together, classes are spread, no row is a test row."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.splits.audit_folds import audit_folds, audited_rows
from slipway.system.errors import DataError
from tests.data.pictures import row


def table(num_rows: int = 300, **changes: list[Any]) -> pa.Table:
    """Return rows of three classes, a fifth of them for testing; `changes` replace columns."""
    splits = [("train", "val", "test", "train", "train")[seed % 5] for seed in range(num_rows)]
    rows = [
        {**row(seed, "abc"[seed % 3]), "split": split, "fold": None, "leaked": False}
        for seed, split in enumerate(splits)
    ]
    for name, values in changes.items():
        for entry, value in zip(rows, values, strict=True):
            entry[name] = value
    return pa.Table.from_pylist(rows, schema=SPLIT_ROWS)


def by_id(rows: pa.Table, folds: np.ndarray[Any, Any]) -> dict[str, int]:
    return dict(zip(rows["id"].to_pylist(), folds.tolist(), strict=True))


def test_the_audit_includes_no_rows_of_the_test_split() -> None:
    rows = audited_rows(table())
    assert rows["split"].to_pylist() == ["train"] * 180 + ["val"] * 60
    assert rows["id"].to_pylist()[:180] == sorted(rows["id"].to_pylist()[:180])


def test_folds_depend_on_content_and_seed_not_on_the_order_of_rows() -> None:
    rows = audited_rows(table())
    shuffled = rows.take(pa.array(np.random.default_rng(0).permutation(rows.num_rows)))
    folds = by_id(rows, audit_folds(rows, 4, 7))
    assert by_id(shuffled, audit_folds(shuffled, 4, 7)) == folds
    assert by_id(rows, audit_folds(rows, 4, 8)) != folds


def test_every_audit_fold_has_an_equal_fraction_of_every_class() -> None:
    rows = audited_rows(table())
    labels, folds = np.array(rows["label"].to_pylist()), audit_folds(rows, 4, 7)
    counts = np.array(
        [[((labels == label) & (folds == fold)).sum() for fold in range(4)] for label in "abc"]
    )
    assert counts.sum() == 240
    assert np.ptp(counts, axis=1).max() <= 1


def test_rows_of_a_group_or_near_duplicate_cluster_stay_in_one_audit_fold() -> None:
    groups = [f"person {seed // 6}" if seed < 150 else None for seed in range(300)]
    clusters = [f"{seed // 4:032x}" if seed > 140 else None for seed in range(300)]
    rows = audited_rows(table(group=groups, cluster=clusters))
    folds = audit_folds(rows, 4, 7)
    for column in ("group", "cluster"):
        values = np.array(rows[column].to_pylist(), dtype=object)
        named = [value for value in set(values.tolist()) if value is not None]
        assert len(named) > 20
        assert all(len(set(folds[values == value].tolist())) == 1 for value in named)


def test_rows_without_groups_are_divided_over_the_audit_folds() -> None:
    rows = audited_rows(table())
    people, folds = np.array(rows["source"].to_pylist()).astype(int) // 6, audit_folds(rows, 4, 7)
    assert any(len(set(folds[people == person].tolist())) > 1 for person in range(25))


def test_error_names_a_class_with_all_rows_in_one_fold() -> None:
    labels = ["rare" if seed in (0, 3) else "ab"[seed % 2] for seed in range(300)]
    groups = ["one person" if seed in (0, 3) else None for seed in range(300)]
    with pytest.raises(DataError, match="all rows of 'rare' are in one"):
        audit_folds(audited_rows(table(label=labels, group=groups)), 4, 7)
    audit_folds(
        audited_rows(table(label=labels)), 4, 7
    )  # two rows that do not belong together are enough
