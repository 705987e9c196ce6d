"""The state machine: each state and fact leads to one step, and none skips the decision."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from slipway.loop.journal import Cycle
from slipway.loop.machine import MAX_FAILURES, CandidateFacts, LoopFacts, next_step
from tests.loop.cases import DAY_S, loop_params, write_steps

NOW = 1000.0 + DAY_S
STEPS: dict[str, dict[str, Any]] = {
    "triggered": {"reasons": ["drift"], "since": 0.0, "served": "old"},
    "collected": {},
    "merged": {},
    "trained": {"version": "new"},
    "compared": {"outcome": None, "why": "better"},
    "shadowed": {},
    "requested": {"version": "new", "expires": 1000.0 + 7 * DAY_S},
    "notified": {},
    "decided": {"verdict": "approved", "by": "anna", "reason": "looks right"},
    "canary": {},
    "ended": {"outcome": "promoted", "why": ""},
}
RUNNING = CandidateFacts(workers=2, shadow="running", shadowed=50)


def facts(**changes: Any) -> LoopFacts:
    given: dict[str, Any] = {
        "now": NOW,
        "num_labels": 100,
        "served": "old",
        "candidate": RUNNING,
    } | changes
    return LoopFacts(**given)


def cycle_until(tmp_path: Path, last: str, **details: dict[str, Any]) -> Cycle:
    names = list(STEPS)[: list(STEPS).index(last) + 1]
    return write_steps(tmp_path, {name: details.get(name, STEPS[name]) for name in names})


@pytest.mark.parametrize(
    ("last", "action"),
    [
        ("triggered", "collect"),
        ("collected", "merge"),
        ("merged", "train"),
        ("trained", "compare"),
        ("compared", "shadow"),
        ("shadowed", "request"),
        ("requested", "notify"),
        ("notified", "wait"),
        ("decided", "canary"),
    ],
)
def test_each_finished_step_leads_to_the_next_one(tmp_path: Path, last: str, action: str) -> None:
    cycle = cycle_until(tmp_path, last)
    params = loop_params(webhook="http://localhost/hook")
    assert next_step(cycle, facts(), params).action == action


def test_without_a_decision_no_facts_lead_to_a_canary(tmp_path: Path) -> None:
    """Every state before the decision, with every combination of facts."""
    candidates = [
        CandidateFacts(workers, other, shadow, shadowed, canary)  # type: ignore[arg-type]
        for workers, other, shadow, shadowed, canary in itertools.product(
            (0, 2),
            ("", "x"),
            ("none", "running", "ended"),
            (0, 10**6),
            ("none", "running", "promoted", "returned"),
        )
    ]
    for number, last in enumerate(list(STEPS)[: list(STEPS).index("decided")]):
        cycle = cycle_until(tmp_path / str(number), last)
        for candidate, now, labels, served in itertools.product(
            candidates, (NOW, NOW + 30 * DAY_S), (0, 10**6), ("old", "other")
        ):
            found = facts(candidate=candidate, now=now, num_labels=labels, served=served)
            assert next_step(cycle, found, loop_params()).action != "canary"


def test_a_rejected_candidate_ends_its_cycle(tmp_path: Path) -> None:
    rejected = {"verdict": "rejected", "by": "anna", "reason": "odd labels"}
    step = next_step(cycle_until(tmp_path, "decided", decided=rejected), facts(), loop_params())
    assert (step.action, step.outcome, step.why) == (
        "end",
        "rejected",
        "rejected by anna: odd labels",
    )


def test_a_request_expires_without_a_decision(tmp_path: Path) -> None:
    cycle = cycle_until(tmp_path, "notified")
    assert next_step(cycle, facts(now=1000.0 + 7 * DAY_S - 1), loop_params()).action == "wait"
    step = next_step(cycle, facts(now=1000.0 + 7 * DAY_S), loop_params())
    assert (step.action, step.outcome) == ("end", "expired")


def test_a_change_of_the_served_model_ends_the_cycle_before_the_canary(tmp_path: Path) -> None:
    for number, last in enumerate(("triggered", "trained", "notified", "decided")):
        cycle = cycle_until(tmp_path / str(number), last)
        step = next_step(cycle, facts(served="other"), loop_params())
        assert (step.action, step.outcome) == ("end", "refused"), last


def test_a_promoted_canary_ends_the_cycle_although_it_is_served_now(tmp_path: Path) -> None:
    promoted = CandidateFacts(2, canary="promoted", why="300 of its requests")
    for number, last in enumerate(("decided", "canary")):
        cycle = cycle_until(tmp_path / str(number), last)
        step = next_step(cycle, facts(served="new", candidate=promoted), loop_params())
        # A killed process may have proposed it without a line in the journal.
        assert step.action == ("canary" if last == "decided" else "end")


@pytest.mark.parametrize("last", ["compared", "decided"])
def test_shadow_and_canary_wait_while_the_service_is_down_or_another_candidate_runs(
    tmp_path: Path, last: str
) -> None:
    cycle = cycle_until(tmp_path, last)
    for candidate in (CandidateFacts(0), CandidateFacts(2, other="x")):
        assert next_step(cycle, facts(candidate=candidate), loop_params()).action == "wait"


def test_a_cycle_waits_for_labels_and_a_new_trigger_for_the_pause_after_a_cycle(
    tmp_path: Path,
) -> None:
    cycle = cycle_until(tmp_path / "1", "triggered")
    assert next_step(cycle, facts(num_labels=99), loop_params()).action == "wait"
    ended = cycle_until(tmp_path / "2", "ended")
    reasons = ("drift",)
    assert next_step(ended, facts(reasons=reasons), loop_params()).action == "wait"
    later = facts(reasons=reasons, now=1000.0 + 7 * DAY_S)
    assert next_step(ended, later, loop_params()).action == "trigger"
    assert next_step(None, facts(), loop_params()).action == "wait"
    assert next_step(None, facts(reasons=reasons), loop_params()).action == "trigger"


def test_a_step_that_fails_three_times_ends_the_cycle(tmp_path: Path) -> None:
    cycle_until(tmp_path, "merged")
    for number in range(MAX_FAILURES):
        cycle = write_steps(tmp_path, {"failed": {"step": "train", "reason": "the disk is full"}})
        step = next_step(cycle, facts(), loop_params())
        assert step.action == ("train" if number + 1 < MAX_FAILURES else "end")
    assert step.outcome == "failed"
    assert "the disk is full" in step.why


def test_a_web_hook_that_fails_does_not_end_the_cycle(tmp_path: Path) -> None:
    cycle_until(tmp_path, "requested")
    for _ in range(MAX_FAILURES):
        cycle = write_steps(tmp_path, {"failed": {"step": "notify", "reason": "refused"}})
    step = next_step(cycle, facts(), loop_params(webhook="http://localhost/hook"))
    assert step.action == "wait"
    assert "new" in step.why


def test_a_shadow_that_ends_also_ends_the_cycle_and_its_request(tmp_path: Path) -> None:
    ended = CandidateFacts(2, shadow="ended", why="it answers NaN")
    for number, last in enumerate(("shadowed", "notified")):
        cycle = cycle_until(tmp_path / str(number), last)
        step = next_step(cycle, facts(candidate=ended), loop_params())
        assert (step.action, step.outcome) == ("end", "refused")
