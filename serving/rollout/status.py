"""What is rolled out, as JSON for operators and the page."""

import time
from collections.abc import Sequence
from typing import Any

from serving.rollout.evidence import Counts, log_evidences, total
from serving.rollout.reports import Report
from serving.rollout.sequential import ALPHA, LOG_THRESHOLD
from serving.rollout.state import Candidate, Rollout, name_of

_SHOWN_EVENTS = 10


def describe(rollout: Rollout, reports: Sequence[Report]) -> dict[str, Any]:
    """The stable model, the candidate with the evidence against it, the workers, and what happened last."""
    candidate = rollout.candidate
    return {
        "revision": rollout.revision,
        "stable": name_of(rollout.stable),
        "history": [name_of(model) for model in rollout.history],
        "candidate": _candidate(
            candidate, [report for report in reports if report.candidate == candidate.id]
        )
        if candidate
        else None,
        "workers": [
            {
                "process": report.process,
                "serving": report.serving,
                "candidate": report.phase,
                "problem": report.problem or report.reason,
            }
            for report in reports
            if report.is_alive
        ],
        "events": [
            {
                "time": iso(event.time),
                "what": event.what,
                "model": event.model,
                "reason": event.reason,
            }
            for event in rollout.events[-_SHOWN_EVENTS:]
        ],
    }


def _candidate(candidate: Candidate, its: Sequence[Report]) -> dict[str, Any]:
    counts = total(report.counts for report in its)
    return {
        "version": candidate.name,
        "mode": candidate.mode,
        "phase": candidate.phase,
        "share": candidate.share,
        "step": candidate.step + 1,
        "steps": candidate.plan.steps,
        "hold_seconds": candidate.plan.hold_s,
        "hold_requests": candidate.plan.hold_requests,
        "slow_seconds": candidate.slow_s,
        "since": iso(candidate.since),
        "requests": {"candidate": counts.requests[0], "stable": counts.requests[1]},
        "shadowed": counts.shadowed | {"agreement": _agreement(counts)},
        "alpha": ALPHA,
        "log_evidence": {test: round(value, 3) for test, value in _evidences(counts, its).items()},
        "log_threshold": round(LOG_THRESHOLD, 3),
    }


def _evidences(counts: Counts, its: Sequence[Report]) -> dict[str, float]:
    return log_evidences(counts, max((report.disagreement for report in its), default=1.0))


def _agreement(counts: Counts) -> float | None:
    """Share of the shadowed requests that were answered alike; null where there are none."""
    answered = sum(counts.shadowed[outcome] for outcome in ("agrees", "differs", "failed"))
    return counts.shadowed["agrees"] / answered if answered else None


def iso(moment: float) -> str:
    """A moment in seconds since 1970 as text, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
