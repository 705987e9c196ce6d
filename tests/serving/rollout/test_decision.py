"""Decisions on a rollout: the sequential test's error rate and power, and the other rules."""

import math
import os
from typing import Any

import numpy as np
import pytest

from slipway.serving.rollout.decision import MIN_LATENCIES, PREPARE_S, decide
from slipway.serving.rollout.evidence import Counts, Evidence, total
from slipway.serving.rollout.reports import NO_COUNTS, Report, process_started
from slipway.serving.rollout.sequential import ALPHA, LOG_THRESHOLD, RATIOS, log_evidence
from slipway.serving.rollout.state import EMPTY, Allowed, Candidate, Model, Rollout, RolloutPlan

MODEL = Model(folder="0123456789ab-01234567", version="0123456789ab", digest="0" * 64)
ROUND = 1000  # requests between two looks


def candidate(**changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "id": 7,
        "mode": "canary",
        "model": MODEL,
        "replaces": None,
        "allowed": Allowed(),
        "plan": RolloutPlan(),
        "phase": "running",
        "since": 0.0,
        "slow_s": 0.1,
    }
    return Candidate.model_validate(fields | changes)


def rollout(**changes: Any) -> Rollout:
    return EMPTY.changed(candidate=candidate(**changes))


def report(**changes: Any) -> Report:
    """Return a report of this process, which is alive."""
    fields: dict[str, Any] = {
        "process": os.getpid(),
        "started": process_started(os.getpid()),
        "stopped": False,
        "revision": 1,
        "serving": "0" * 12,
        "folder": None,
        "problem": "",
        "candidate": 7,
        "phase": "prepared",
        "reason": "",
        "disagreement": 0.1,
        "counts": NO_COUNTS,
        "stable_p95_s": 0.01,
        "num_latencies": 0,
    }
    return Report.model_validate(fields | changes)


def counts(**changes: Any) -> Counts:
    return NO_COUNTS.model_copy(update=changes)


def test_expected_evidence_of_one_event_of_equal_models_is_at_most_one() -> None:
    for share in (0.01, 0.25, 0.5, 1.0):
        expected = share * math.exp(log_evidence({share: (1, 0)})) + (1 - share) * math.exp(
            log_evidence({share: (0, 1)})
        )
        assert expected == pytest.approx(1)
    assert (log_evidence({}), log_evidence({1.0: (1000, 0)})) == pytest.approx((0, 0))


def test_evidence_from_summed_counts_equals_that_of_single_events_in_any_order() -> None:
    parts = [{0.01: (3, 100), 0.05: (2, 30)}, {0.05: (1, 9)}]
    by_hand = [0.0] * len(RATIOS)
    for part in parts:
        for share, (here, there) in part.items():
            for number, ratio in enumerate(RATIOS):
                by_hand[number] += here * math.log(
                    ratio / (1 + share * (ratio - 1))
                ) - there * math.log(1 + share * (ratio - 1))
    assert log_evidence({0.01: (3, 100), 0.05: (3, 39)}) == pytest.approx(
        math.log(np.mean(np.exp(by_hand)))
    )


def ever_reached(
    rng: np.random.Generator, ratio: float, share: float, num_events: int, num_streams: int
) -> float:
    """Return the fraction of event streams whose evidence ever reaches the threshold."""
    of_candidate = rng.random((num_streams, num_events)) < share * ratio / (1 + share * (ratio - 1))
    best = np.full(num_streams, -np.inf)
    seen = np.cumsum(of_candidate, axis=1)
    number = np.arange(1, num_events + 1)
    logs = np.stack(
        [seen * math.log(one) - number * math.log1p(share * (one - 1)) for one in RATIOS]
    )
    best = np.logaddexp.reduce(logs, axis=0).max(axis=1) - math.log(len(RATIOS))
    return float((best >= LOG_THRESHOLD).mean())


@pytest.mark.process
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5])
def test_sequential_test_keeps_its_error_rate_when_it_runs_after_every_event(share: float) -> None:
    rng = np.random.default_rng(3)
    assert ever_reached(rng, 1.0, share, 500, 2000) <= ALPHA / 4 + 3 * math.sqrt(ALPHA / 4 / 2000)
    assert ever_reached(rng, 0.7, share, 500, 2000) <= ALPHA / 4  # a better one still less
    assert ever_reached(rng, 4.0, share, 500, 500) > 0.8  # so that the test above could fail


def simulated(
    rng: np.random.Generator,
    error_rates: tuple[float, float],
    slow_rates: tuple[float, float],
    differing: float,
) -> tuple[str, float]:
    """Simulate a rollout in which a tenth of requests is shadowed. Returns outcome and share."""
    state, now = rollout(step_since=0.0), 0.0
    events: dict[str, dict[str, tuple[int, int]]] = {"errors": {}, "slow": {}, "quality": {}}
    requests, shadowed, share = (0, 0), dict(NO_COUNTS.shadowed), 0.0
    while state.candidate:
        share = state.candidate.fraction
        of_candidate = int(rng.binomial(ROUND, share))
        numbers = (of_candidate, ROUND - of_candidate)
        for event, rates in (("errors", error_rates), ("slow", slow_rates)):
            before = events[event].get(repr(share), (0, 0))
            drawn = [
                int(rng.binomial(number, rate)) for number, rate in zip(numbers, rates, strict=True)
            ]
            events[event][repr(share)] = (before[0] + drawn[0], before[1] + drawn[1])
        copies = int(rng.binomial(numbers[1], 0.1))
        differ = int(rng.binomial(copies, differing))
        shadowed["differs"] += differ
        shadowed["agrees"] += copies - differ
        requests = (requests[0] + numbers[0], requests[1] + numbers[1])
        found = Counts.model_construct(
            events=events, requests=requests, shadowed=shadowed, fault=""
        )
        now += 10
        state = decide(state, [report().model_copy(update={"counts": found})], now)
    return state.events[-1].what, share


@pytest.mark.process
@pytest.mark.parametrize("num_rollouts", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_at_most_alpha_of_rollouts_without_a_difference_are_rolled_back(num_rollouts: int) -> None:
    rng = np.random.default_rng(11)
    ends = [simulated(rng, (0.02, 0.02), (0.05, 0.05), 0.1)[0] for _ in range(num_rollouts)]
    assert set(ends) <= {"promoted", "rolled_back"}
    assert ends.count("rolled_back") <= ALPHA * num_rollouts


@pytest.mark.process
@pytest.mark.parametrize("baseline", [0.0, 0.02])
def test_candidate_that_fails_5_percent_more_is_rolled_back_early(
    baseline: float,
) -> None:
    rng = np.random.default_rng(12)
    ends = [simulated(rng, (baseline + 0.05, baseline), (0.05, 0.05), 0.1) for _ in range(200)]
    assert sum(what == "rolled_back" and share < 0.25 for what, share in ends) >= 0.95 * len(ends)


@pytest.mark.parametrize(("slow", "differing"), [((0.3, 0.05), 0.05), ((0.05, 0.05), 0.16)])
def test_a_slow_or_differing_candidate_is_rolled_back(
    slow: tuple[float, float], differing: float
) -> None:
    rng = np.random.default_rng(13)
    ends = [simulated(rng, (0.0, 0.0), slow, differing)[0] for _ in range(50)]
    assert ends.count("rolled_back") >= 48


def test_a_canary_advances_only_after_enough_time_and_requests() -> None:
    state = rollout(step_since=100.0)
    enough, few = counts(requests=(300, 9000)), counts(requests=(299, 9000))
    assert decide(state, [report(counts=enough)], 159.0) == state
    assert decide(state, [report(counts=few)], 1e6) == state
    after = decide(state, [report(counts=enough)], 160.0)
    found = after.candidate
    assert found
    assert (found.fraction, found.step_since, found.requests_before) == (0.05, 160.0, 300)
    assert after.events[-1].reason == "it answers 5 % of the live requests, step 2 of 5"


def test_the_last_step_promotes_and_adds_the_previous_model_to_the_history() -> None:
    state = rollout(step=4, replaces=None).changed(history=[MODEL, MODEL])
    after = decide(state, [report(counts=counts(requests=(500, 0)))], 1e6)
    assert (after.stable, after.candidate, after.history, after.events[-1].what) == (
        MODEL,
        None,
        [MODEL, None],
        "promoted",
    )


def test_invalid_prediction_ends_a_canary_or_a_shadow_at_once() -> None:
    for mode in ("canary", "shadow"):
        after = decide(
            rollout(mode=mode), [report(), report(counts=counts(fault="it gave NaN"))], 1.0
        )
        assert (after.candidate, after.events[-1].what, after.events[-1].reason) == (
            None,
            "rolled_back",
            "it gave NaN",
        )


@pytest.mark.parametrize(("phase", "what"), [("preparing", "refused"), ("running", "rolled_back")])
def test_death_of_a_worker_with_a_candidate_ends_its_rollout(phase: str, what: str) -> None:
    dead = report(started=1)  # another process had this number
    after = decide(rollout(phase=phase), [report(), dead], 1.0)
    assert (after.candidate, after.events[-1].what) == (None, what)
    assert "died with it" in after.events[-1].reason
    ended = dead.model_copy(update={"stopped": True})
    assert decide(rollout(phase="running"), [report(), ended], 1.0).candidate  # it ended in order
    other = dead.model_copy(update={"candidate": 6})
    assert decide(
        rollout(phase="running"), [report(), other], 1.0
    ).candidate  # of another candidate


def test_candidate_is_deployed_after_all_workers_loaded_it_and_refused_if_one_refuses() -> None:
    state = rollout(mode="deploy", phase="preparing")
    ready, loading = report(), report(phase="preparing")
    assert decide(state, [ready, loading], 1.0) == state
    assert decide(state, [], 1.0) == state
    assert decide(state, [ready, ready], 1.0).stable == MODEL
    refused = decide(state, [ready, report(phase="refused", reason="another digest")], 1.0)
    assert (refused.stable, refused.events[-1].what) == (None, "refused")
    assert "another digest" in refused.events[-1].reason
    for reports in ([ready, loading], []):
        assert decide(state, reports, PREPARE_S + 1).events[-1].what == "refused"


def test_canary_starts_after_the_limit_of_slow_requests_is_measured_on_the_stable_model() -> None:
    state = rollout(slow_s=None)
    assert decide(state, [report(num_latencies=MIN_LATENCIES - 1)], 1.0) == state
    halves = [
        report(num_latencies=MIN_LATENCIES // 2, stable_p95_s=latency) for latency in (0.02, 0.03)
    ]
    after = decide(state, halves, 1.0)
    assert after.candidate
    assert after.candidate.slow_s == pytest.approx(0.06)
    slow = counts(
        requests=(100, 100), events={"errors": {}, "slow": {"0.01": (20, 0)}, "quality": {}}
    )
    assert (
        decide(after, [report(counts=slow)], 1.0)
        .events[-1]
        .reason.startswith("its answers take longer than 0.06 s")
    )


def test_total_returns_the_sum_of_counts_over_workers() -> None:
    one, other = Evidence(), Evidence()
    for evidence, share in ((one, 0.01), (other, 0.05), (other, 0.01)):
        evidence.request(of_candidate=True, seconds=0.1)
        evidence.request(of_candidate=False, seconds=0.2)
        evidence.event("errors", share, of_candidate=True)
        evidence.shadow("agrees")
    other.fault("NaN")
    both = total([one.counts(), other.counts()])
    assert (both.requests, both.shadowed["agrees"], both.fault) == ((3, 3), 3, "NaN")
    assert both.of("errors") == {0.01: (2, 0), 0.05: (1, 0)}
    latency_s, number = other.stable_latency_s()
    assert latency_s == pytest.approx(0.2)
    assert number == 2
