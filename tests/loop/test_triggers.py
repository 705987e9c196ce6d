"""Triggers: drift that a later window confirms, quality below its objective, enough labels."""

from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.bundle import Bundle
from slipway.config.sections import Gate
from slipway.loop.triggers import confirmed_drift, enough_labels, missed_objective
from slipway.traffic.monitoring_records import JoinedLabel, JudgedWindow
from tests.loop.cases import SECTION, loop_params
from tests.small_bundle import write_small_bundle


def windows(*drifted: str, model: str = "v/fp32") -> list[JudgedWindow]:
    return [
        JudgedWindow(model, 100.0 * place, 100.0 * place + 100, frozenset(names.split()))
        for place, names in enumerate(drifted)
    ]


@pytest.mark.parametrize(
    ("drifted", "expected"),
    [
        (("", "a", ""), None),  # alone
        (("a", "", "a"), None),  # not in a row
        (("a", "b"), None),  # of another feature
        (("", "a b", "b c"), 100.0),
        (("a", "a", ""), 0.0),  # it ended since, but was confirmed
    ],
)
def test_drift_is_confirmed_by_the_next_window_in_the_same_feature(
    drifted: tuple[str, ...], expected: float | None
) -> None:
    found = confirmed_drift(windows(*drifted), after=0.0)
    assert (found and found[1]) == expected


def test_windows_of_two_variants_do_not_confirm_each_other() -> None:
    assert confirmed_drift([*windows("a"), *windows("a", model="v/int8")], 0.0) is None


def test_drift_windows_from_before_the_last_cycle_do_not_count() -> None:
    assert confirmed_drift(windows("a", "a", "a"), after=100.0) == (
        "drift of a in two windows in a row",
        100.0,
    )
    assert confirmed_drift(windows("a", "a", "a"), after=101.0) is None


def labels(num_right: int, num_wrong: int) -> list[JoinedLabel]:
    right = [JoinedLabel("a", "cat", "cat", 0.0, 0.0)] * num_right
    return [*right, *[JoinedLabel("a", "cat", "dog", 0.0, 0.0)] * num_wrong]


@pytest.fixture
def manifest(tmp_path: Path) -> Bundle:
    return write_small_bundle(tmp_path / "bundle").manifest


def test_quality_triggers_only_if_the_whole_interval_misses_the_objective(
    manifest: Bundle,
) -> None:
    objective = {"accuracy": Gate(min=0.9, max=None)}
    assert "its objective at least 0.9" in missed_objective(manifest, labels(80, 40), objective)
    assert not missed_objective(manifest, labels(105, 15), objective)  # 0.875, 0.80 to 0.92
    assert not missed_objective(manifest, labels(0, 29), objective)  # too few rows


def test_new_labels_trigger_a_training_once_there_are_enough() -> None:
    params = loop_params(triggers={"drift": False, "objective": None, "new_labels": 50})
    assert enough_labels(50, params) == "50 new labels"
    assert not enough_labels(49, params)
    assert not enough_labels(10**6, loop_params(triggers=SECTION["triggers"]))


def test_drift_by_chance_is_confirmed_at_most_at_the_stated_rate() -> None:
    """In 60 days of hourly windows, 40 / 720 confirmed alarms are expected of 40 months."""
    random = np.random.default_rng(3)
    level, num_windows = 1 / 720, 20 * 60 * 24
    names = [f"f{number}" for number in range(10)]
    found = 0
    for _ in range(20):
        drawn = random.random((num_windows // 20, len(names))) < level / len(names)
        stream = windows(*(" ".join(np.array(names)[row]) for row in drawn))
        found += confirmed_drift(stream, 0.0) is not None
    assert found <= 1
