"""Metrics of several labels agree with scikit-learn, and thresholds are the best there are."""

import numpy as np
import pytest
from sklearn import metrics as reference

from slipway.artifacts.uncertainty import flipped_rows, given_labels, leads
from slipway.metrics.class_uncertainty import LabelUncertainty
from slipway.metrics.decision import best_threshold
from slipway.metrics.label_scores import LabelAnswers
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, baseline_scores, measure, why_absent
from slipway.system.errors import MetricError

pytestmark = pytest.mark.unit

GENERATOR = np.random.default_rng(4)
TARGETS = (GENERATOR.random((300, 5)) < [0.5, 0.3, 0.2, 0.1, 0.05]).astype(np.uint8)
SHARES = np.clip(0.35 * TARGETS + GENERATOR.random((300, 5)) * 0.6, 0, 1).astype(np.float32)
THRESHOLDS = [0.5, 0.4, 0.45, 0.3, 0.6]
RESAMPLING = Resampling(seed=7, num_samples=200, confidence=0.95)
TASK = "table_multilabel"


def test_label_metrics_agree_with_scikit_learn() -> None:
    found = measure(TASK, TARGETS, SHARES, RESAMPLING, thresholds=THRESHOLDS)
    given = given_labels(SHARES, THRESHOLDS)
    expected = {
        "subset_accuracy": reference.accuracy_score(TARGETS, given),
        "mean_average_precision": reference.average_precision_score(TARGETS, SHARES),
        "f1_micro": reference.f1_score(TARGETS, given, average="micro"),
        "f1_macro": reference.f1_score(TARGETS, given, average="macro"),
        "precision_micro": reference.precision_score(TARGETS, given, average="micro"),
        "recall_micro": reference.recall_score(TARGETS, given, average="micro"),
        "hamming_loss": reference.hamming_loss(TARGETS, given),
        "log_loss": np.mean(
            [reference.log_loss(TARGETS[:, k], SHARES[:, k].astype(float)) for k in range(5)]
        ),
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected, abs=1e-6)
    assert all(metric.low <= metric.value <= metric.high for metric in found.values())


def test_a_threshold_changes_the_labels_but_not_the_average_precision() -> None:
    low, high = (
        measure(TASK, TARGETS, SHARES, RESAMPLING, thresholds=[value] * 5) for value in (0.2, 0.8)
    )
    assert low["mean_average_precision"] == high["mean_average_precision"]
    assert low["recall_micro"].value > high["recall_micro"].value


def test_average_precision_is_absent_if_no_label_separates_the_rows() -> None:
    constant = np.tile([1, 0, 0, 0, 0], (300, 1))
    assert list(why_absent(TASK, constant, 5, None)) == ["mean_average_precision"]
    assert "mean_average_precision" not in measure(TASK, constant, SHARES, RESAMPLING)
    assert why_absent(TASK, TARGETS, 5, None) == {}


def test_the_baseline_predicts_labels_that_most_training_rows_have() -> None:
    found = baseline_scores(TASK, TARGETS, TARGETS, 5, None)
    prevalence = TARGETS.mean(axis=0)
    assert found["mean_average_precision"] == pytest.approx(prevalence.mean())
    assert found["hamming_loss"] == pytest.approx(np.minimum(prevalence, 1 - prevalence).mean())


def test_paired_difference_of_equal_label_answers_is_zero_without_width() -> None:
    same = paired_difference(
        TASK,
        "subset_accuracy",
        TARGETS,
        SHARES,
        SHARES,
        RESAMPLING,
        thresholds=(THRESHOLDS, THRESHOLDS),
    )
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("targets", "shares", "message"),
    [
        (TARGETS, SHARES * 3, "expected numbers from 0 to 1"),
        (TARGETS * 0.5, SHARES, "expected 0 or 1"),
        (TARGETS[:, :4], SHARES, "expected a number for each label"),
        (TARGETS[:, 0], SHARES, "expected \\(rows, labels\\)"),
    ],
)
def test_label_metrics_refuse_invalid_numbers_and_shapes(
    targets: np.ndarray, shares: np.ndarray, message: str
) -> None:
    with pytest.raises(MetricError, match=message):
        LabelAnswers(targets, shares)


def test_chosen_label_threshold_has_the_largest_f1_of_all() -> None:
    for label in range(5):
        own = TARGETS[:, label] > 0
        chosen = best_threshold(SHARES[:, label], own)
        precision, recall, _ = reference.precision_recall_curve(own, SHARES[:, label])
        largest = max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
        found = reference.f1_score(own, SHARES[:, label] >= np.float32(chosen))
        assert found == pytest.approx(largest, abs=1e-12)


def test_threshold_of_a_label_in_no_row_or_all_rows_is_a_half() -> None:
    shares = np.linspace(0, 1, 20, dtype=np.float32)
    assert best_threshold(shares, np.zeros(20, bool)) == 0.5
    assert best_threshold(shares, np.ones(20, bool)) == 0.5


def test_each_label_has_the_temperature_that_fits_its_logits() -> None:
    shares = GENERATOR.random((4000, 2))
    targets = (GENERATOR.random((4000, 2)) < shares).astype(np.uint8)
    logits = np.log(shares / (1 - shares)) * [3.0, 0.5]
    assert LabelUncertainty.temperature(logits, targets) == pytest.approx([3.0, 0.5], rel=0.1)


def test_prediction_sets_contain_all_labels_of_a_row_with_the_requested_coverage() -> None:
    half = len(SHARES) // 2
    least = LabelUncertainty.threshold(SHARES[:half], TARGETS[:half], 0.9)
    held = ((SHARES[half:] >= least) | (TARGETS[half:] == 0)).all(axis=1)
    assert 0.8 < held.mean() <= 1
    assert LabelUncertainty.threshold(SHARES[:3], TARGETS[:3], 0.9) == 0.0


def test_a_row_flips_if_any_label_crosses_its_own_threshold() -> None:
    before = np.array([[0.6, 0.2], [0.41, 0.2]], np.float32)
    after = np.array([[0.7, 0.1], [0.39, 0.2]], np.float32)
    thresholds = [0.4, 0.5]
    assert flipped_rows(after, before, (thresholds, thresholds)).tolist() == [1]
    assert flipped_rows(after, before).tolist() == []  # the most probable label stays
    assert leads(before, thresholds) == pytest.approx([0.2, 0.01])
