"""Decides the next state of a rollout: a pure function of state, workers' reports and time.

The first worker that sees a decision writes it. A candidate is refused if a worker refuses it, dies
while loading it, or takes too long. A running candidate is rolled back at once if a worker dies
with it or if it makes an invalid prediction, and otherwise if the test of
slipway/serving/rollout/sequential.py finds evidence against it. Without such evidence it advances
step by step.
"""

from collections.abc import Sequence

from slipway.serving.rollout.evidence import Counts, rollback_reason, total
from slipway.serving.rollout.reports import Report, allowed_disagreement
from slipway.serving.rollout.state import Candidate, Outcome, Rollout

PREPARE_S = 600.0  # guess: enough to load a TensorRT engine, or a large model from a slow disk
SLOW = 2.0  # a slow answer in 95th percentiles of the stable model, unless the plan has a bound
FASTEST_SLOW_S = 0.005  # nobody notices a shorter delay
MIN_LATENCIES = 200  # fewest latencies of the stable model that yield a bound


def decide(rollout: Rollout, reports: Sequence[Report], now: float) -> Rollout:
    """Return the next state of the rollout, or `rollout` itself if nothing has to change.

    `now` is in seconds since 1970.
    """
    candidate = rollout.candidate
    if candidate is None:
        return rollout
    concerned = [report for report in reports if report.candidate == candidate.id]
    for report in concerned:
        if report.phase == "refused":
            return rollout.ended("refused", f"{report.name}: {report.reason}")
    outcome: Outcome = "refused" if candidate.phase == "preparing" else "rolled_back"
    for report in concerned:
        if not report.stopped and not report.is_alive:
            return rollout.ended(outcome, f"{report.name} died with it")
    if candidate.phase == "preparing":
        return _after_preparing(rollout, candidate, reports, now)
    return _while_running(rollout, candidate, concerned, now)


def _after_preparing(
    rollout: Rollout, candidate: Candidate, reports: Sequence[Report], now: float
) -> Rollout:
    alive = [report for report in reports if report.is_alive]
    prepared = (candidate.id, "prepared")
    missing = [report for report in alive if (report.candidate, report.phase) != prepared]
    if missing or not alive:
        if now - candidate.since <= PREPARE_S:
            return rollout
        who = f"{missing[0].name} has not" if missing else "no worker has"
        return rollout.ended("refused", f"{who} loaded it within {PREPARE_S:g} s")
    if candidate.mode == "deploy":
        return rollout.ended("swapped", f"all {len(alive)} workers have loaded and checked it")
    running = candidate.model_copy(
        update={"phase": "running", "step_since": now, "slow_s": candidate.plan.slow_s}
    )
    return rollout.changed(candidate=running).with_event(
        "began", candidate.name, _describe_step(running)
    )


def _while_running(
    rollout: Rollout, candidate: Candidate, concerned: Sequence[Report], now: float
) -> Rollout:
    counts = total(report.counts for report in concerned)
    if candidate.mode == "shadow":  # the operator judges it, unless an answer is invalid
        return rollout.ended("rolled_back", counts.fault) if counts.fault else rollout
    reason = rollback_reason(counts, candidate, allowed_disagreement(concerned))
    if reason:
        return rollout.ended("rolled_back", reason)
    # The bound is fixed before anything is judged by it, or the test would not be valid.
    if candidate.slow_s is None and sum(one.num_latencies for one in concerned) >= MIN_LATENCIES:
        slow_s = max(FASTEST_SLOW_S, SLOW * max(one.stable_p95_s for one in concerned))
        return rollout.changed(candidate=candidate.model_copy(update={"slow_s": slow_s}))
    return _advance(rollout, candidate, counts, now)


def _advance(rollout: Rollout, candidate: Candidate, counts: Counts, now: float) -> Rollout:
    plan, num_requests = candidate.plan, counts.requests[0]
    num_new = num_requests - candidate.requests_before
    if now - candidate.step_since < plan.hold_s or num_new < plan.hold_requests:
        return rollout
    if candidate.step + 1 == len(plan.steps):
        reason = f"{num_requests} of its requests gave no evidence against it"
        return rollout.ended("promoted", reason)
    step = {"step": candidate.step + 1, "step_since": now, "requests_before": num_requests}
    advanced = candidate.model_copy(update=step)
    return rollout.changed(candidate=advanced).with_event(
        "step", candidate.name, _describe_step(advanced)
    )


def _describe_step(candidate: Candidate) -> str:
    if candidate.mode == "shadow":
        return "it answers copies of live requests"
    return (
        f"it answers {100 * candidate.fraction:g} % of the live requests, "
        f"step {candidate.step + 1} of {len(candidate.plan.steps)}"
    )
