import numpy as np

from slipway.data.rules.outliers import robust_deviations


def test_outliers_of_mostly_zero_counts_are_judged_among_the_other_counts() -> None:
    counts = np.array([0] * 80 + [1, 2, 3, 2, 1, 4, 2, 3, 2, 3] * 2 + [500.0])
    median, deviations = robust_deviations(counts)
    assert median == 2
    assert np.flatnonzero(deviations > 8).tolist() == [100]


def test_a_rare_true_in_a_boolean_column_is_not_an_outlier() -> None:
    _, deviations = robust_deviations(np.array([0.0] * 99 + [1.0]))
    assert not deviations.any()
