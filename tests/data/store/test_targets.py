"""Tests of packed targets: class indices, the scale of numeric targets, and weights."""

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.store.targets import class_names, packed_rows, target_scale, targets_of
from slipway.system.errors import DataError
from tests.data.pictures import row


def rows(*labels: str) -> pa.Table:
    records = [
        row(seed, label) | {"split": "train", "leaked": False} for seed, label in enumerate(labels)
    ]
    return pa.Table.from_pylist(records, schema=SPLIT_ROWS)


def test_packed_class_targets_are_indices_into_the_sorted_class_names() -> None:
    table = rows("b", "a", "b")
    assert (
        class_names(table, "table_classification")
        == class_names(table, "image_classification")
        == ["a", "b"]
    )
    assert targets_of(table, ["a", "b"], "table_classification").tolist() == [1, 0, 1]


def test_a_numeric_target_has_no_classes() -> None:
    assert class_names(rows("b"), "table_regression") == []


def test_a_target_scale_of_zero_or_infinity_is_refused() -> None:
    assert target_scale(np.array([1.0, 3.0])).std == 1
    with pytest.raises(DataError, match="all 2 targets of the training split are 3"):
        target_scale(np.array([3.0, 3.0]))
    with pytest.raises(DataError, match="too large"):
        target_scale(np.array([1e200, -1e200]))


def test_a_row_without_a_weight_has_weight_one() -> None:
    table = rows("a", "b")
    weighted = table.set_column(
        table.schema.get_field_index("weight"),
        SPLIT_ROWS.field("weight"),
        pa.array([None, 2.5], pa.float64()),
    )
    assert packed_rows(weighted, np.zeros(2))["weight"].to_pylist() == [1.0, 2.5]
