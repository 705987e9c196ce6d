import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.calibration import Answers
from slipway.certificate import Execution, Hop
from slipway.errors import BundleError
from slipway.export.comparison import Comparison, Measurement, TestRows, Tolerance, failed, not_executed
from slipway.export.hops import batch_noise, in_order_of
from slipway.metrics import Resampling

RESAMPLING = Resampling(seed=1, num_samples=100, confidence=0.95)
TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
FP16 = Execution(backend="onnxruntime", provider="cpu", precision="fp16", variant="fp16")
STRICT, BUDGET = Tolerance(max_difference=1e-5), Tolerance(max_metric_loss=0.1)
CLASSES = ["a", "b"]
IDS = [f"row{number}" for number in range(10)]


def rows(task: str = "image_classification") -> TestRows:
    targets = np.arange(10) % 2 if task == "image_classification" else np.linspace(100, 1000, 10)
    images = np.zeros((10, 1, 1, 1), dtype=np.uint8)
    return TestRows(task, CLASSES if task == "image_classification" else [], IDS, IDS, images, targets.astype(np.float64))  # type: ignore[arg-type]


def right() -> NDArray[np.float32]:
    """Every label right with probability 0.75."""
    outputs = np.full((10, 2), 0.25, dtype=np.float32)
    outputs[np.arange(10), np.arange(10) % 2] = 0.75
    return outputs


def measured(outputs: NDArray[np.float32], actual: Execution = FP16) -> Measurement:
    return Measurement(actual, outputs, latency_ms=1.0, rows_per_second=2.0)


def compare(outputs: NDArray[np.float32], tolerance: Tolerance, actual: Execution = FP16) -> Hop:
    comparison = Comparison(rows(), RESAMPLING)
    before = measured(right(), TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp16", FP16, measured(outputs, actual), (first, before), tolerance)


def compare_values(outputs: NDArray[np.float32], tolerance: Tolerance) -> Hop:
    comparison = Comparison(rows("image_regression"), RESAMPLING)
    before = measured((rows("image_regression").targets + 10)[:, None].astype(np.float32), TORCH)
    first = comparison.first("torch", TORCH, before)
    return comparison.against("fp16", FP16, measured(outputs), (first, before), tolerance)


def test_equal_answers_agree_and_every_number_is_written_down() -> None:
    hop = compare(right(), STRICT)
    assert (hop.status, hop.reason, hop.reference, hop.rows, hop.max_difference, hop.flipped) == ("agrees", "", "torch", 10, 0.0, [])
    assert hop.metric is not None
    assert (hop.metric.value, hop.metric.rows) == (1.0, 10)


def test_one_difference_above_the_bound_differs_and_its_row_is_named() -> None:
    outputs = right()
    outputs[3] += np.array([2e-5, -2e-5], dtype=np.float32)
    hop = compare(outputs, STRICT)
    assert (hop.status, hop.worst_row, hop.flipped) == ("differs", "row3", [])
    assert "largest difference is 2" in hop.reason
    assert compare(outputs, Tolerance(max_difference=3e-5)).status == "agrees"


def test_a_flipped_label_differs_however_small_the_difference() -> None:
    outputs = right()
    outputs[4] = outputs[4][::-1]
    hop = compare(outputs, Tolerance(max_difference=0.6))
    assert (hop.status, hop.flipped) == ("differs", ["row4"])
    assert "1 labels flipped" in hop.reason


def test_noise_allows_as_much_more_and_flips_where_two_classes_are_as_close_and_no_other() -> None:
    tie = np.array([[0.5001, 0.4999]], dtype=np.float32)
    comparison, before = Comparison(rows(), RESAMPLING), measured(np.concatenate([tie, right()[1:]]), TORCH)
    first = comparison.first("torch", TORCH, before)
    turned = before.outputs.copy()
    turned[0] = turned[0][::-1]

    def status(outputs: NDArray[np.float32], noise: float) -> str:
        return comparison.against("http", FP16, measured(outputs), (first, before), Tolerance(max_difference=1e-5, noise=noise)).status

    assert (status(turned, 0.0), status(turned, 2e-5), status(turned, 4e-4)) == ("differs", "differs", "agrees")
    turned[4] = turned[4][::-1]  # a clear row
    assert status(turned, 0.1) == "differs"
    assert status(before.outputs, float("nan")) == "differs"


class NoisyRunner:
    """A GPU whose answers depend on the batch: off by `error` in batches of 4."""

    actual = FP16

    def __init__(self, error: float) -> None:
        self.error = error

    def run(self, batch: NDArray[np.uint8]) -> Answers:
        error = np.float32(self.error if len(batch) == 4 else 0)
        return Answers(np.full((len(batch), 2), 0.5, dtype=np.float32) + error, np.ones(len(batch), dtype=np.float32) + 2 * error)


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_noise_is_what_a_runtime_differs_from_itself_between_batches(error: float) -> None:
    images = np.zeros((12, 4, 4, 1), dtype=np.uint8)
    answers = Answers(np.full((12, 2), 0.5, dtype=np.float32), np.ones(12, dtype=np.float32))
    assert batch_noise(NoisyRunner(error), images, answers, 32) == pytest.approx((error, 2 * error), rel=1e-3)
    assert batch_noise(NoisyRunner(error), images, answers, 2) == (0, 0)


def test_a_variant_within_its_budget_agrees_and_lists_its_flips() -> None:
    outputs = right()
    outputs[4] = outputs[4][::-1]
    hop = compare(outputs, BUDGET)
    assert (hop.status, hop.flipped) == ("agrees", ["row4"])


def test_a_variant_beyond_its_budget_differs_with_both_accuracies() -> None:
    outputs = right()
    outputs[4:6] = outputs[4:6, ::-1]
    hop = compare(outputs, BUDGET)
    assert hop.status == "differs"
    assert "0.2 accuracy points lost (from 1.0000 to 0.8000), expected at most 0.1" in hop.reason


@pytest.mark.parametrize("tolerance", [STRICT, BUDGET])
def test_an_answer_that_is_not_finite_never_agrees(tolerance: Tolerance) -> None:
    outputs = right()
    outputs[7, 0] = np.nan
    hop = compare(outputs, tolerance)
    assert (hop.status, hop.metric, hop.worst_row) == ("differs", None, "row7")


@pytest.mark.parametrize("tolerance", [STRICT, BUDGET])
def test_another_execution_than_the_requested_one_never_agrees(tolerance: Tolerance) -> None:
    hop = compare(right(), tolerance, FP16.model_copy(update={"precision": "fp32"}))
    assert hop.status == "differs"
    assert "precision: fp16 was requested, fp32 ran" in hop.reason


def test_a_request_for_auto_takes_whatever_ran() -> None:
    comparison = Comparison(rows(), RESAMPLING)
    auto = FP16.model_copy(update={"provider": "auto", "precision": "auto", "variant": "auto"})
    assert comparison.first("http", auto, measured(right())).status == "agrees"


def test_answers_of_another_shape_differ() -> None:
    hop = compare(np.full((10, 3), 1 / 3, dtype=np.float32), BUDGET)
    assert hop.status == "differs"
    assert "shape (10, 3), expected (10, 2)" in hop.reason


def test_logits_instead_of_probabilities_differ() -> None:
    assert compare(right() * 10, BUDGET).status == "differs"


def test_values_are_compared_relative_to_the_largest_answer() -> None:
    exact = (rows("image_regression").targets + 10)[:, None].astype(np.float32)
    assert compare_values(exact + np.float32(0.005), STRICT).status == "agrees"  # 1e-5 of 1010 is 0.0101
    assert compare_values(exact + np.float32(0.02), STRICT).status == "differs"


def test_values_may_not_raise_the_rmse_beyond_their_budget() -> None:
    targets = rows("image_regression").targets[:, None]
    assert compare_values((targets + 10.9).astype(np.float32), BUDGET).status == "agrees"
    hop = compare_values((targets + 11.1).astype(np.float32), BUDGET)
    assert hop.status == "differs"
    assert "relative growth of the RMSE" in hop.reason


def test_a_hop_that_was_not_executed_has_no_numbers_and_does_not_agree() -> None:
    hop = not_executed("tensorrt/fp16", FP16, "no GPU")
    assert (hop.status, hop.actual, hop.rows, hop.reason) == ("not_executed", None, 0, "no GPU")
    assert failed("http", FP16, "gone").status == "differs"


def test_columns_are_put_in_the_networks_order_by_name() -> None:
    outputs = np.array([[0.1, 0.9]], dtype=np.float32)
    assert in_order_of(["a", "b"], ["b", "a"], outputs).tolist() == outputs[:, ::-1].tolist()
    assert in_order_of(["a", "b"], ["a", "b"], outputs).tolist() == outputs.tolist()


@pytest.mark.parametrize("labels", [["a", "c"], ["a", "b", "c"]])
def test_labels_that_are_not_the_networks_classes_are_refused(labels: list[str]) -> None:
    with pytest.raises(BundleError, match="the network has the classes"):
        in_order_of(["a", "b"], labels, np.zeros((1, len(labels)), dtype=np.float32))
