"""What becomes of a candidate: a pure function of the state, the workers' reports and the time. The first worker to see it writes it down.

A candidate is refused if a worker refuses it, dies while it loads it or takes too long. It is rolled back at once if a worker dies
with it or if it gives an answer that is none, and by the law of serving/rollout/sequential.py otherwise. Else it goes up, step by step.
"""

from collections.abc import Sequence

from serving.rollout.evidence import Counts, first_reason, total
from serving.rollout.reports import Report
from serving.rollout.state import Candidate, Rollout

PREPARE_S = 600.0  # guess: a TensorRT engine or a large model from a slow disk is loaded by then
SLOW = 2.0  # times the stable model's 95th percentile is slow, where the plan names no bound
FASTEST_SLOW_S = 0.005  # below that nobody feels a difference
MIN_LATENCIES = 200  # of the stable model, before a bound is made of them


def decide(rollout: Rollout, reports: Sequence[Report], now: float) -> Rollout:
    """The state that follows; the same one if nothing has to change."""
    candidate = rollout.candidate
    if candidate is None:
        return rollout
    its = [report for report in reports if report.candidate == candidate.id]
    refused = next((report for report in its if report.phase == "refused"), None)
    if refused:
        return rollout.ended("refused", f"worker {refused.process}: {refused.reason}")
    dead = next((report for report in its if not report.stopped and not report.is_alive), None)
    if dead:
        outcome = "refused" if candidate.phase == "preparing" else "rolled_back"
        return rollout.ended(outcome, f"worker {dead.process} died with it")  # type: ignore[arg-type]  # one of the literals
    if candidate.phase == "preparing":
        return _after_preparing(
            rollout, candidate, [report for report in reports if report.is_alive], now
        )
    return _while_running(rollout, candidate, its, now)


def _after_preparing(
    rollout: Rollout, candidate: Candidate, alive: Sequence[Report], now: float
) -> Rollout:
    missing = [
        report.process
        for report in alive
        if (report.candidate, report.phase) != (candidate.id, "prepared")
    ]
    if missing or not alive:
        if now - candidate.since <= PREPARE_S:
            return rollout
        who = (
            f"worker {missing[0]} has not loaded it"
            if missing
            else "no worker runs that could load it"
        )
        return rollout.ended("refused", f"{who} within {PREPARE_S:g} s")
    if candidate.mode == "deploy":
        return rollout.ended("swapped", f"all {len(alive)} workers have loaded and checked it")
    running = candidate.model_copy(
        update={"phase": "running", "step_since": now, "slow_s": candidate.plan.slow_s}
    )
    return rollout.changed(candidate=running).with_event("began", candidate.name, _doing(running))


def _while_running(
    rollout: Rollout, candidate: Candidate, its: Sequence[Report], now: float
) -> Rollout:
    counts = total(report.counts for report in its)
    if (
        candidate.mode == "shadow"
    ):  # nobody but the operator judges it, as long as it answers at all
        return rollout.ended("rolled_back", counts.fault) if counts.fault else rollout
    reason = first_reason(
        counts, candidate, max((report.disagreement for report in its), default=1.0)
    )
    if reason:
        return rollout.ended("rolled_back", reason)
    if candidate.slow_s is None:
        bound = _slow_bound(its)
        if bound:
            return rollout.changed(candidate=candidate.model_copy(update={"slow_s": bound}))
    return _step(rollout, candidate, counts, now)


def _slow_bound(its: Sequence[Report]) -> float | None:
    """From what the stable model does; it is fixed before anything is judged by it, so that the law holds."""
    if sum(report.num_latencies for report in its) < MIN_LATENCIES:
        return None
    return max(FASTEST_SLOW_S, SLOW * max(report.stable_p95_s for report in its))


def _step(rollout: Rollout, candidate: Candidate, counts: Counts, now: float) -> Rollout:
    plan = candidate.plan
    if (
        now - candidate.step_since < plan.hold_s
        or counts.requests[0] - candidate.requests_before < plan.hold_requests
    ):
        return rollout
    if candidate.step + 1 == len(plan.steps):
        return rollout.ended(
            "promoted", f"{counts.requests[0]} of its requests gave no evidence against it"
        )
    following = candidate.model_copy(
        update={
            "step": candidate.step + 1,
            "step_since": now,
            "requests_before": counts.requests[0],
        }
    )
    return rollout.changed(candidate=following).with_event(
        "step", candidate.name, _doing(following)
    )


def _doing(candidate: Candidate) -> str:
    if candidate.mode == "shadow":
        return "it answers copies of live requests"
    return f"it answers {100 * candidate.share:g} % of the live requests, step {candidate.step + 1} of {len(candidate.plan.steps)}"
