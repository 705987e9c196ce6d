"""Comparison with a reference model that is worse, equal or better by planted amounts."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.reference_comparison import (
    ReferenceAnswers,
    compare,
    reference_gate,
)
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system.errors import DataError

RESAMPLING = Resampling(3, 300, 0.95)
NUM_ROWS = 400
LABELS = np.arange(NUM_ROWS) % 2


def probabilities(wrong: NDArray[np.bool_]) -> NDArray[np.float32]:
    predicted = np.where(wrong, 1 - LABELS, LABELS)
    return np.where(np.arange(2) == predicted[:, None], 0.9, 0.1).astype(np.float32)


def wrong_rows(*numbers: int) -> NDArray[np.bool_]:
    return np.isin(np.arange(NUM_ROWS), numbers)


def labels_with(wrong: NDArray[np.bool_]) -> RowAnswers:
    return RowAnswers("table_classification", LABELS.astype(np.float64), probabilities(wrong))


def released(
    outputs: NDArray[np.float32],
    refused: NDArray[np.bool_] | None = None,
    known: NDArray[np.bool_] | None = None,
) -> ReferenceAnswers:
    refused = np.zeros(len(outputs), bool) if refused is None else refused
    return ReferenceAnswers(
        "artifacts/reference_model", "0123456789ab", "cpu", outputs, refused, known, "it says so"
    )


def test_a_worse_network_misses_the_reference_gate_and_the_result_has_interval_p_and_rows() -> None:
    """The released model is wrong on 10 rows, the new one on these and 30 others."""
    found = compare(
        labels_with(wrong_rows(*range(40))),
        released(probabilities(wrong_rows(*range(10)))),
        RESAMPLING,
    )
    assert found.loss.value == pytest.approx(30 / 400)
    assert found.difference.difference == pytest.approx(-30 / 400)
    assert 0 < found.loss.low < 30 / 400 < found.loss.high
    assert found.loss.rows == NUM_ROWS
    assert found.p_value == pytest.approx(2 * 0.5**30)  # McNemar: all 30 rows fell to one side
    gate = reference_gate(found, 0.01)
    assert gate.outcome == "missed"
    for text in (
        "accuracy lost",
        "0.075",
        "400 rows",
        "at most 0.01",
        "reference model 0123456789ab",
        "p = 1.86e-09",
    ):
        assert text in gate.text, text


def test_a_regression_of_exactly_the_budget_passes() -> None:
    found = compare(
        labels_with(wrong_rows(*range(12))),
        released(probabilities(wrong_rows(*range(8)))),
        RESAMPLING,
    )
    assert reference_gate(found, 0.01).outcome == "passed"
    assert reference_gate(found, 0.0099).outcome == "missed"


@pytest.mark.parametrize(("before", "after"), [(20, 20), (40, 10)])
def test_an_equal_or_better_network_passes_the_reference_gate_with_budget_0(
    before: int, after: int
) -> None:
    found = compare(
        labels_with(wrong_rows(*range(after))),
        released(probabilities(wrong_rows(*range(before)))),
        RESAMPLING,
    )
    assert found.loss.value == pytest.approx((after - before) / 400)
    assert reference_gate(found, 0.0).outcome == "passed"
    assert (found.p_value == 1) is (before == after)


def test_the_reference_interval_is_that_of_the_paired_difference() -> None:
    """30 % of the rows are hard for both; they differ on only two rows."""
    wrong = np.arange(NUM_ROWS) % 10 < 3
    found = compare(
        labels_with(wrong), released(probabilities(wrong ^ wrong_rows(5, 15))), RESAMPLING
    )
    assert found.loss.high - found.loss.low < 0.02


@pytest.mark.parametrize(("factor", "passes"), [(1.3, False), (1.0, True), (0.7, True)])
def test_regression_models_are_compared_by_relative_rmse_growth(
    factor: float, passes: bool
) -> None:
    targets = np.random.default_rng(0).normal(100, 10, NUM_ROWS)
    errors = np.random.default_rng(1).normal(0, 2, NUM_ROWS)
    answers = RowAnswers(
        "table_regression", targets, (targets + factor * errors)[:, None].astype(np.float32)
    )
    found = compare(answers, released((targets + errors)[:, None].astype(np.float32)), RESAMPLING)
    assert found.loss.value == pytest.approx(factor - 1, abs=1e-4)
    assert (reference_gate(found, 0.05).outcome == "passed") is passes
    assert (found.p_value < 0.01) is (factor != 1.0)


def test_p_values_of_rmse_differences_are_uniform_under_the_null() -> None:
    """A test that always reports a difference would fail here."""
    generator, num_small = np.random.default_rng(2), 0
    targets = np.zeros(60)
    for _ in range(60):
        before, after = (generator.normal(0, 1, (60, 1)).astype(np.float32) for _ in range(2))
        answers = RowAnswers("table_regression", targets, after)
        num_small += compare(answers, released(before), Resampling(1, 100, 0.95)).p_value <= 0.1
    assert 0 < num_small < 16


def test_rows_that_the_reference_model_refuses_or_knows_are_left_out_of_the_comparison() -> None:
    """It is right on every row that it learned from, so a comparison would be unfair."""
    known, refused = wrong_rows(*range(100)), wrong_rows(*range(90, 110))
    before = probabilities(np.arange(NUM_ROWS) >= 350)
    before[refused] = np.nan
    found = compare(
        labels_with(wrong_rows(*range(100))), released(before, refused, known), RESAMPLING
    )
    assert (found.refused, found.known, found.loss.rows) == (20, 100, 290)
    assert found.difference.before == pytest.approx(240 / 290)
    assert found.difference.after == 1


def test_unknown_training_rows_of_the_reference_model_are_recorded_as_unknown() -> None:
    found = compare(labels_with(wrong_rows(1)), released(probabilities(wrong_rows(1))), RESAMPLING)
    assert found.known is None
    assert found.knowledge == "it says so"


def test_a_comparison_over_fewer_than_two_common_rows_is_refused() -> None:
    with pytest.raises(DataError, match="1 of 400 test rows can be compared"):
        compare(
            labels_with(wrong_rows(1)),
            released(probabilities(wrong_rows(1)), refused=~wrong_rows(7)),
            RESAMPLING,
        )
