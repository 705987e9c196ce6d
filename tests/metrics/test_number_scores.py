"""Errors by target range: hand-computed ranges, every row once, refusals."""

import numpy as np
import pytest

from slipway.metrics.number_scores import errors_by_target
from slipway.metrics.scores import Resampling, measure
from slipway.system.errors import MetricError

HUNDRED = Resampling(seed=1, num_samples=100, confidence=0.95)


def test_errors_by_target_measures_each_range_separately() -> None:
    found = errors_by_target([4.0, 1.0, 3.0, 2.0], [[6.0], [1.0], [1.0], [3.0]], 2, HUNDRED)
    assert [(part.low, part.high, part.mae.rows) for part in found] == [(1, 2, 2), (3, 4, 2)]
    assert [part.mae.value for part in found] == [0.5, 2]
    assert [part.mean_error.value for part in found] == [0.5, 0]
    assert [part.rmse.value for part in found] == [pytest.approx(0.5**0.5), 2]


def test_errors_of_a_single_range_equal_the_metrics_of_all_rows() -> None:
    generator = np.random.default_rng(0)
    targets = generator.normal(size=60)
    values = targets + generator.normal(size=60)
    (whole,) = errors_by_target(targets, values, 1, HUNDRED)
    expected = measure("table_regression", targets, values, HUNDRED)
    assert whole.mae == expected["mae"]
    assert whole.rmse.value == pytest.approx(expected["rmse"].value, abs=1e-12)
    assert [whole.rmse.low, whole.rmse.high] == pytest.approx(
        [expected["rmse"].low, expected["rmse"].high], abs=1e-12
    )


def test_every_row_is_in_one_range_and_equal_targets_share_a_range() -> None:
    targets = np.array([0.0] * 50 + list(range(1, 51)))
    found = errors_by_target(targets, targets, 10, HUNDRED)
    assert sum(part.mae.rows for part in found) == 100
    assert [part.mae.rows for part in found] == [50, 10, 10, 10, 10, 10]
    assert [(part.low, part.high) for part in found][:2] == [(0, 0), (1, 10)]


def test_there_are_at_most_as_many_ranges_as_rows() -> None:
    assert [
        part.mae.rows for part in errors_by_target([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 10, HUNDRED)
    ] == [1, 1, 1]


@pytest.mark.parametrize(
    ("targets", "num_ranges", "text"),
    [
        ([1.0, np.nan], 2, "targets: row 1"),
        ([1.0], 2, "at least 2"),
        ([1.0, 2.0], 0, "num_ranges is 0"),
    ],
)
def test_errors_by_target_refuses_zero_ranges_and_bad_values(
    targets: list[float], num_ranges: int, text: str
) -> None:
    with pytest.raises(MetricError) as caught:
        errors_by_target(targets, targets, num_ranges, HUNDRED)
    assert text in str(caught.value)
