"""Drift verdicts respect the budget of false alarms and detect the changes they must detect.

bench/drift_laws.py runs the full version: 1,000 streams of 30 days.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.reference import Reference
from slipway.drift.two_sample_tests import TwoSampleTest, kolmogorov_smirnov, mann_whitney, psi
from slipway.drift.verdict import JOINT, MIN_ROWS, Budget, judge
from slipway.drift.window import Window
from tests.drift.populations import (
    ORDINARY,
    Population,
    ReferenceRows,
    features_of_rows,
    reference_of,
    window_of,
)

SampleTest = Callable[[NDArray[np.int64], NDArray[np.int64], float], TwoSampleTest]
LARGE = reference_of(ORDINARY.draw(np.random.default_rng(1), 5000))
WINDOW_ROWS = 1000


def _fraction_drifted(
    population: Population,
    seed: int,
    windows: int = 40,
    reference: Reference = LARGE,
    rows: int = WINDOW_ROWS,
) -> float:
    random = np.random.default_rng(seed)
    return float(
        np.mean(
            [
                judge(reference, window_of(reference, population.draw(random, rows))).drifted
                for _ in range(windows)
            ]
        )
    )


@pytest.mark.process
@pytest.mark.parametrize(("num_reference", "num_rows"), [(300, 200), (1500, 1000)])
def test_windows_without_drift_alarm_no_more_often_than_the_level(
    num_reference: int, num_rows: int
) -> None:
    """Level 5 %, a new reference for every ten windows. Bonferroni errs towards fewer alarms."""
    random, alarms = np.random.default_rng(7), 0
    for _ in range(15):
        reference = reference_of(ORDINARY.draw(random, num_reference))
        alarms += sum(
            judge(reference, window_of(reference, ORDINARY.draw(random, num_rows)), 0.05).drifted
            for _ in range(10)
        )
    assert (
        alarms <= 17
    )  # of 150; the level allows 7.5 on average, and 17 or more once in 1,000 runs


def test_the_usual_psi_threshold_of_one_tenth_alarms_often_without_drift() -> None:
    """The usual rule of thumb would alarm on one feature in three in windows of 100 rows."""
    random = np.random.default_rng(8)
    windows = random.multinomial(100, [0.1] * 10, size=4000)
    found = psi(windows, np.full(10, 10_000), 1e-3)
    assert (found.values > 0.1).mean() > 0.25
    assert found.exceeded.mean() < 0.004


@pytest.mark.parametrize("statistic", [psi, kolmogorov_smirnov, mann_whitney])
@pytest.mark.parametrize(
    ("num_reference", "num_rows"), [(300, 200), (2000, 100), (2000, 1000), (2000, 8000)]
)
def test_each_statistic_keeps_its_level_with_small_windows_and_references(
    statistic: SampleTest, num_reference: int, num_rows: int
) -> None:
    random = np.random.default_rng(9)
    exceeded = []
    for _ in range(300):
        numbers = np.sort(random.uniform(size=num_reference))
        edges = numbers[np.arange(1, 10) * num_reference // 10]
        windows = random.multinomial(num_rows, np.diff([0, *edges, 1]), size=200)
        exceeded.append(
            statistic(
                windows,
                np.diff([0, *(np.arange(1, 10) * num_reference // 10), num_reference]),
                1e-2,
            ).exceeded.mean()
        )
    assert np.mean(exceeded) < 0.015


@pytest.mark.parametrize("statistic", [psi, kolmogorov_smirnov, mann_whitney])
def test_ignoring_the_references_sampling_error_breaks_the_level(statistic: SampleTest) -> None:
    """Counter-check: 300 reference rows are treated as if they were 30 million."""
    random, exceeded = np.random.default_rng(9), []
    for _ in range(100):
        numbers = np.sort(random.uniform(size=300))
        windows = random.multinomial(
            1000, np.diff([0, *numbers[np.arange(30, 300, 30)], 1]), size=50
        )
        exceeded.append(statistic(windows, np.full(10, 3_000_000), 1e-2).exceeded.mean())
    assert np.mean(exceeded) > 0.1


@pytest.mark.process
def test_shift_by_a_quarter_deviation_in_one_of_twenty_columns_is_detected() -> None:
    assert _fraction_drifted(Population(shift=0.25), 11) >= 0.95
    assert _fraction_drifted(ORDINARY, 11) == 0


@pytest.mark.process
def test_ten_points_more_of_one_predicted_class_are_detected() -> None:
    assert _fraction_drifted(Population(first_class=0.2), 12) >= 0.95


def test_verdict_lists_the_drifted_feature_first() -> None:
    verdict = judge(
        LARGE, window_of(LARGE, Population(shift=-0.4).draw(np.random.default_rng(13), WINDOW_ROWS))
    )
    first = verdict.features[0]
    assert (first.name, first.drifted, first.value < 0) == ("column x0", True, True)
    assert first.p_value < verdict.level
    assert first.strength > 1 > verdict.features[-1].strength
    assert {feature.name for feature in verdict.features if feature.drifted} <= {"column x0", JOINT}
    assert {feature.name for feature in verdict.features} == {
        *(feature.name for feature in LARGE.features),
        JOINT,
    }


def test_change_of_spread_is_detected_by_psi() -> None:
    rows = ORDINARY.draw(np.random.default_rng(14), WINDOW_ROWS)
    rows.inputs[:, 4] *= 1.6
    verdict = judge(LARGE, window_of(LARGE, rows))
    assert (verdict.features[0].name, verdict.features[0].statistic) == ("column x4", "psi")


def test_new_correlation_between_numbers_is_detected_only_by_the_joint_test() -> None:
    rows = ORDINARY.draw(np.random.default_rng(15), WINDOW_ROWS)
    common = np.random.default_rng(16).normal(size=(WINDOW_ROWS, 1))
    mixed = (np.sqrt(0.5) * rows.inputs + np.sqrt(0.5) * common).astype(
        np.float32
    )  # each column keeps its own distribution
    verdict = judge(LARGE, window_of(LARGE, replace(rows, inputs=mixed)))
    assert [feature.name for feature in verdict.features if feature.drifted] == [JOINT]


def test_constant_column_that_begins_to_vary_is_detected() -> None:
    rows = ORDINARY.draw(np.random.default_rng(17), 3000)
    rows.inputs[:, 5] = 1.0
    reference = reference_of(rows)
    few, many = (ORDINARY.draw(np.random.default_rng(18), WINDOW_ROWS) for _ in range(2))
    few.inputs[:, 5] = many.inputs[:, 5] = 1.0
    assert not judge(reference, window_of(reference, few)).drifted
    few.inputs[:2, 5] = many.inputs[:80, 5] = 1.5
    assert not judge(reference, window_of(reference, few)).drifted
    assert judge(reference, window_of(reference, many)).features[0].name == "column x5"


def test_more_missing_values_are_detected() -> None:
    rows = ORDINARY.draw(np.random.default_rng(19), WINDOW_ROWS)
    features = features_of_rows(rows)
    features[:150, LARGE.column("column x7")] = np.nan
    window = Window(LARGE)
    window.add(features)
    verdict = judge(LARGE, window)
    assert [feature.name for feature in verdict.features if feature.drifted] == ["column x7"]


def test_window_below_the_minimum_number_of_rows_is_too_small() -> None:
    rows = Population(shift=5.0).draw(np.random.default_rng(20), MIN_ROWS)
    short = judge(
        LARGE, window_of(LARGE, ReferenceRows(*(part[:-1] for part in vars(rows).values())))
    )
    assert (short.verdict, short.features, short.drifted) == ("too_small", [], False)
    assert judge(LARGE, window_of(LARGE, rows)).verdict == "drifted"


def test_budget_is_divided_among_the_windows_of_30_days() -> None:
    assert Budget().level == pytest.approx(1 / 720)
    assert Budget(false_alarms_per_30_days=2, windows_per_day=48).level == pytest.approx(2 / 1440)
    assert Budget(windows_per_day=0.001).level == 0.5
    windows = window_of(LARGE, ORDINARY.draw(np.random.default_rng(21), WINDOW_ROWS))
    thresholds = [
        judge(LARGE, windows, Budget(windows_per_day=number).level).features[0].threshold
        for number in (1, 24, 1440)
    ]
    assert thresholds == sorted(thresholds)
    assert thresholds[0] < thresholds[-1]
