import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.certificate import Hop
from slipway.artifacts.uncertainty import Answers
from slipway.export.certification.comparison import HopComparison, Tolerance, failed, not_executed
from slipway.export.certification.hops import batch_noise, in_order_of, in_small_batches
from slipway.export.certification.measurement import BatchAnswers, Measurement, TestRows
from slipway.system.errors import BundleError
from tests.calibrations import CALIBRATION
from tests.export.certification.compared import (
    BUDGET,
    CLASSES,
    FP16,
    RESAMPLING,
    STRICT,
    TORCH,
    compare,
    compare_values,
    measured,
    right,
    rows,
)


def test_hop_with_equal_predictions_agrees_and_records_every_figure() -> None:
    hop = compare(right(), STRICT)
    assert (hop.status, hop.reason, hop.reference, hop.rows, hop.max_difference, hop.flipped) == (
        "agrees",
        "",
        "torch",
        10,
        0.0,
        [],
    )
    assert hop.metric is not None
    assert (hop.metric.value, hop.metric.rows) == (1.0, 10)


def test_a_difference_above_the_bound_makes_the_hop_differ_and_names_its_row() -> None:
    outputs = right()
    outputs[3] += np.array([2e-5, -2e-5], dtype=np.float32)
    hop = compare(outputs, STRICT)
    assert (hop.status, hop.worst_row, hop.flipped) == ("differs", "row3", [])
    assert "largest difference is 2" in hop.reason
    assert compare(outputs, Tolerance(max_difference=3e-5)).status == "agrees"


def test_flipped_label_makes_the_hop_differ_even_if_probabilities_hardly_change() -> None:
    outputs = right()
    outputs[4] = outputs[4][::-1]
    hop = compare(outputs, Tolerance(max_difference=0.6))
    assert (hop.status, hop.flipped) == ("differs", ["row4"])
    assert "1 labels flipped" in hop.reason


def test_measured_noise_widens_the_bound_and_allows_flips_between_close_classes_only() -> None:
    tie = np.array([[0.5001, 0.4999]], dtype=np.float32)
    comparison, before = (
        HopComparison(rows(), RESAMPLING),
        measured(np.concatenate([tie, right()[1:]]), TORCH),
    )
    first = comparison.first("torch", TORCH, before)
    turned = before.outputs.copy()
    turned[0] = turned[0][::-1]

    def status(outputs: NDArray[np.float32], noise: float) -> str:
        return comparison.against(
            "http",
            FP16,
            measured(outputs),
            (first, before),
            Tolerance(max_difference=1e-5, noise=noise),
        ).status

    assert (status(turned, 0.0), status(turned, 2e-5), status(turned, 4e-4)) == (
        "differs",
        "differs",
        "agrees",
    )
    turned[4] = turned[4][::-1]  # a clear row
    assert status(turned, 0.1) == "differs"
    assert status(before.outputs, float("nan")) == "differs"


class NoisyRunner:
    """A simulated GPU whose predictions are off by `error` in batches of 4."""

    actual = FP16

    def __init__(self, error: float) -> None:
        self.error = error

    def run(self, batch: NDArray[np.uint8]) -> Answers:
        error = np.float32(self.error if len(batch) == 4 else 0)
        return Answers(
            np.full((len(batch), 2), 0.5, dtype=np.float32) + error,
            np.ones(len(batch), dtype=np.float32) + 2 * error,
        )


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_noise_is_the_difference_of_a_runtime_from_itself_between_batch_sizes(error: float) -> None:
    images = np.zeros((12, 4, 4, 1), dtype=np.uint8)
    answers = Answers(np.full((12, 2), 0.5, dtype=np.float32), np.ones(12, dtype=np.float32))
    assert batch_noise(NoisyRunner(error), images, answers, 32) == pytest.approx(
        (error, 2 * error), rel=1e-3
    )
    assert batch_noise(NoisyRunner(error), images, answers, 2) == (0, 0)


@pytest.mark.parametrize("tolerance", [STRICT, BUDGET])
def test_hop_with_a_non_finite_prediction_differs(tolerance: Tolerance) -> None:
    outputs = right()
    outputs[7, 0] = np.nan
    hop = compare(outputs, tolerance)
    assert (hop.status, hop.metric, hop.worst_row) == ("differs", None, "row7")


@pytest.mark.parametrize("tolerance", [STRICT, BUDGET])
def test_hop_that_ran_on_another_backend_than_requested_differs(tolerance: Tolerance) -> None:
    hop = compare(right(), tolerance, FP16.model_copy(update={"precision": "fp32"}))
    assert hop.status == "differs"
    assert "precision: fp16 was requested, fp32 ran" in hop.reason


def in_batches(outputs: NDArray[np.float32], **smaller: NDArray[np.float32]) -> Measurement:
    """Return predictions in batches of 32, and in the smaller sizes given as b1=, b7=."""
    runs = [BatchAnswers(int(name[1:]), answers) for name, answers in smaller.items()]
    return Measurement(FP16, outputs, 1.0, 2.0, batches=(*runs, BatchAnswers(32, outputs)))


def compare_runs(measured_runs: Measurement, tolerance: Tolerance = STRICT) -> Hop:
    comparison, before = HopComparison(rows(), RESAMPLING), measured(right(), TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp32", FP16, measured_runs, (first, before), tolerance)


def test_every_batch_size_is_compared_and_recorded() -> None:
    hop = compare_runs(in_batches(right(), b1=right(), b7=right()[:7]))
    assert hop.status == "agrees"
    assert [
        (check.batch_size, check.rows, check.max_difference, check.flipped) for check in hop.batches
    ] == [
        (1, 10, 0.0, 0),
        (7, 7, 0.0, 0),
        (32, 10, 0.0, 0),
    ]


def test_graph_that_depends_on_its_batch_differs_and_the_reason_gives_the_size() -> None:
    wrong = right()
    wrong[6] = wrong[6][::-1]
    hop = compare_runs(in_batches(right(), b1=right(), b7=wrong))
    assert (hop.status, hop.worst_row, hop.flipped, hop.max_difference) == (
        "differs",
        "row6",
        ["row6"],
        0.5,
    )
    assert "is 0.5 in batches of 7, expected at most 1e-05 (verify.max_difference)" in hop.reason
    assert [check.flipped for check in hop.batches] == [0, 1, 0]


@pytest.mark.parametrize(
    ("tolerance", "status"),
    [(STRICT, "differs"), (Tolerance(max_difference=1e-3), "agrees"), (BUDGET, "agrees")],
)
def test_fp32_differs_if_an_ood_score_depends_on_the_batch_size(
    tolerance: Tolerance, status: str
) -> None:
    comparison, scores = HopComparison(rows(), RESAMPLING), np.ones(10, dtype=np.float32)
    before = replace(measured(right(), TORCH), scores=scores)
    runs = (BatchAnswers(7, right(), scores + np.float32(1e-4)), BatchAnswers(32, right(), scores))
    found = replace(measured(right()), scores=scores, batches=runs)
    first = comparison.first("torch", TORCH, before)
    hop = comparison.against("fp32", FP16, found, (first, before), tolerance)
    assert hop.status == status
    assert hop.max_score_difference == pytest.approx(1e-4, rel=1e-2)
    assert ("OOD score" in hop.reason) == (status == "differs")


def compare_scores(scores: NDArray[np.float32], tolerance: Tolerance, num_rows: int = 100) -> Hop:
    """Compare a hop with `scores` to a network that flags the last 5 of 100 rows as OOD."""
    targets = (np.arange(num_rows) % 2).astype(np.float64)
    ids = [f"row{number}" for number in range(num_rows)]
    outputs = np.tile(np.array([[0.75, 0.25], [0.25, 0.75]], np.float32), (num_rows // 2, 1))
    inputs = np.zeros((num_rows, 1, 1, 1), np.uint8)
    comparison = HopComparison(
        TestRows("image_classification", CLASSES, ids, ids, inputs, targets), RESAMPLING
    )
    before = replace(measured(outputs, TORCH), scores=ORDINARY, calibration=CALIBRATION)
    first = comparison.first("torch", TORCH, before)
    return comparison.against(
        "int8",
        FP16,
        replace(measured(outputs), scores=scores, calibration=CALIBRATION),
        (first, before),
        tolerance,
    )


ORDINARY = np.linspace(0.01, 0.789, 100, dtype=np.float32)


def test_the_flagged_fraction_and_the_rank_correlation_of_scores_are_recorded() -> None:
    hop = compare_scores(ORDINARY, BUDGET)
    assert hop.status == "agrees"
    assert hop.score_rank == pytest.approx(1.0)
    assert hop.ood_fraction is not None
    assert (hop.ood_fraction.value, hop.ood_fraction.rows) == (0.05, 100)
    assert compare_scores(ORDINARY[::-1].copy(), BUDGET).score_rank == pytest.approx(-1.0)


def test_a_variant_that_flags_too_many_ordinary_rows_as_ood_differs() -> None:
    hop = compare_scores(ORDINARY * np.float32(2.4), BUDGET)
    assert (hop.status, hop.flipped) == ("differs", [])
    assert hop.reason.startswith(
        "61.0% of the rows are flagged as OOD, 51.2% at the mild end of its interval, "
        "expected at most 16."
    )
    assert (
        compare_scores(ORDINARY * np.float32(1.1), BUDGET).status == "agrees"
    )  # 13 %: by chance, of so few rows


@pytest.mark.parametrize("tolerance", [STRICT, BUDGET])
def test_hop_with_a_non_finite_ood_score_differs(tolerance: Tolerance) -> None:
    comparison, scores = HopComparison(rows(), RESAMPLING), np.ones(10, dtype=np.float32)
    before = replace(measured(right(), TORCH), scores=scores)
    found = replace(
        measured(right()), scores=np.where(np.arange(10) == 3, np.nan, scores).astype(np.float32)
    )
    hop = comparison.against(
        "fp32", FP16, found, (comparison.first("torch", TORCH, before), before), tolerance
    )
    assert (hop.status, hop.reason) == ("differs", "OOD scores are not finite")


class SlowRunner(NoisyRunner):
    """A runner that takes 20 ms for a batch of any size."""

    def run(self, batch: NDArray[np.uint8]) -> Answers:
        time.sleep(0.02)
        return super().run(batch)


def test_at_least_one_batch_runs_despite_a_short_time_limit() -> None:
    images = np.zeros((12, 4, 4, 1), dtype=np.uint8)
    runs = in_small_batches(SlowRunner(0.0), images, 32, seconds=0.05)
    assert [run.batch_size for run in runs] == [1, 2, 7]
    assert 1 <= len(runs[0].outputs) <= 4
    assert len(runs[2].outputs) == 12
    assert [
        len(run.outputs) for run in in_small_batches(SlowRunner(0.0), images, 32, seconds=1e-9)
    ] == [1, 2, 7]
    assert [
        run.batch_size for run in in_small_batches(NoisyRunner(0.0), images, 2, seconds=10)
    ] == [1]


def test_a_request_for_auto_accepts_any_execution() -> None:
    comparison = HopComparison(rows(), RESAMPLING)
    auto = FP16.model_copy(update={"provider": "auto", "precision": "auto", "variant": "auto"})
    assert comparison.first("http", auto, measured(right())).status == "agrees"


def test_hop_with_predictions_of_another_shape_differs() -> None:
    hop = compare(np.full((10, 3), 1 / 3, dtype=np.float32), BUDGET)
    assert hop.status == "differs"
    assert "shape (10, 3), expected (10, 2)" in hop.reason


def test_hop_that_returns_logits_instead_of_probabilities_differs() -> None:
    assert compare(right() * 10, BUDGET).status == "differs"


def test_numeric_predictions_are_compared_relative_to_the_largest_one() -> None:
    exact = (rows("image_regression").targets + 10)[:, None].astype(np.float32)
    assert (
        compare_values(exact + np.float32(0.005), STRICT).status == "agrees"
    )  # 1e-5 of 1010 is 0.0101
    assert compare_values(exact + np.float32(0.02), STRICT).status == "differs"


def test_hop_whose_rmse_grows_beyond_the_budget_differs() -> None:
    targets = rows("image_regression").targets[:, None]
    assert compare_values((targets + 10.9).astype(np.float32), BUDGET).status == "agrees"
    hop = compare_values((targets + 11.1).astype(np.float32), BUDGET)
    assert hop.status == "differs"
    assert "relative growth of the RMSE" in hop.reason


def test_a_hop_that_was_not_executed_has_no_numbers_and_does_not_agree() -> None:
    hop = not_executed("tensorrt/fp16", FP16, "no GPU")
    assert (hop.status, hop.actual, hop.rows, hop.reason) == ("not_executed", None, 0, "no GPU")
    assert failed("http", FP16, "gone").status == "differs"


def test_columns_of_probabilities_are_reordered_to_the_networks_classes() -> None:
    outputs = np.array([[0.1, 0.9]], dtype=np.float32)
    assert in_order_of(["a", "b"], ["b", "a"], outputs).tolist() == outputs[:, ::-1].tolist()
    assert in_order_of(["a", "b"], ["a", "b"], outputs).tolist() == outputs.tolist()


@pytest.mark.parametrize("labels", [["a", "c"], ["a", "b", "c"]])
def test_graph_with_other_labels_than_the_networks_classes_is_refused(labels: list[str]) -> None:
    with pytest.raises(BundleError, match="expected the network's classes"):
        in_order_of(["a", "b"], labels, np.zeros((1, len(labels)), dtype=np.float32))
