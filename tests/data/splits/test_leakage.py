"""Tests of the leakage check: every planted leak is found, reported and marked."""

from typing import Any

import pyarrow as pa
import pytest

from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.splits.leakage import check_leaks, find_leaks, leak_report
from slipway.system.errors import DataError
from tests.data.pictures import row

COLUMNS = ["id", "sha256", "group", "cluster"]


def placed(seed: int, split: str, **changes: Any) -> dict[str, Any]:
    return {
        **row(seed, group=f"g{seed}"),
        "cluster": f"c{seed}",
        "split": split,
        "leaked": False,
        **changes,
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SPLIT_ROWS)


def test_disjoint_splits_have_no_leaks() -> None:
    leaks = find_leaks(
        table(
            placed(1, "train"),
            placed(2, "val"),
            placed(3, "test"),
            placed(4, "test", group=None, cluster=None),
        )
    )
    assert not leaks.found
    assert leak_report(leaks)["rows"] == 0
    check_leaks(leaks, is_own_split=False)


def test_rows_without_a_group_do_not_count_as_sharing_one() -> None:
    assert not find_leaks(
        table(
            *(
                placed(seed, split, group=None, cluster=None)
                for seed, split in enumerate(("train", "val"))
            )
        )
    ).found


@pytest.mark.parametrize("column", COLUMNS)
def test_a_planted_leak_is_found_marked_and_refused(column: str) -> None:
    rows = [placed(1, "train"), placed(2, "test"), placed(3, "val")]
    rows[1][column] = rows[0][column]
    leaks = find_leaks(table(*rows))
    assert leaks.shared[column]["train/test"].examples == [rows[0][column]]
    assert leaks.shared[column]["train/val"].values == 0
    assert leaks.rows.tolist() == [False, True, False]
    with pytest.raises(DataError, match=r"1 rows of val and test leak[^$]*in train/test: 1"):
        check_leaks(leaks, is_own_split=True)


def test_a_leak_between_val_and_test_marks_the_rows_of_both() -> None:
    leaks = find_leaks(
        table(placed(1, "train"), placed(2, "val", group="x"), placed(3, "test", group="x"))
    )
    assert leaks.rows.tolist() == [False, True, True]


def test_a_test_row_as_old_as_a_training_row_violates_the_time_order() -> None:
    leaks = find_leaks(
        table(
            placed(1, "train", time=5.0),
            placed(2, "val", time=6.0),
            placed(3, "test", time=5.0),
            placed(4, "test", time=7.0),
        )
    )
    assert leaks.time["train/test"].rows_not_later == 1
    assert leaks.time["val/test"].rows_not_later == 1
    assert leaks.rows.tolist() == [False, False, True, False]
