"""Changes of metrics are measured on paired rows."""

import numpy as np
import pytest

from slipway.export.certification.comparison import HopComparison, Tolerance
from slipway.export.certification.measurement import TestRows
from slipway.metrics.paired_bootstrap import paired_difference
from tests.export.certification.compared import (
    BUDGET,
    CLASSES,
    FP16,
    RESAMPLING,
    TORCH,
    compare,
    compare_values,
    measured,
    right,
    rows,
)


def test_intervals_of_metric_changes_pair_the_rows_of_both_hops() -> None:
    outputs = right()
    outputs[4] = outputs[4][::-1]
    hop = compare(outputs, BUDGET)
    accuracy = hop.metric_changes["accuracy"]
    assert accuracy.value == pytest.approx(-0.1)
    assert (accuracy.high, accuracy.rows, accuracy.confidence) == (0.0, 10, 0.95)
    assert -0.5 < accuracy.low < -0.1
    assert list(hop.metric_changes) == ["accuracy", "f1_macro", "log_loss"]
    assert hop.metric_changes["log_loss"].value == pytest.approx((np.log(0.75) - np.log(0.25)) / 10)


def test_equal_predictions_have_a_metric_change_of_exactly_0() -> None:
    for change in compare(right(), BUDGET).metric_changes.values():
        assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)
    first = HopComparison(rows(), RESAMPLING).first("torch", TORCH, measured(right(), TORCH))
    assert first.metric_changes == {}


def test_metric_change_without_flipped_labels_equals_that_of_resampling() -> None:
    nearly = right() + np.tile(np.array([1e-3, -1e-3], dtype=np.float32), (10, 1))
    changes = compare(nearly, BUDGET).metric_changes
    for metric in ("accuracy", "f1_macro"):
        drawn = paired_difference(
            "image_classification", metric, rows().targets, right(), nearly, RESAMPLING
        )
        assert (drawn.difference, drawn.low, drawn.high) == (0.0, 0.0, 0.0)
        assert (changes[metric].value, changes[metric].low, changes[metric].high) == (0.0, 0.0, 0.0)
    assert changes["log_loss"].low < changes["log_loss"].high


def test_numeric_predictions_are_compared_by_rmse_and_mean_error() -> None:
    targets = rows("image_regression").targets[:, None]
    changes = compare_values(
        (targets + 12).astype(np.float32), Tolerance(max_metric_loss=1.0)
    ).metric_changes
    assert {name: round(change.value, 3) for name, change in changes.items()} == {
        "rmse": 2.0,
        "mae": 2.0,
    }


@pytest.mark.parametrize(("num_lost", "status"), [(1, "agrees"), (12, "differs")])
def test_hop_that_loses_a_rare_class_differs_even_if_accuracy_hardly_changes(
    num_lost: int, status: str
) -> None:
    targets = np.array([1] * 12 + [0] * 588)
    names = [f"row{number}" for number in range(600)]
    data = TestRows(
        "image_classification",
        CLASSES,
        names,
        names,
        np.zeros((600, 1, 1, 1), np.uint8),
        targets.astype(np.float64),
    )
    outputs = np.where(targets[:, None] == np.arange(2), 0.75, 0.25).astype(np.float32)
    lost = outputs.copy()
    lost[:num_lost] = lost[:num_lost, ::-1]
    comparison, before = HopComparison(data, RESAMPLING), measured(outputs, TORCH)
    first = comparison.first("torch", TORCH, before)
    hop = comparison.against(
        "int8", FP16, measured(lost), (first, before), Tolerance(max_metric_loss=0.03)
    )
    assert hop.status == status
    assert ("points of macro F1 lost" in hop.reason) == (status == "differs")
    assert "accuracy" not in hop.reason
