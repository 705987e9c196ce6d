"""Metrics: hand-computed cases, comparison with scikit-learn, refusals.

Intervals are tested in test_metric_intervals. ROC-AUC and average precision are compared with a
slow implementation of our own, which is compared with scikit-learn, because that refuses classes
without rows. The calibration error is compared with a loop over bins.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sklearn_metrics

from slipway.kinds.targets import CLASS, NUMBER
from slipway.metrics import class_scores as scores
from slipway.metrics.calibration_error import calibration_errors, reliability_bins
from slipway.metrics.class_scores import confusion_matrix
from slipway.metrics.scores import measure, why_absent
from slipway.system.errors import MetricError
from tests.metric_cases import (
    FEW,
    TWO,
    classification_metrics,
    one_hot,
    random_case,
    regression_metrics,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning"),
    pytest.mark.filterwarnings("ignore:A single label was found:UserWarning"),
]
WILSON = ("accuracy", "precision_micro", "recall_micro", "recall_weighted", "f1_micro")
TOLERANCE = 1e-12


def own_against_others(
    targets: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> list[tuple[NDArray[np.bool_], NDArray[np.float64]]]:
    """Return, for each class of a macro mean, its rows as a mask and its probabilities."""
    num_classes = probabilities.shape[1]
    sides = [
        (targets == k, probabilities[:, k])
        for k in ([1] if num_classes == 2 else range(num_classes))
    ]
    return [(is_own, scores) for is_own, scores in sides if 0 < is_own.sum() < len(targets)]


def slow_roc_auc(is_own: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Compute ROC-AUC over every pair of an own and another row."""
    leads = scores[is_own][:, None] - scores[~is_own]
    return float(np.mean((leads > 0) + 0.5 * (leads == 0)))


def slow_average_precision(is_own: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Compute average precision over every threshold, from the highest."""
    total, recall = 0.0, 0.0
    for threshold in np.unique(scores)[::-1]:
        chosen = is_own[scores >= threshold]
        total += (chosen.sum() / is_own.sum() - recall) * chosen.mean()
        recall = chosen.sum() / is_own.sum()
    return total


def slow_calibration_error(targets: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Compute the calibration error bin by bin."""
    confidences, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == targets
    bins: dict[int, list[int]] = {}
    for row, confidence in enumerate(confidences):
        bins.setdefault(15 * int((confidences < confidence).sum()) // len(confidences), []).append(
            row
        )
    return float(
        sum(
            len(rows) / len(targets) * abs(confidences[rows].mean() - right[rows].mean())
            for rows in bins.values()
        )
    )


def slow_scores(
    targets: NDArray[np.int64], probabilities: NDArray[np.float64], top_k: int
) -> dict[str, float]:
    """Compute the metrics that scikit-learn lacks, or lacks for some of these cases."""
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    distances = [
        sum((p - (k == target)) ** 2 for k, p in enumerate(row))
        for row, target in zip(probabilities, targets, strict=True)
    ]
    scores = {
        "brier": np.mean(distances),
        "calibration_error": slow_calibration_error(targets, probabilities),
    }
    if top_k < probabilities.shape[1]:
        scores["top_k_accuracy"] = np.mean(
            [target in row for row, target in zip(best, targets, strict=True)]
        )
    sides = own_against_others(targets, probabilities)
    if sides:
        scores["roc_auc"] = np.mean([slow_roc_auc(*side) for side in sides])
        scores["average_precision"] = np.mean([slow_average_precision(*side) for side in sides])
    return {name: float(value) for name, value in scores.items()}


def sklearn_scores(
    targets: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> dict[str, float]:
    labels, predicted = list(range(probabilities.shape[1])), probabilities.argmax(axis=1)
    scores = {
        "accuracy": sklearn_metrics.accuracy_score(targets, predicted),
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(targets, predicted),
    }
    if len(labels) > 1:  # scikit-learn refuses the log loss of one class
        scores["log_loss"] = sklearn_metrics.log_loss(targets, y_proba=probabilities, labels=labels)
    for average in ("macro", "micro", "weighted"):
        found = sklearn_metrics.precision_recall_fscore_support(
            targets, predicted, average=average, zero_division=0
        )
        scores |= {
            f"{name}_{average}": value
            for name, value in zip(("precision", "recall", "f1"), found, strict=False)
        }
    return scores


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_classification_metrics_agree_with_scikit_learn(num_cases: int) -> None:
    generator = np.random.default_rng(2)
    for _ in range(num_cases):
        targets, probabilities = random_case(generator)
        found = classification_metrics(targets, probabilities, TWO, names=sklearn_names())
        for name, expected in sklearn_scores(targets, probabilities).items():
            assert abs(found[name].value - expected) <= TOLERANCE, (name, targets, probabilities)


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_probability_metrics_agree_with_a_simple_implementation(num_cases: int) -> None:
    generator = np.random.default_rng(12)
    for _ in range(num_cases):
        targets, probabilities = random_case(generator)
        top_k = int(generator.integers(1, 6))
        found = classification_metrics(targets, probabilities, FEW, top_k=top_k)
        expected = slow_scores(targets, probabilities, top_k)
        assert found.keys() == {*sklearn_names(), *expected}, (targets, probabilities)
        for name, value in expected.items():
            assert abs(found[name].value - value) <= TOLERANCE, (name, targets, probabilities)


def sklearn_names() -> set[str]:
    return set(CLASS.metrics) - {
        "top_k_accuracy",
        "brier",
        "roc_auc",
        "average_precision",
        "calibration_error",
    }


def test_simple_implementation_agrees_with_scikit_learn() -> None:
    generator = np.random.default_rng(13)
    for _ in range(20):
        targets, probabilities = random_case(generator)
        num_classes = probabilities.shape[1]
        for is_own, ranked in own_against_others(targets, probabilities):
            assert (
                abs(slow_roc_auc(is_own, ranked) - sklearn_metrics.roc_auc_score(is_own, ranked))
                <= TOLERANCE
            )
            assert (
                abs(
                    slow_average_precision(is_own, ranked)
                    - sklearn_metrics.average_precision_score(is_own, ranked)
                )
                <= TOLERANCE
            )
        if num_classes > 2:
            # Of equal probabilities scikit-learn prefers the last class, we the first.
            turned = sklearn_metrics.top_k_accuracy_score(
                num_classes - 1 - targets, probabilities[:, ::-1], k=2, labels=range(num_classes)
            )
            labels = list(range(num_classes))
            brier = sklearn_metrics.brier_score_loss(
                targets, probabilities, labels=labels, scale_by_half=False
            )
            found = slow_scores(targets, probabilities, top_k=2)
            assert abs(found["top_k_accuracy"] - turned) <= TOLERANCE
            assert abs(found["brier"] - brier) <= TOLERANCE


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_class_scores_and_confusion_matrix_agree_with_scikit_learn(
    num_cases: int,
) -> None:
    generator = np.random.default_rng(3)
    for _ in range(num_cases):
        targets, probabilities = random_case(generator)
        num_classes, predicted = probabilities.shape[1], probabilities.argmax(axis=1)
        matrix = confusion_matrix(targets, predicted, num_classes)
        labels = list(range(num_classes))
        assert (matrix == sklearn_metrics.confusion_matrix(targets, predicted, labels=labels)).all()
        found = scores.class_scores(scores.count_classes(matrix))
        expected = sklearn_metrics.precision_recall_fscore_support(
            targets, predicted, labels=labels, zero_division=0
        )
        for values, reference in zip(
            (found.precision, found.recall, found.f1), expected, strict=False
        ):
            assert np.abs(values - reference).max() <= TOLERANCE


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_regression_metrics_agree_with_scikit_learn(num_cases: int) -> None:
    generator = np.random.default_rng(4)
    for _ in range(num_cases):
        num_rows = int(generator.integers(2, 60))
        targets = generator.normal(scale=10.0, size=num_rows)
        values = targets + generator.normal(size=num_rows)
        found = regression_metrics(targets, values, TWO)
        expected = {
            "mse": sklearn_metrics.mean_squared_error(targets, values),
            "rmse": sklearn_metrics.root_mean_squared_error(targets, values),
            "mae": sklearn_metrics.mean_absolute_error(targets, values),
            "r2": sklearn_metrics.r2_score(targets, values),
            "median_error": sklearn_metrics.median_absolute_error(targets, values),
        }
        assert found.keys() == expected.keys()
        assert all(
            abs(found[name].value - value) <= TOLERANCE * max(1, abs(value))
            for name, value in expected.items()
        )


def test_comparison_with_scikit_learn_would_detect_a_wrong_metric() -> None:
    targets, probabilities = np.array([0, 0, 1, 2]), one_hot([0, 1, 1, 2], 3)
    found = classification_metrics(targets, probabilities, FEW)
    assert (
        abs(found["f1_macro"].value - sklearn_scores(targets, probabilities)["f1_weighted"])
        > TOLERANCE
    )


def test_class_metrics_agree_with_a_case_computed_by_hand() -> None:
    # actual 0 0 0 1 1 2, predicted 0 0 1 1 1 0: class 2 is never predicted
    found = classification_metrics([0, 0, 0, 1, 1, 2], one_hot([0, 0, 1, 1, 1, 0], 3), FEW)
    assert found["accuracy"].value == pytest.approx(4 / 6)
    assert found["precision_macro"].value == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert found["recall_macro"].value == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["f1_macro"].value == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)
    assert found["f1_weighted"].value == pytest.approx((3 * 2 / 3 + 2 * 4 / 5) / 6)
    assert found["accuracy"].rows == 6


def test_class_predicted_but_absent_counts_in_macro_mean_but_not_balanced_accuracy() -> None:
    found = classification_metrics([0, 1, 1], one_hot([0, 1, 2], 3), FEW)
    assert found["recall_macro"].value == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["balanced_accuracy"].value == pytest.approx((1 + 1 / 2) / 2)


def test_class_neither_present_nor_predicted_is_left_out_of_the_macro_mean() -> None:
    found = classification_metrics([0, 1], one_hot([0, 1], 3), FEW)
    assert (
        found["recall_macro"].value
        == found["precision_macro"].value
        == found["f1_macro"].value
        == 1
    )


def test_rows_of_a_single_class_are_measured() -> None:
    found = classification_metrics([0, 0, 0], np.ones((3, 1)), FEW)
    assert found["accuracy"].value == found["f1_macro"].value == 1
    assert found["log_loss"].value == 0


def test_log_loss_of_a_confident_wrong_answer_is_finite() -> None:
    found = classification_metrics([0], one_hot([1], 2), FEW)
    assert found["log_loss"].value == pytest.approx(-np.log(np.finfo(np.float64).eps))


def test_equal_probabilities_predict_the_first_class() -> None:
    assert classification_metrics([0], [[0.5, 0.5]], FEW)["accuracy"].value == 1


@pytest.mark.parametrize(("values", "r2"), [([2.0, 2.0, 2.0], 1.0), ([2.0, 2.0, 3.0], 0.0)])
def test_r2_of_equal_targets_is_one_only_when_every_value_is_right(
    values: list[float], r2: float
) -> None:
    assert regression_metrics([2.0, 2.0, 2.0], values, FEW)["r2"].value == r2


def test_float32_input_is_measured_in_float64() -> None:
    targets = np.full(1000, 1e4, dtype=np.float32)
    values = targets + np.float32(0.25)
    assert regression_metrics(targets, values, FEW)["mse"].value == 0.0625


def test_measure_returns_exactly_the_metrics_of_the_task() -> None:
    assert (
        tuple(measure("image_classification", [0, 1, 2], one_hot([0, 1, 2], 3), FEW, top_k=2))
        == CLASS.metrics
    )
    assert tuple(measure("image_regression", [0.0, 1.0], [[0.0], [2.0]], FEW)) == NUMBER.metrics


# metrics of probabilities


def test_probability_metrics_agree_with_a_case_computed_by_hand() -> None:
    targets, probabilities = (
        [0, 1, 2, 0],
        [[0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]],
    )
    found = classification_metrics(targets, probabilities, FEW, top_k=2)
    assert found["top_k_accuracy"].value == 0.5  # of the last two rows the right class is the third
    assert found["brier"].value == pytest.approx((0.38 + 0.38 + 0.98 + 0.98) / 4)
    # Class 0: the own 0.5 ties with 0.5 and leads 0.3, the own 0.2 leads none.
    # Class 1: 0.5 leads all. Class 2: 0.2 ties twice.
    assert found["roc_auc"].value == pytest.approx((1.5 / 4 + 1 + 1 / 3) / 3)
    assert found["average_precision"].value == pytest.approx(
        ((0.5 * 1 / 2 + 0.5 * 2 / 4) + 1 + 1 / 4) / 3
    )
    assert found["calibration_error"].value == pytest.approx(
        0
    )  # half of the rows are right, each with a confidence of a half


def test_roc_auc_of_two_classes_ranks_rows_by_the_second_class() -> None:
    targets, probabilities = (
        [0, 1, 1],
        [[0.5, 0.495], [0.6, 0.4], [0.2, 0.8]],
    )  # rows that sum to almost 1
    found = classification_metrics(targets, probabilities, FEW)
    assert found["roc_auc"].value == 0.5
    assert found["average_precision"].value == pytest.approx((1 + 2 / 3) / 2)


def test_class_without_rows_is_left_out_of_the_mean_roc_auc() -> None:
    targets, probabilities = (
        [0, 0, 1, 1],
        [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]],
    )
    found = classification_metrics(targets, probabilities, FEW)
    assert found["roc_auc"].value == pytest.approx((1 + 0.5) / 2)


@pytest.mark.parametrize("num_classes", [1, 2, 5])
def test_rows_of_one_class_have_no_ranking_and_no_nan(num_classes: int) -> None:
    found = classification_metrics(
        [0, 0, 0], np.full((3, num_classes), 1 / num_classes), FEW, top_k=1
    )
    assert not {"roc_auc", "average_precision"} & found.keys()
    assert ("top_k_accuracy" in found) == (num_classes > 1)
    json.dumps([metric.model_dump() for metric in found.values()], allow_nan=False)


def test_absent_metrics_have_a_reason() -> None:
    for targets, num_classes, top_k in (
        ([0, 0], 3, 2),
        ([0, 1], 2, 2),
        ([0, 1], 2, 9),
        ([0, 1, 2], 4, None),
        ([0, 1], 3, 1),
    ):
        found = classification_metrics(
            targets, np.full((len(targets), num_classes), 1 / num_classes), FEW, top_k=top_k
        )
        reasons = why_absent("table_classification", targets, num_classes, top_k)
        assert reasons.keys() == set(CLASS.metrics) - found.keys()
    assert (
        "with 2 classes, the best 9"
        in why_absent("table_classification", [0, 1], 2, 9)["top_k_accuracy"]
    )
    assert why_absent("table_regression", [0.5, 0.5], 0, 3) == {}


def test_top_1_accuracy_equals_accuracy() -> None:
    targets, probabilities = (
        np.array([0, 1, 2, 2]),
        np.array([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4], [1, 0, 0]]),
    )
    found = classification_metrics(targets, probabilities, FEW, top_k=1)
    assert found["top_k_accuracy"] == found["accuracy"]


def test_metrics_do_not_depend_on_the_order_of_rows() -> None:
    targets, probabilities = random_case(np.random.default_rng(14))
    turned = classification_metrics(targets[::-1], probabilities[::-1], FEW, top_k=2)
    for name, metric in classification_metrics(targets, probabilities, FEW, top_k=2).items():
        assert turned[name].value == pytest.approx(metric.value, abs=TOLERANCE)


def test_bins_of_confidence_hold_every_row_once() -> None:
    generator = np.random.default_rng(15)
    confidences, hits = generator.random(200), generator.random(200) < 0.5
    bins = reliability_bins(confidences, hits)
    assert [bin.rows for bin in bins] == [13 + (k % 3 == 0) for k in range(15)]
    assert all(before.high < after.low for before, after in pairwise(bins))
    error = sum(bin.rows * abs(bin.confidence - bin.accuracy) for bin in bins) / 200
    assert calibration_errors(confidences, hits, np.ones((1, 200)))[0] == pytest.approx(error)


def test_equal_confidences_share_a_bin() -> None:
    assert [
        bin.rows
        for bin in reliability_bins(np.array([1.0] * 31 + [0.5] * 10), np.ones(41, dtype=bool))
    ] == [10, 31]


# refusals


@pytest.mark.parametrize(
    ("targets", "probabilities", "text"),
    [
        ([0, 1], [[0.5, 0.5], [np.nan, 0.5]], "row 1"),
        ([0, 1], [[0.5, 0.5], [2.0, -1.0]], "row 1"),
        ([0, 1], [[0.5, 0.5], [0.2, 0.2]], "sum to 1"),
        ([], np.zeros((0, 2)), "at least one of each"),
        ([0], [0.5], "expected (rows, classes)"),
        ([2], [[0.5, 0.5]], "from 0 to 1"),
        ([-1], [[0.5, 0.5]], "from 0 to 1"),
        ([0.5], [[0.5, 0.5]], "whole number"),
        ([np.nan], [[0.5, 0.5]], "not a class index"),
        ([0, 1], [[0.5, 0.5]], "2 targets"),
    ],
)
def test_classification_metrics_refuse_invalid_answers(
    targets: list[float], probabilities: list[list[float]], text: str
) -> None:
    with pytest.raises(MetricError) as caught:
        classification_metrics(targets, probabilities, FEW)
    assert text in str(caught.value)


def test_a_metric_of_another_task_is_refused() -> None:
    with pytest.raises(MetricError, match="rmse: not a metric of this task"):
        measure("image_classification", [0, 1], one_hot([0, 1], 2), FEW, names=["accuracy", "rmse"])


@pytest.mark.parametrize(
    ("targets", "values", "text"),
    [
        ([1.0, np.nan], [1.0, 2.0], "targets: row 1"),
        ([1.0, 2.0], [np.inf, 2.0], "values: row 0"),
        ([], [], "at least one row"),
        ([1.0], [1.0], "at least 2"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "2 targets and 3 values"),
        ([1.0, 2.0], [[1.0, 2.0], [1.0, 2.0]], "expected (rows,)"),
    ],
)
def test_regression_metrics_refuse_invalid_answers(
    targets: list[float], values: list[float], text: str
) -> None:
    with pytest.raises(MetricError) as caught:
        regression_metrics(targets, values, FEW)
    assert text in str(caught.value)
