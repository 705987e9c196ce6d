"""The workers' reports on a rollout, and the status that is derived from them.

Each worker writes its own file, SLIPWAY_STATE/rollout.d/PROCESS-STARTED.json. Commands read these
files to see the model that each worker serves. Workers read them to sum the candidate's counts, and
to see if a worker died while it had the candidate. Of services that share a rollout through
SLIPWAY_DATABASE_URL, services.json has the reports of the other ones.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from slipway.serving.rollout.evidence import Counts, log_evidences, total
from slipway.serving.rollout.sequential import ALPHA, LOG_THRESHOLD
from slipway.serving.rollout.state import Candidate, Rollout, name_of
from slipway.system import files
from slipway.system.contract import Contract

FOLDER = "rollout.d"
OTHERS = "services.json"
SEEN_IDS_SUFFIX = ".used"
NO_COUNTS = total([])
Phase = Literal["none", "preparing", "prepared", "refused"]
_SHOWN_EVENTS = 10


class Report(Contract):
    """The state of one worker in a rollout, as it reports it to the others."""

    process: int
    started: int  # start of the process in kernel ticks, because process ids are reused
    stopped: bool  # True if the worker shut down in order
    revision: int  # revision of the state that the worker follows
    serving: str | None  # version of its stable model; null: not ready
    folder: str | None  # folder of that model's copy; null: SLIPWAY_BUNDLE
    problem: str  # why it does not serve the model of the state; empty: it does
    candidate: int | None  # id of its current or last candidate
    phase: Phase  # phase of the candidate
    reason: str  # why the candidate was refused
    disagreement: float  # fraction of answers that may differ from the stable model's
    counts: Counts
    stable_p95_s: float
    num_latencies: int
    service: str = ""  # that sent the report through the database; "": this one
    is_live: bool = False  # its process was running, if another service sent the report

    @property
    def is_alive(self) -> bool:
        """True if the process of this report is running."""
        if self.service:
            return self.is_live and not self.stopped
        return (
            not self.stopped
            and files.is_alive(self.process)
            and process_started(self.process) == self.started
        )

    @property
    def name(self) -> str:
        """The name of the worker in messages, such as "worker 17"."""
        return f"worker {self.process}" + (f" of {self.service}" if self.service else "")


REPORTS = TypeAdapter(list[Report])


def process_started(process: int) -> int:
    """Return the start of a process in kernel ticks since boot; 0 if it is unknown."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def seen_ids_path(state: Path, candidate: int) -> Path:
    """Return the path of the file with the request ids that the candidate's canary has seen."""
    return state / FOLDER / f"{candidate}{SEEN_IDS_SUFFIX}"


def write_report(state: Path, report: Report) -> None:
    """Write a worker's report, which replaces its previous one."""
    path = state / FOLDER / f"{report.process}-{report.started}.json"
    files.write_json(path, report.model_dump(mode="json"))


def write_others(state: Path, reports: list[Report]) -> None:
    """Write the reports of the other services that share the rollout."""
    path = state / OTHERS
    payload = REPORTS.dump_json(reports)
    if not path.exists() or path.read_bytes() != payload:
        files.write_bytes(path, payload, files.PRIVATE)


def read_reports(state: Path) -> list[Report]:
    """Return the reports of all workers, including stopped ones and those of other services."""
    try:
        others = REPORTS.validate_json((state / OTHERS).read_bytes())
    except (OSError, ValidationError):
        others = []
    return read_own_reports(state) + others


def read_own_reports(state: Path) -> list[Report]:
    """Return the reports of all workers of this service, including stopped ones.

    Skips files that another version wrote or that were removed meanwhile.
    """
    reports = []
    for path in sorted((state / FOLDER).glob("*.json")):
        try:
            reports.append(Report.model_validate_json(path.read_bytes()))
        except (FileNotFoundError, ValidationError):
            continue
    return reports


def remove_old_reports(state: Path, candidate: int | None) -> None:
    """Remove the reports of workers that ended, and the seen ids of former candidates.

    Files that concern the present `candidate` stay, because its evidence needs them.
    """
    for report in read_own_reports(state):
        if not report.is_alive and (candidate is None or report.candidate != candidate):
            (state / FOLDER / f"{report.process}-{report.started}.json").unlink(missing_ok=True)
    for path in (state / FOLDER).glob(f"*{SEEN_IDS_SUFFIX}"):
        if path.stem != str(candidate):
            path.unlink(missing_ok=True)


def allowed_disagreement(reports: Sequence[Report]) -> float:
    """Return the fraction of predictions that may differ from the stable model's, in [0, 1].

    It is the largest fraction that any of the workers reports, or 1 without reports.
    """
    return max((report.disagreement for report in reports), default=1.0)


def describe(rollout: Rollout, reports: Sequence[Report]) -> dict[str, Any]:
    """Return the status as JSON: stable model, candidate and evidence, workers, latest events."""
    candidate = rollout.candidate
    return {
        "revision": rollout.revision,
        "stable": name_of(rollout.stable),
        "history": [name_of(model) for model in rollout.history],
        "candidate": _describe_candidate(
            candidate, [report for report in reports if report.candidate == candidate.id]
        )
        if candidate
        else None,
        "workers": [
            {
                "process": report.process,
                **({"service": report.service} if report.service else {}),
                "serving": report.serving,
                "candidate": report.phase,
                "problem": report.problem or report.reason,
            }
            for report in reports
            if report.is_alive
        ],
        "events": [
            {"time": iso(event.time)} | event.model_dump(include={"what", "model", "reason"})
            for event in rollout.events[-_SHOWN_EVENTS:]
        ],
    }


def _describe_candidate(candidate: Candidate, reports: Sequence[Report]) -> dict[str, Any]:
    counts = total(report.counts for report in reports)
    evidences = log_evidences(counts, allowed_disagreement(reports))
    num_answered = sum(counts.disagreements)
    agreement = counts.shadowed["agrees"] / num_answered if num_answered else None
    return {
        "version": candidate.name,
        "mode": candidate.mode,
        "phase": candidate.phase,
        "fraction": candidate.fraction,
        "step": candidate.step + 1,
        "steps": candidate.plan.steps,
        "hold_seconds": candidate.plan.hold_s,
        "hold_requests": candidate.plan.hold_requests,
        "slow_seconds": candidate.slow_s,
        "since": iso(candidate.since),
        "requests": {"candidate": counts.requests[0], "stable": counts.requests[1]},
        "shadowed": counts.shadowed | {"agreement": agreement},
        "alpha": ALPHA,
        "log_evidence": {test: round(value, 3) for test, value in evidences.items()},
        "log_threshold": round(LOG_THRESHOLD, 3),
    }


def iso(moment: float) -> str:
    """Format seconds since 1970 as a UTC time in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
