"""Triggers: drift that a later window confirms, quality below its objective, enough labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import Bundle
from slipway.config.sections import Gate
from slipway.drift.reference import Reference
from slipway.drift.verdict import judge
from slipway.loop.triggers import (
    confirmed_drift,
    enough_labels,
    missed_objective,
    moved_further,
    settled_span,
)
from slipway.traffic.monitoring_records import JoinedLabel, JudgedWindow
from tests.drift.populations import Population, reference_of, window_of
from tests.loop.cases import SECTION, loop_params, write_steps
from tests.serving.bundles import write_inert_bundle


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


SHIFTS = Population(), Population(shift=0.8), Population(shift=1.6)
BASE, MOVED, FURTHER = range(3)


def judged(reference: Reference, *populations: int) -> list[JudgedWindow]:
    """Hourly windows of 300 rows, with the verdict of the service."""
    found = []
    for place, population in enumerate(populations):
        rows = SHIFTS[population].draw(np.random.default_rng(place), 300)
        window = window_of(reference, rows)
        drifted = {one.name for one in judge(reference, window).features if one.drifted}
        found.append(
            JudgedWindow(
                "v/fp32",
                3600.0 * place,
                3600.0 * (place + 1),
                frozenset(drifted),
                window.to_bytes(),
                3600.0,
            )
        )
    return found


def test_after_a_cycle_without_a_gain_only_traffic_that_moved_further_is_drift() -> None:
    reference = reference_of(SHIFTS[BASE].draw(np.random.default_rng(99), 1000))
    windows = judged(reference, *[MOVED] * 6, *[FURTHER] * 2, *[BASE] * 2)
    span = windows[0].opened, windows[3].closed
    stayed, further, back = (windows[begin : begin + 2] for begin in (4, 6, 8))
    for later, is_drift in ((stayed, False), (further, True), (back, False)):
        found = moved_further([*windows[:4], *later], lambda model: reference, span)
        assert [window.opened for window in found] == [window.opened for window in later]
        assert (confirmed_drift(found, span[1]) is not None) == is_drift
    # Without stored windows of the span, the first judgement stands.
    assert confirmed_drift(moved_further(stayed, lambda model: reference, span), span[1])


def test_a_cycle_without_a_gain_settles_its_traffic_until_labels_have_doubled(
    tmp_path: Path,
) -> None:
    def span(known: int, version: str = "v", outcome: str = "no_gain", since: float = 400.0) -> Any:
        steps: dict[str, Any] = {
            "triggered": {"since": since, "served": "v"},
            "collected": {},
            "ended": {"outcome": outcome},
        }
        cycle = write_steps(tmp_path / f"{known}-{version}-{outcome}-{since}", steps)
        return settled_span(cycle, version, lambda begin, end: known if end is None else 100)

    assert span(199) == (400.0, 1000.0)
    settled_otherwise = [
        span(200),
        span(199, version="w"),
        span(199, outcome="promoted"),
        span(199, since=0.0),
        settled_span(None, "v", lambda begin, end: 0),
    ]
    assert settled_otherwise == [None] * 5


def labels(num_right: int, num_wrong: int) -> list[JoinedLabel]:
    right = [JoinedLabel("a", "cat", "cat", 0.0, 0.0)] * num_right
    return [*right, *[JoinedLabel("a", "cat", "dog", 0.0, 0.0)] * num_wrong]


@pytest.fixture
def manifest(tmp_path: Path) -> Bundle:
    return write_inert_bundle(tmp_path / "bundle").manifest


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
