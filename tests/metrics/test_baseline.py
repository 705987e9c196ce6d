"""The trivial predictor: fitted on training rows, measured on test rows."""

import numpy as np
import pytest
from sklearn import dummy, metrics

from slipway.kinds.targets import CLASS, NUMBER
from slipway.metrics.scores import baseline_scores

TRAIN = np.repeat([0.0, 1.0, 2.0], [20, 50, 30])
TEST = np.repeat([0.0, 1.0, 2.0], [30, 40, 10])


def test_baseline_classifier_agrees_with_scikit_learns_dummy() -> None:
    found = baseline_scores("image_classification", TRAIN, TEST, 3, 2)
    predictor = dummy.DummyClassifier(strategy="prior").fit(np.zeros((100, 1)), TRAIN)
    rows = np.zeros((len(TEST), 1))
    labels, probabilities = predictor.predict(rows), predictor.predict_proba(rows)
    assert list(found) == list(CLASS.metrics)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(TEST, labels))
    assert found["f1_macro"] == pytest.approx(
        metrics.f1_score(TEST, labels, average="macro", zero_division=0)
    )
    assert found["log_loss"] == pytest.approx(metrics.log_loss(TEST, probabilities))
    assert found["roc_auc"] == 0.5
    assert found["balanced_accuracy"] == pytest.approx(1 / 3)
    assert found["top_k_accuracy"] == pytest.approx(50 / 80)  # class 1 and class 2


def test_baseline_is_fitted_on_training_rows_only() -> None:
    """The test rows have another majority class and another mean."""
    shifted = baseline_scores(
        "image_classification", TRAIN, np.repeat([0.0, 1.0], [90, 10]), 3, None
    )
    assert shifted["accuracy"] == pytest.approx(0.1)
    number = baseline_scores(
        "table_regression", np.array([1.0, 3.0]), np.array([2.0, 6.0]), 0, None
    )
    assert list(number) == list(NUMBER.metrics)
    assert number["mae"] == pytest.approx(2.0)
    assert number["r2"] == pytest.approx(-1.0)


def test_metrics_that_the_test_rows_do_not_define_have_no_baseline() -> None:
    found = baseline_scores("image_classification", TRAIN, np.zeros(10), 3, 3)
    assert not {"roc_auc", "average_precision", "top_k_accuracy"} & found.keys()
    assert found["accuracy"] == 0.0
