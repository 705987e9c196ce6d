"""What each worker says of itself: SLIPWAY_STATE/rollout.d/PROCESS-STARTED.json, which it alone writes.

By these files a command knows who serves what, and the workers together know what a candidate's requests came to, and who died with it.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from serving.rollout.evidence import Counts, total
from serving.rollout.first_uses import SUFFIX
from slipway.system import files
from slipway.system.contract import Contract

FOLDER = "rollout.d"
Phase = Literal["none", "preparing", "prepared", "refused"]


class Report(Contract):
    """One worker."""

    process: int
    started: int  # when the process began, in the kernel's ticks: numbers of processes come again
    stopped: bool  # it ended in order
    revision: int  # of the state that it follows
    serving: str | None  # the version of its stable model; null: it is not ready
    folder: str | None  # of that model's copy; null: SLIPWAY_BUNDLE
    problem: str  # why it does not serve what the state says; empty: it does
    candidate: int | None  # the id of the candidate that it has, or has had
    phase: Phase  # of the candidate
    reason: str  # why it was refused
    disagreement: float  # share of answers that may differ from the stable model's
    counts: Counts
    stable_p95_s: float
    num_latencies: int

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return (
            not self.stopped
            and files.is_alive(self.process)
            and process_started(self.process) == self.started
        )


NO_COUNTS = total([])


def process_started(process: int) -> int:
    """Ticks between the start of the machine and of the process; 0 where that cannot be told."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def own_report_path(state: Path) -> Path:
    """Of this process."""
    return state / FOLDER / f"{os.getpid()}-{process_started(os.getpid())}.json"


def first_uses_path(state: Path, candidate: int) -> Path:
    """Where the workers note which ids a canary has met."""
    return state / FOLDER / f"{candidate}{SUFFIX}"


def write_report(state: Path, report: Report) -> None:
    """Put this process' report in the place of its last one."""
    files.write_json(own_report_path(state), report.model_dump(mode="json"))


def read_reports(state: Path) -> list[Report]:
    """Of all workers, also of those that ended. What is not understood is another version's, or half gone, and is left out."""
    reports = []
    for path in sorted((state / FOLDER).glob("*.json")):
        try:
            reports.append(Report.model_validate_json(path.read_bytes()))
        except (FileNotFoundError, ValidationError):
            continue
    return reports


def forget_reports(state: Path, candidate: int | None) -> None:
    """Remove what ended workers and former candidates left, unless it is of this candidate."""
    for report in read_reports(state):
        if not report.is_alive and (candidate is None or report.candidate != candidate):
            (state / FOLDER / f"{report.process}-{report.started}.json").unlink(missing_ok=True)
    for path in (state / FOLDER).glob(f"*{SUFFIX}"):
        if path.stem != str(candidate):
            path.unlink(missing_ok=True)
