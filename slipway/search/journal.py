"""The journal of a search: a file with one line for each decision and each result.

Each line is JSON and contains its own digest. Lines that a kill or a disk fault damaged are
reported and skipped; a copy of the file preserves them. Lost decisions follow again from the other
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

_DIGEST = "sha256"  # key of the digest of a line's other fields


class StudyLine(Contract):
    """The first line: the settings of the search."""

    event: Literal["study"]
    format_version: Literal[1]
    name: str
    identity: str  # digest of everything that all trials share; only an equal search resumes
    threads: int  # threads of each process of a trial
    epochs: int  # epochs of a trial that is not stopped, unless the space changes train.epochs


class JobLine(Contract):
    """A decision to train a trial with some values up to an epoch."""

    event: Literal["job"]
    job: int  # number of the decision, from 0
    trial: int  # number of the trial, from 0
    values: dict[str, Any]  # the trial's values by key of params.yaml
    level: int  # number of the rung at which the job ends; the last rung is the end of the trial
    epoch: int  # epoch at which the job ends


class ResultLine(Contract):
    """The result of a job: its status, last epoch and score."""

    event: Literal["result"]
    job: int
    trial: int
    status: Literal["stopped", "done", "failed"]
    epoch: int  # last epoch of the training
    score: float | None  # score on the validation rows; null if the job failed
    metric: Metric | None  # the score with its interval; null unless the trial is done
    seconds: float
    cause: str  # cause of a failure; else empty


Line = StudyLine | JobLine | ResultLine
_LINES: dict[str, type[Line]] = {"study": StudyLine, "job": JobLine, "result": ResultLine}


class Journal:
    """The journal file of a search; only the process that holds the search's lock may append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self.damages: list[str] = []  # descriptions of damaged lines, for the user

    @property
    def study(self) -> StudyLine:
        """The first line, with the settings of the search."""
        first = self.lines[0] if self.lines else None
        if not isinstance(first, StudyLine):
            raise SchemaError(
                f"{self.path} does not begin with a readable description of its search, expected "
                f"one. The trials stay as experiments; remove {self.path.parent} to begin again."
            )
        return first

    def read(self) -> "Journal":
        """Read the file, and return self; describes damaged lines in `damages` and skips them."""
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
    """Yield (line number from 1, content) of each line; the content is None if it is damaged."""
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
