"""The journal of a search: a file with one line per decision and per result.

Each line is JSON and contains its own digest. Lines damaged by a kill or a disk fault are reported
and skipped, and a copy of the file preserves them. Lost decisions are derived again from the other
lines, and lost results from checkpoints and DVC's cache, so no trial is lost.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from slipway.artifacts.bundle import Metric
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SchemaError

_DIGEST = "sha256"  # of the rest of a line


class StudyLine(Contract):
    """The first line: the settings of the search."""

    event: Literal["study"]
    format_version: Literal[1]
    name: str
    identity: str  # digest of all that trials have in common; only an equal search goes on
    threads: int  # of each process of a trial
    epochs: int  # of a whole trial, if none changes train.epochs


class JobLine(Contract):
    """A decision to train a trial with some values up to an epoch."""

    event: Literal["job"]
    job: int  # from 0, in the order of decisions
    trial: int  # from 0
    values: dict[str, Any]  # of the space, by key
    level: int  # the rung at its end; the last one is the end of the trial
    epoch: int  # at its end


class ResultLine(Contract):
    """The result of a job: its status, last epoch and score."""

    event: Literal["result"]
    job: int
    trial: int
    status: Literal["stopped", "done", "failed"]
    epoch: int  # that was reached
    score: float | None  # on validation rows; null of a failed one
    metric: Metric | None  # the same with its interval, of a trial that is done
    seconds: float
    cause: str  # of a failure


Line = StudyLine | JobLine | ResultLine
_LINES: dict[str, type[Line]] = {"study": StudyLine, "job": JobLine, "result": ResultLine}


class Journal:
    """The journal file of a search; only the process that holds the lock of searches appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self.damages: list[str] = []  # described for the user

    @property
    def study(self) -> StudyLine:
        """The first line, which describes the search."""
        first = self.lines[0] if self.lines else None
        if not isinstance(first, StudyLine):
            raise SchemaError(
                f"{self.path} does not begin with a readable description of its search, expected "
                f"one. The trials stay as experiments; remove {self.path.parent} to begin again."
            )
        return first

    def read(self) -> "Journal":
        """Read the file; damaged lines are left out and described in `damages`."""
        payload = self.path.read_bytes()
        found = [*_parsed(payload)]
        self.lines = [line for _, line in found if line is not None]
        bad = [number for number, line in found if line is None]
        if bad:
            copy = self.path.with_suffix(".damaged")
            shutil.copyfile(self.path, copy)
            files.write_bytes(self.path, b"".join(map(_written, self.lines)))
            numbers = ", ".join(map(str, bad))
            self.damages.append(
                f"{self.path} was damaged in line {numbers}; the other {len(self.lines)} are "
                f"intact, and no trial is lost. The former file is {copy}"
            )
        return self

    def append(self, line: Line) -> None:
        """Append a line and sync it to the disk before returning."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(_written(line))
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)


def _written(line: Line) -> bytes:
    content = line.model_dump(mode="json")
    signed = content | {_DIGEST: files.digest_json(content)}
    return json.dumps(signed, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _parsed(payload: bytes) -> Iterator[tuple[int, Line | None]]:
    """Yield the number of each line, from 1, and its content; None if it is damaged."""
    for number, text in enumerate(payload.split(b"\n"), start=1):
        if text:
            yield number, _line(text)


def _line(text: bytes) -> Line | None:
    try:
        content = json.loads(text)
        digest = content.pop(_DIGEST)
        if files.digest_json(content) != digest:
            return None
        return _LINES[content["event"]].model_validate(content)
    except (ValueError, LookupError, TypeError, AttributeError, ValidationError):
        return None
