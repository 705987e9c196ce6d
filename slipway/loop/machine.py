"""Chooses the loop's next step: a pure function of the journal, the facts and the settings.

slipway/loop/facts.py collects the facts, slipway/loop/steps.py takes the step. The simulations of
bench/loop.py call the same function with simulated facts.
"""

from dataclasses import dataclass
from typing import Literal

from slipway.config.loop import LoopParams
from slipway.loop.journal import Cycle

Action = Literal[
    "trigger", "collect", "merge", "train", "compare", "shadow", "request", "notify", "canary",
    "end", "wait",
]  # fmt: skip
Outcome = Literal[
    "promoted", "returned", "refused", "rejected", "expired", "no_gain", "worse", "failed",
    "stopped", "wrong_labels",
]  # fmt: skip
MAX_FAILURES = 3  # failed attempts of one step that end the cycle
_DAY_S = 86400.0


@dataclass(frozen=True)
class CandidateFacts:
    """The state of the rollout from the view of the cycle's candidate."""

    workers: int = 0  # number of running workers
    other: str = ""  # version of another candidate that is being rolled out
    # This cycle's shadow and canary; `why` has the reason for "ended", "promoted" and "returned".
    shadow: Literal["none", "running", "ended"] = "none"
    shadowed: int = 0  # requests that the shadow answered
    canary: Literal["none", "running", "promoted", "returned"] = "none"
    why: str = ""


@dataclass(frozen=True)
class LoopFacts:
    """Everything outside the journal and params.yaml that decides the next step."""

    now: float  # seconds since 1970
    reasons: tuple[str, ...] = ()  # descriptions of the triggers that hold
    num_labels: int = 0  # labelled answers that count for the cycle
    served: str = ""  # version of the served model
    candidate: CandidateFacts = CandidateFacts()


@dataclass(frozen=True)
class NextStep:
    """The next action and its reason; only "end" has an outcome."""

    action: Action
    why: str = ""
    outcome: Outcome | None = None


def next_step(last: Cycle | None, facts: LoopFacts, params: LoopParams) -> NextStep:
    """Return the next step; `last` is the journal's last cycle, open or ended, None at first."""
    if last is None or not last.is_open:
        return _between_cycles(last, facts, params)
    is_requested = last.has("requested")
    if len(last.failures) >= MAX_FAILURES and (not is_requested or last.has("decided")):
        reason = last.failures[-1].detail["reason"]
        return NextStep("end", f"{MAX_FAILURES} attempts failed, the last one: {reason}", "failed")
    served = last.detail("triggered")["served"]
    if facts.served != served and facts.candidate.canary == "none" and not last.has("canary"):
        why = f"{facts.served} is served since, the candidate would have replaced {served}"
        return NextStep("end", why, "refused")
    if not last.has("collected"):
        if facts.num_labels < params.min_labels:
            return NextStep(
                "wait", f"{facts.num_labels} of {params.min_labels} labelled answers have come"
            )
        return NextStep("collect")
    for done, action in (("merged", "merge"), ("trained", "train"), ("compared", "compare")):
        if not last.has(done):  # type: ignore[arg-type]
            return NextStep(action)  # type: ignore[arg-type]
    compared = last.detail("compared")
    if compared["outcome"] is not None:
        return NextStep("end", compared["why"], compared["outcome"])
    if not is_requested:
        return _before_request(last, facts, params)
    if not last.has("notified") and params.webhook and len(last.failures) < MAX_FAILURES:
        return NextStep("notify")
    return _after_request(last, facts)


def _between_cycles(last: Cycle | None, facts: LoopFacts, params: LoopParams) -> NextStep:
    if last is not None and last.detail("ended")["outcome"] != "wrong_labels":
        pause_ends = last.steps[-1].time + params.pause_days * _DAY_S
        if facts.now < pause_ends:
            left = (pause_ends - facts.now) / _DAY_S
            return NextStep(
                "wait", f"cycle {last.number} ended; {left:.1f} of loop.pause_days are left"
            )
    if not facts.reasons:
        return NextStep("wait", "no trigger holds")
    return NextStep("trigger", "; ".join(facts.reasons))


def _before_request(cycle: Cycle, facts: LoopFacts, params: LoopParams) -> NextStep:
    candidate = facts.candidate
    if params.shadow_requests is None:
        return NextStep("request")
    if not cycle.has("shadowed"):
        return _wait_for_rollout(candidate) or NextStep("shadow")
    if candidate.shadow == "ended":
        return NextStep("end", f"the shadow ended: {candidate.why}", "refused")
    if candidate.shadowed < params.shadow_requests:
        return NextStep(
            "wait",
            f"the shadow has answered {candidate.shadowed} of {params.shadow_requests} requests",
        )
    return NextStep("request")


def _after_request(cycle: Cycle, facts: LoopFacts) -> NextStep:
    candidate, requested = facts.candidate, cycle.detail("requested")
    if not cycle.has("decided"):
        if candidate.shadow == "ended":
            return NextStep("end", f"the shadow ended: {candidate.why}", "refused")
        if facts.now >= requested["expires"]:
            return NextStep("end", "no decision came in time", "expired")
        return NextStep("wait", f"a decision on {requested['version']} is awaited")
    decided = cycle.detail("decided")
    if decided["verdict"] == "rejected":
        return NextStep("end", f"rejected by {decided['by']}: {decided['reason']}", "rejected")
    if not cycle.has("canary"):
        return _wait_for_rollout(candidate) or NextStep("canary")
    if candidate.canary in ("promoted", "returned"):
        return NextStep("end", candidate.why, candidate.canary)
    return NextStep("wait", "the canary answers a growing fraction of the requests")


def _wait_for_rollout(candidate: CandidateFacts) -> NextStep | None:
    if candidate.other:
        return NextStep("wait", f"{candidate.other} is being rolled out")
    if not candidate.workers:
        return NextStep("wait", "the service is not running")
    return None
