"""The user's own metrics are measured with intervals like the built-in ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipway.metrics.scores import Resampling, measure
from slipway.metrics.user_metrics import UserMetric, measure_user_metrics
from slipway.system.errors import MetricError
from slipway.system.user_code import UserCode

RESAMPLING = Resampling(seed=3, num_samples=200, confidence=0.9)
GENERATOR = np.random.default_rng(1)
TARGETS = GENERATOR.integers(0, 3, 80).astype(np.float64)
OUTPUTS = GENERATOR.dirichlet(np.ones(3), 80).astype(np.float32)
VALUES = GENERATOR.normal(size=(80, 1)).astype(np.float32)


def metric(function: Callable[..., Any]) -> UserMetric:
    code = UserCode(key="evaluate.metrics", name=f"tried:{function.__name__}", sha256="0" * 64)
    return UserMetric(code, function)


def log_loss(targets: Any, probabilities: Any) -> float:
    """Compute the built-in metric as a user's function."""
    assert targets.dtype == np.int64
    assert probabilities.dtype == np.float64
    return float(-np.log(probabilities[np.arange(len(targets)), targets]).mean())


def mae(targets: Any, values: Any) -> Any:
    """Return a NumPy number, as user functions often do."""
    assert values.shape == targets.shape
    return np.abs(values - targets).mean()


def test_a_user_metric_of_classes_equals_the_same_built_in_metric_with_its_interval() -> None:
    task = "image_classification"
    built_in = measure(task, TARGETS, OUTPUTS, RESAMPLING, names=["log_loss"])["log_loss"]
    own = metric(log_loss).measure(task, TARGETS, OUTPUTS, RESAMPLING)
    assert own.model_dump() == pytest.approx(built_in.model_dump(), rel=1e-6)


def test_a_user_metric_of_numbers_equals_the_same_built_in_metric_with_its_interval() -> None:
    task = "table_regression"
    built_in = measure(task, TARGETS, VALUES, RESAMPLING, names=["mae"])["mae"]
    own = metric(mae).measure(task, TARGETS, VALUES, RESAMPLING)
    assert own.model_dump() == pytest.approx(built_in.model_dump(), rel=1e-6)


def fails(targets: Any, outputs: Any) -> float:
    raise KeyError("f1")


def answers_none(targets: Any, outputs: Any) -> None:
    return None


def answers_nan(targets: Any, outputs: Any) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (fails, "raised KeyError: 'f1' (tests/metrics/test_user_metrics.py, line"),
        (answers_none, "returned None on 80 rows, expected one finite number"),
        (answers_nan, "returned nan on 80 rows, expected one finite number"),
    ],
)
def test_a_user_metric_that_returns_no_number_is_refused_with_its_line(
    function: Callable[..., Any], text: str, monkeypatch: pytest.MonkeyPatch, root: Any
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(MetricError) as raised:
        metric(function).measure("image_classification", TARGETS, OUTPUTS, RESAMPLING)
    assert str(raised.value).startswith(f"evaluate.metrics 'tried:{function.__name__}'")
    assert text in str(raised.value)
    assert "tests/metrics/test_user_metrics.py, line" in str(raised.value)
    assert "class indices (rows,) and probabilities (rows, classes)" in str(raised.value)


def share_of_first(targets: Any, outputs: Any) -> float:
    """Return NaN for some resamples, as a metric of two classes may."""
    return float("nan") if targets[0] == 2 else float((targets == targets[0]).mean())


def first_row_only(targets: Any, outputs: Any) -> float:
    """Return NaN except for the rows in their original order."""
    return 1.0 if np.array_equal(targets, TARGETS) else float("nan")


def test_undefined_resamples_are_left_out_unless_they_are_the_majority() -> None:
    targets = np.sort(TARGETS)
    found = metric(share_of_first).measure("image_classification", targets, OUTPUTS, RESAMPLING)
    assert found.low < found.value < found.high
    with pytest.raises(MetricError, match="more than half of the resamples have no value"):
        metric(first_row_only).measure("image_classification", TARGETS, OUTPUTS, RESAMPLING)


def test_user_metric_that_the_rows_do_not_define_is_left_out() -> None:
    metrics = [metric(log_loss), metric(fails)]
    found = measure_user_metrics(metrics, "image_classification", TARGETS, OUTPUTS, RESAMPLING)
    assert list(found) == ["log_loss"]
