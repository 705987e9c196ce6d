"""The loop's journal, SLIPWAY_STATE/loop/journal.jsonl: the finished steps of all cycles.

A step is appended once its effect is on disk, so after a kill at most one step is repeated. Each
line contains the SHA-256 of the line before it, as in the history of rollouts.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SlipwayError

FOLDER, JOURNAL = "loop", "journal.jsonl"
StepName = Literal[
    "triggered", "collected", "merged", "trained", "compared", "shadowed", "requested", "notified",
    "decided", "canary", "ended", "failed",
]  # fmt: skip


class LoopError(SlipwayError):
    """A step of the loop is not possible, or a decision is refused."""


class LoopStep(Contract):
    """A line of the loop's journal: one step of a cycle."""

    format_version: Literal[1]
    number: int
    cycle: int  # number of the cycle, from 1
    time: float  # seconds since 1970
    what: StepName
    detail: dict[str, Any]  # its keys depend on the step; see slipway/loop/steps.py
    previous: str  # SHA-256 of the previous line, in hex; "" for the first line


@dataclass(frozen=True)
class Cycle:
    """The steps of one cycle, in order."""

    number: int
    steps: Sequence[LoopStep]

    def has(self, what: StepName) -> bool:
        """Return True if the cycle has finished this step."""
        return any(step.what == what for step in self.steps)

    def detail(self, what: StepName) -> dict[str, Any]:
        """Return the detail of a finished step."""
        return next(step.detail for step in reversed(self.steps) if step.what == what)

    def time_of(self, what: StepName) -> float:
        """Return the time at which a finished step was recorded, in seconds since 1970."""
        return next(step.time for step in reversed(self.steps) if step.what == what)

    @property
    def is_open(self) -> bool:
        return not self.has("ended")

    @property
    def failures(self) -> list[LoopStep]:
        """The failed attempts since the last finished step."""
        found: list[LoopStep] = []
        for step in reversed(self.steps):
            if step.what != "failed":
                break
            found.insert(0, step)
        return found


def read_journal(path: Path) -> list[LoopStep]:
    """Return all steps; LoopError if a digest does not match.

    Ignores a last line without a line break: its process was killed while it wrote.
    """
    steps: list[LoopStep] = []
    previous = ""
    for number, line in enumerate(files.complete_lines(path), start=1):
        try:
            step = LoopStep.model_validate_json(line)
        except ValidationError:
            step = None
        if step is None or (step.number, step.previous) != (number, previous):
            raise LoopError(
                f"{path} was changed or damaged: line {number} is not the step that follows line "
                f"{number - 1}. Restore it from a backup, or move the folder {path.parent} away to "
                "begin again: open requests for a decision are lost then."
            )
        steps.append(step)
        previous = hashlib.sha256(line).hexdigest()
    return steps


def cycles(steps: Sequence[LoopStep]) -> list[Cycle]:
    """Group the steps by cycle, the last one last."""
    numbers = dict.fromkeys(step.cycle for step in steps)
    return [Cycle(number, [step for step in steps if step.cycle == number]) for number in numbers]


def append_step(
    path: Path, cycle: int, what: StepName, detail: dict[str, Any], now: float
) -> LoopStep:
    """Append a step after the last complete line, sync the file to disk, and return the step."""
    before = files.complete_lines(path)
    step = LoopStep(
        format_version=1,
        number=len(before) + 1,
        cycle=cycle,
        time=now,
        what=what,
        detail=detail,
        previous=hashlib.sha256(before[-1]).hexdigest() if before else "",
    )
    line = json.dumps(step.model_dump(mode="json"), sort_keys=True, allow_nan=False).encode()
    files.make_private_directory(path.parent)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, files.PRIVATE), "wb") as file:
        file.truncate(sum(len(one) + 1 for one in before))
        file.seek(0, os.SEEK_END)
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return step
