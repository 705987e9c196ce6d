"""A candidate is proposed only for a gain on recent rows, without forgetting, without one key."""

import pytest

from slipway.loop.comparison import MIN_ROWS, judge
from tests.loop.cases import comparison, loop_params

LOOP = loop_params(max_forgetting=0.03)


def test_a_candidate_that_gains_on_recent_rows_and_loses_nothing_on_old_ones_is_proposed() -> None:
    outcome, why = judge(comparison((0.9, 0.7), (0.9, 0.9)), "passed", LOOP)
    assert outcome is None
    assert why.startswith("on recent rows accuracy is 0.")


def test_a_candidate_that_forgets_the_old_rows_is_worse() -> None:
    outcome, why = judge(comparison((0.9, 0.7), (0.8, 0.9)), "passed", LOOP)
    assert outcome == "worse"
    assert "forgets" in why


def test_a_candidate_of_equal_quality_is_proposed_only_if_no_gain_is_required() -> None:
    same = comparison((0.9, 0.9), (0.9, 0.9))
    assert judge(same, "passed", LOOP)[0] == "no_gain"
    relaxed = loop_params(require_gain=False, max_forgetting=0.05)
    assert judge(same, "passed", relaxed)[0] is None


def test_a_candidate_that_is_worse_on_recent_rows_is_not_proposed() -> None:
    relaxed = loop_params(require_gain=False, max_forgetting=0.03)
    assert judge(comparison((0.9, 0.9), (0.9, 0.7)), "passed", relaxed)[0] == "worse"


@pytest.mark.parametrize("gates", ["missed", "unjudged"])
def test_missed_gates_end_the_cycle(gates: str) -> None:
    found = judge(comparison((0.9, 0.7), (0.9, 0.9)), gates, LOOP)  # type: ignore[arg-type]
    assert found == ("refused", f"its quality gates are {gates}")


def test_a_gain_that_rests_on_one_key_is_not_proposed() -> None:
    """Key b flips labels: by its labels the candidate is better, by all others it is not."""
    poisoned = comparison(
        (0.9, 0.9), (0.9, 0.9), {"a": 200, "b": 300}, outputs_of_key={"b": (0.6, 0.95)}
    )
    assert poisoned.recent is not None
    assert poisoned.recent.loss.high < 0
    outcome, why = judge(poisoned, "passed", LOOP)
    assert outcome == "no_gain"
    assert "rests on the labels of key b alone" in why


def test_a_candidate_is_refused_if_too_few_keys_labelled_the_recent_rows() -> None:
    one = comparison((0.9, 0.7), (0.9, 0.9), {"a": 300})
    assert judge(one, "passed", LOOP)[0] is None
    outcome, why = judge(one, "passed", loop_params(min_keys=2, max_forgetting=0.03))
    assert outcome == "refused"
    assert "loop.min_keys is 2" in why


def test_a_candidate_is_refused_if_there_are_too_few_recent_test_rows() -> None:
    few = comparison((0.9, 0.7), (0.9, 0.9), {"a": MIN_ROWS - 1})
    assert judge(few, "passed", LOOP) == (
        "refused",
        "there are fewer than 20 recent test rows to compare on",
    )


def test_a_key_whose_labels_the_candidate_contradicts_ends_the_cycle() -> None:
    """The served model is wrong on recent rows, so its errors did not show the wrong labels."""
    wrong = comparison(
        (0.9, 0.6), (0.9, 0.9), {"a": 300, "bad": 100}, outputs_of_key={"bad": (0.53, 0.6)}
    )
    outcome, why = judge(wrong, "passed", LOOP)
    assert outcome == "wrong_labels"
    assert "bad: its 100 labels" in why


def test_collected_rows_from_before_the_trigger_are_not_compared_on() -> None:
    found = comparison((0.9, 0.7), (0.9, 0.9), {"": 200, "a": 300})
    assert found.recent is not None
    assert found.old is not None
    assert (found.recent.difference.rows, found.old.difference.rows) == (300, 1000)
    assert found.keys == {"a": 300}


def test_a_gain_on_the_newer_recent_rows_is_proposed_while_the_drift_goes_on() -> None:
    """The served model is right until late; on all recent rows its loss is not significant."""
    drifting = comparison(
        (0.9, 0.9), (0.9, 0.9), {"a": 400, "b": 50, "c": 350},
        outputs_of_key={"a": (0.95, 0.9), "b": (0.75, 0.95), "c": (0.8, 0.95)}, is_ordered=True,
    )  # fmt: skip
    assert drifting.recent is not None
    assert drifting.latest is not None
    assert drifting.latest.difference.rows == 400
    outcome, why = judge(drifting, "passed", LOOP)
    assert outcome is None
    assert why.startswith("on the newer recent rows")
