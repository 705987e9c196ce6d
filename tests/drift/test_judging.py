"""Drift is told from chance: the budget of false alarms is kept, and what has to be found is found.

bench/drift_laws.py has the same in full: 1,000 streams of 30 days.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.judging import JOINT, MIN_ROWS, Budget, judge, judge_at
from slipway.drift.reference import Reference, ReferenceRows
from slipway.drift.statistics import Comparison, kolmogorov_smirnov, mann_whitney, psi
from slipway.drift.window import Window
from tests.drift.populations import ORDINARY, Population, features_of_rows, reference_of, window_of

Law = Callable[[NDArray[np.int64], NDArray[np.int64], float], Comparison]
LARGE = reference_of(ORDINARY.draw(np.random.default_rng(1), 5000))
WINDOW_ROWS = 1000


def _share_found(
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
def test_drift_free_windows_raise_no_more_alarms_than_the_budget(
    num_reference: int, num_rows: int
) -> None:
    """At a level of 5 % for a window, with a new reference for every ten: Bonferroni makes fewer, never more."""
    random, alarms = np.random.default_rng(7), 0
    for _ in range(15):
        reference = reference_of(ORDINARY.draw(random, num_reference))
        alarms += sum(
            judge_at(reference, window_of(reference, ORDINARY.draw(random, num_rows)), 0.05).drifted
            for _ in range(10)
        )
    assert (
        alarms <= 17
    )  # of 150; 7.5 are allowed on average, 17 or more come once in 1,000 times at that


def test_a_rule_of_thumb_would_cry_wolf() -> None:
    """What the law is for: of windows of 100 rows, the stability index of one feature in three is above 0.1 without drift."""
    random = np.random.default_rng(8)
    windows = random.multinomial(100, [0.1] * 10, size=4000)
    found = psi(windows, np.full(10, 10_000), 1e-3)
    assert (found.values > 0.1).mean() > 0.25
    assert found.exceeded.mean() < 0.004


@pytest.mark.parametrize("statistic", [psi, kolmogorov_smirnov, mann_whitney])
@pytest.mark.parametrize(
    ("num_reference", "num_rows"), [(300, 200), (2000, 100), (2000, 1000), (2000, 8000)]
)
def test_each_law_holds_for_windows_and_references_of_few_rows(
    statistic: Law, num_reference: int, num_rows: int
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
def test_a_law_without_the_references_own_error_alarms_too_often(statistic: Law) -> None:
    """The twin: taking 300 rows for the truth, as if they were 30 million, breaks the level by far."""
    random, exceeded = np.random.default_rng(9), []
    for _ in range(100):
        numbers = np.sort(random.uniform(size=300))
        windows = random.multinomial(
            1000, np.diff([0, *numbers[np.arange(30, 300, 30)], 1]), size=50
        )
        exceeded.append(statistic(windows, np.full(10, 3_000_000), 1e-2).exceeded.mean())
    assert np.mean(exceeded) > 0.1


@pytest.mark.process
def test_a_quarter_of_a_deviation_in_one_of_twenty_columns_is_found() -> None:
    assert _share_found(Population(shift=0.25), 11) >= 0.95
    assert _share_found(ORDINARY, 11) == 0


@pytest.mark.process
def test_ten_points_more_of_a_class_are_found() -> None:
    assert _share_found(Population(first_class=0.2), 12) >= 0.95


def test_the_feature_that_drifted_comes_first() -> None:
    verdict = judge(
        LARGE, window_of(LARGE, Population(shift=-0.4).draw(np.random.default_rng(13), WINDOW_ROWS))
    )
    first = verdict.features[0]
    assert (first.name, first.drifted, first.value < 0) == ("column x0", True, True)
    assert first.p_value < verdict.level
    assert first.strength > 1 > verdict.features[-1].strength
    assert {feature.name for feature in verdict.features if feature.drifted} <= {"column x0", JOINT}
    assert {feature.name for feature in verdict.features} == {*LARGE.names, JOINT}


def test_a_change_of_spread_alone_is_found() -> None:
    rows = ORDINARY.draw(np.random.default_rng(14), WINDOW_ROWS)
    rows.inputs[:, 4] *= 1.6
    verdict = judge(LARGE, window_of(LARGE, rows))
    assert (verdict.features[0].name, verdict.features[0].statistic) == ("column x4", "psi")


def test_numbers_that_begin_to_go_together_are_found_by_all_of_them_together() -> None:
    rows = ORDINARY.draw(np.random.default_rng(15), WINDOW_ROWS)
    common = np.random.default_rng(16).normal(size=(WINDOW_ROWS, 1))
    mixed = (np.sqrt(0.5) * rows.inputs + np.sqrt(0.5) * common).astype(
        np.float32
    )  # each column as before
    verdict = judge(LARGE, window_of(LARGE, replace(rows, inputs=mixed)))
    assert [feature.name for feature in verdict.features if feature.drifted] == [JOINT]


def test_values_where_the_reference_has_none_are_found() -> None:
    """A constant column, as the share of white pixels often is, that begins to vary."""
    rows = ORDINARY.draw(np.random.default_rng(17), 3000)
    rows.inputs[:, 5] = 1.0
    reference = reference_of(rows)
    few, many = (ORDINARY.draw(np.random.default_rng(18), WINDOW_ROWS) for _ in range(2))
    few.inputs[:, 5] = many.inputs[:, 5] = 1.0
    assert not judge(reference, window_of(reference, few)).drifted
    few.inputs[:2, 5] = many.inputs[:80, 5] = 1.5
    assert not judge(reference, window_of(reference, few)).drifted
    assert judge(reference, window_of(reference, many)).features[0].name == "column x5"


def test_missing_values_where_there_were_few_are_found() -> None:
    rows = ORDINARY.draw(np.random.default_rng(19), WINDOW_ROWS)
    features = features_of_rows(rows)
    features[:150, LARGE.names.index("column x7")] = np.nan
    window = Window(LARGE)
    window.add(features)
    verdict = judge(LARGE, window)
    assert [feature.name for feature in verdict.features if feature.drifted] == ["column x7"]


def test_a_window_below_the_laws_validity_is_not_judged() -> None:
    rows = Population(shift=5.0).draw(np.random.default_rng(20), MIN_ROWS)
    short = judge(
        LARGE, window_of(LARGE, ReferenceRows(*(part[:-1] for part in vars(rows).values())))
    )
    assert (short.verdict, short.features, short.drifted) == ("too_small", [], False)
    assert judge(LARGE, window_of(LARGE, rows)).verdict == "drifted"


def test_the_budget_is_shared_by_the_windows_of_30_days() -> None:
    assert Budget().level == pytest.approx(1 / 720)
    assert Budget(false_alarms_per_30_days=2, windows_per_day=48).level == pytest.approx(2 / 1440)
    assert Budget(windows_per_day=0.001).level == 0.5
    windows = window_of(LARGE, ORDINARY.draw(np.random.default_rng(21), WINDOW_ROWS))
    thresholds = [
        judge(LARGE, windows, Budget(windows_per_day=number)).features[0].threshold
        for number in (1, 24, 1440)
    ]
    assert thresholds == sorted(thresholds)
    assert thresholds[0] < thresholds[-1]
