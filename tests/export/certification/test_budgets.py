"""The loss of a variant is judged by its budget, its interval and the number of test rows."""

from dataclasses import replace

import numpy as np
import pytest

from slipway.artifacts.certificate import Hop
from slipway.export.certification.comparison import HopComparison, Tolerance
from slipway.export.certification.measurement import TestRows
from slipway.metrics.scores import Resampling
from tests.export.certification.compared import (
    BUDGET,
    CLASSES,
    FP16,
    TORCH,
    compare,
    compare_values,
    measured,
    right,
    rows,
)


def test_a_variant_within_its_budget_agrees_and_lists_its_flips() -> None:
    outputs = right()
    outputs[4] = outputs[4][::-1]
    hop = compare(outputs, BUDGET)
    assert (hop.status, hop.flipped) == ("agrees", ["row4"])


def test_variant_beyond_its_budget_differs_and_the_reason_gives_both_accuracies() -> None:
    outputs = right()
    outputs[3:] = outputs[3:, ::-1]
    hop = compare(outputs, BUDGET)
    assert hop.status == "differs"
    assert "0.7 accuracy points lost (from 1.0000 to 0.3000), " in hop.reason
    assert (
        "at the mild end of its interval, expected at most 0.1 (verify.max_metric_loss)"
        in hop.reason
    )


def compare_flipped(
    num_rows: int, num_flipped: int, tolerance: Tolerance, confidence: float = 0.95
) -> Hop:
    """Compare a network that is always right with a variant that is wrong on the first rows."""
    names = [f"row{number}" for number in range(num_rows)]
    targets = np.arange(num_rows) % 2
    pixels = np.zeros((num_rows, 1, 1, 1), np.uint8)
    data = TestRows("image_classification", CLASSES, names, names, pixels, targets.astype(float))
    outputs = np.where(targets[:, None] == np.arange(2), 0.75, 0.25).astype(np.float32)
    flipped = outputs.copy()
    flipped[:num_flipped] = flipped[:num_flipped, ::-1]
    resampling = Resampling(seed=1, num_samples=500, confidence=confidence)
    comparison, before = HopComparison(data, resampling), measured(outputs, TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp16", FP16, measured(flipped), (first, before), tolerance)


SMALL_BUDGET = Tolerance(max_metric_loss=0.01, budget_key="verify.max_metric_loss.fp16")


def test_one_changed_prediction_in_a_small_test_split_does_not_prove_a_loss() -> None:
    hop = compare_flipped(38, 1, SMALL_BUDGET)
    assert (hop.status, hop.flipped) == ("agrees", ["row0"])
    assert "0.02632 accuracy points lost (from 1.0000 to 0.9737)" in hop.reason
    assert "above verify.max_metric_loss.fp16 0.01, but too few rows to tell it from" in hop.reason


def test_loss_within_the_confidence_interval_does_not_refuse_a_variant() -> None:
    hop = compare_flipped(38, 3, SMALL_BUDGET)
    assert (hop.status, len(hop.flipped)) == ("agrees", 3)
    assert "0.07895 accuracy points lost" in hop.reason


def test_significant_loss_in_a_small_test_split_refuses_a_variant() -> None:
    hop = compare_flipped(38, 12, SMALL_BUDGET)
    assert hop.status == "differs"
    assert (
        "expected at most one row, 0.02632, because verify.max_metric_loss.fp16 0.01" in hop.reason
    )


# An interval of no width to speak of: the loss itself is judged.
@pytest.mark.parametrize(("num_flipped", "status"), [(1, "agrees"), (2, "differs")])
def test_budget_below_one_row_allows_a_loss_of_one_row(num_flipped: int, status: str) -> None:
    assert compare_flipped(38, num_flipped, SMALL_BUDGET, confidence=0.01).status == status


@pytest.mark.parametrize(("num_flipped", "status"), [(10, "agrees"), (11, "differs")])
def test_loss_on_many_rows_is_limited_by_the_budget_itself(num_flipped: int, status: str) -> None:
    budget = replace(SMALL_BUDGET, max_metric_loss=0.0105)
    assert compare_flipped(1000, num_flipped, budget, confidence=0.01).status == status


def test_one_lost_row_of_a_rare_class_does_not_refuse_a_variant() -> None:
    names = [f"row{number}" for number in range(100)]
    targets = (np.arange(100) < 2).astype(float)
    data = TestRows(
        "image_classification", CLASSES, names, names, np.zeros((100, 1, 1, 1), np.uint8), targets
    )
    outputs = np.where(targets[:, None] == np.arange(2), 0.75, 0.25).astype(np.float32)
    flipped = outputs.copy()
    flipped[0] = flipped[0, ::-1]
    comparison, before = HopComparison(data, Resampling(1, 500, 0.01)), measured(outputs, TORCH)
    first = comparison.first("torch", TORCH, before)
    hop = comparison.against("fp16", FP16, measured(flipped), (first, before), SMALL_BUDGET)
    assert hop.status == "agrees"
    assert "points of macro F1 lost" in hop.reason


@pytest.mark.parametrize("num_lost", [0, 1])
def test_flips_between_two_wrong_labels_count_despite_the_allowance_of_one_row(
    num_lost: int,
) -> None:
    targets = np.repeat(np.arange(3.0), [200, 80, 20])
    names = [f"row{number}" for number in range(300)]
    data = TestRows(
        "image_classification",
        ["a", "b", "c"],
        names,
        names,
        np.zeros((300, 1, 1, 1), np.uint8),
        targets,
    )
    labels = targets.astype(int)
    labels[:40] = 1  # wrong, but not as bad for a class as where they go: to the rare one
    moved = labels.copy()
    moved[:40] = 2
    moved[200 : 200 + num_lost] = 0
    before = measured(np.eye(3, dtype=np.float32)[labels], TORCH)
    after = measured(np.eye(3, dtype=np.float32)[moved])
    comparison = HopComparison(data, Resampling(1, 500, 0.95))
    hop = comparison.against(
        "fp16", FP16, after, (comparison.first("torch", TORCH, before), before), SMALL_BUDGET
    )
    assert hop.status == "differs"
    assert "points of macro F1 lost" in hop.reason


def test_hop_within_its_budget_has_an_empty_reason() -> None:
    assert compare_flipped(1000, 10, SMALL_BUDGET).reason == ""


def test_unserved_lossy_variant_is_uncertified_instead_of_differing() -> None:
    unserved = replace(SMALL_BUDGET, is_served=False)
    assert compare_flipped(38, 12, unserved).status == "uncertified"
    assert compare_flipped(38, 12, unserved).reason == compare_flipped(38, 12, SMALL_BUDGET).reason
    assert compare_flipped(38, 1, unserved).status == "agrees"


def test_unserved_variant_with_predictions_of_another_model_still_differs() -> None:
    unserved = replace(SMALL_BUDGET, is_served=False)
    assert compare_flipped(38, 20, unserved).status == "differs"
    broken = right()
    broken[7, 0] = np.nan
    assert compare(broken, replace(BUDGET, is_served=False)).status == "differs"
    targets = rows("image_regression").targets[:, None]
    unserved_values = Tolerance(max_metric_loss=0.1, is_served=False)
    for shift, status in ((50.0, "uncertified"), (1000.0, "differs")):
        outputs = (targets + 10 + shift).astype(np.float32)
        assert compare_values(outputs, unserved_values).status == status
