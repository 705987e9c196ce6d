import numpy as np

from slipway.data.rules.outliers import robust_deviations


def test_outliers_among_counts_that_are_mostly_zero_are_measured_among_nonzero_counts() -> None:
    counts = np.array([0] * 80 + [1, 2, 3, 2, 1, 4, 2, 3, 2, 3] * 2 + [500.0])
    median, deviations = robust_deviations(counts)
    assert median == 2
    assert np.flatnonzero(deviations > 8).tolist() == [100]


def test_a_rare_true_in_a_boolean_column_is_not_an_outlier() -> None:
    _, deviations = robust_deviations(np.array([0.0] * 99 + [1.0]))
    assert not deviations.any()
