"""Records of experiments: one JSON file for each `slipway run`, in `.work/experiments/`.

A record exists from the start of its run, so a killed run leaves one, too. DVC stores the files of
a finished run as an experiment of the same name.
"""

import json
import platform
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import Verdict
from slipway.config.mistakes import hint
from slipway.config.params import filled, flat
from slipway.experiments import repository
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import ParamsError, SchemaError

EXPERIMENTS = Path(".work/experiments")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")  # git allows it in a ref
_NUMBERED = re.compile(r"run-(\d+)")


class Results(Contract):
    """The results of a run; None or "" for results that its stages did not write."""

    headline: str  # the metric by which models of the task are compared
    metric: Metric | None
    baseline: float | None
    log_loss: float | None
    gates: Verdict | Literal[""]
    certificate: str  # status of the certificate
    processes: int | None = None  # number of training processes, one for each device
    gpus: int | None = None  # 0 for a training on the CPU; older runs do not have it


class Validation(Contract):
    """The validation score of a search's trial, by which the search selects."""

    name: str  # of the metric
    epoch: int  # trained so far
    value: float
    metric: Metric | None  # the score with its interval; null until the trial is done


class ExperimentRecord(Contract):
    """The record of one run: its params at the start, its status and its results."""

    format_version: Literal[1]
    name: str
    started: str  # ISO 8601, UTC
    seconds: float | None  # null while it runs, or if it was killed
    status: Literal["running", "done", "failed", "interrupted", "stopped"]
    cause: str  # of a failure or an interruption
    ended_at: str = ""  # stage of a failure or an interruption; "" if unknown
    stage: str | None  # the last requested stage; null if all were requested
    stage_seconds: Mapping[str, float] = {}  # of the stages that ran to their end
    params: dict[str, Any]  # values by key, such as "train.epochs"
    results: Results | None
    process: int  # id of the process of `slipway run` or `slipway search`
    group: int | None  # id of the group of DVC's processes
    search: str | None = None  # name of the search if this is a trial
    validation: Validation | None = None  # score of a trial
    host: str = ""  # machine of a trial, because several machines may search in one folder

    @property
    def ended(self) -> str:
        """The status; "interrupted" if the run is recorded as running and its process is gone."""
        is_here = self.host in ("", platform.node())
        is_killed = self.status == "running" and is_here and not files.is_alive(self.process)
        return "interrupted" if is_killed else self.status

    @property
    def reason(self) -> str:
        """The cause in one line; "" for a finished run."""
        if self.ended != self.status:
            return "killed; run the same command again to go on"
        return " ".join(self.cause.split())

    @property
    def verdicts(self) -> tuple[str, str]:
        """The verdict of the gates and the status of the certificate, for a table.

        A failed or interrupted run names its stage instead, such as ("failed at export", "").
        """
        if self.ended in ("failed", "interrupted"):
            return f"{self.ended} at {self.ended_at}" if self.ended_at else self.ended, ""
        return (self.results.gates, self.results.certificate) if self.results else ("", "")


def read_records() -> list[ExperimentRecord]:
    """Read all records, newest first; raises SchemaError if one is damaged."""
    fix = "Remove the file; the others stay."
    found = [
        parse_record(ExperimentRecord, path, path.read_bytes(), SchemaError, fix)
        for path in EXPERIMENTS.glob("*.json")
    ]
    return sorted(found, key=lambda record: record.started, reverse=True)


def write_record(record: ExperimentRecord) -> None:
    """Write or replace a record."""
    files.write_json(EXPERIMENTS / f"{record.name}.json", record.model_dump(mode="json"))


def log_path(name: str) -> Path:
    """Return the path of a run's output."""
    return EXPERIMENTS / f"{name}.log"


def new_name(requested: str | None) -> str:
    """Return the name for a new experiment: the requested one, or the next `run-NUMBER`.

    A run that did not finish gives its name to the run that resumes it. Raises ParamsError if the
    requested name is taken or invalid.
    """
    saved, records = repository.experiments(), {one.name: one for one in read_records()}
    taken = records.keys() | saved.keys()
    if requested is None:
        matches = [_NUMBERED.fullmatch(name) for name in taken]
        numbers = [int(one[1]) for one in matches if one]
        return f"run-{max(numbers, default=0) + 1}"
    if not _NAME.fullmatch(requested):
        raise ParamsError(
            f"{requested!r} cannot name an experiment, expected letters, digits, '-', '_' and '.', "
            "such as wide-network. Choose another name."
        )
    former = records.get(requested)
    is_unfinished = former is not None and former.ended != "done" and former.search is None
    if requested in taken and (requested in saved or not is_unfinished):
        remove = [f"rm {EXPERIMENTS}/{requested}.*"] * (former is not None)
        remove += [f"dvc exp remove {requested}"] * (requested in saved)
        raise ParamsError(
            f"an experiment {requested!r} exists, and a name is used once. Choose another name "
            f"such as {free_name(requested, taken)!r}, or remove the old one: {'; '.join(remove)}"
        )
    return requested


def find_record(name: str, records: list[ExperimentRecord]) -> ExperimentRecord | None:
    """Return the record of an experiment; None if only DVC knows it.

    Raises ParamsError with the known names if it does not exist.
    """
    known = {record.name: record for record in records}
    every = [*known, *(found for found in repository.experiments() if found not in known)]
    if name not in every:
        near = hint(name, every, "there are") if every else "there is none yet: `slipway run`"
        raise ParamsError(
            f"there is no experiment {name!r}, expected one that `slipway compare` lists; {near}"
        )
    return known.get(name)


def now() -> str:
    """Return the current UTC time as ISO 8601 text with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def params_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return all params by key, defaults included, except those of sections that no stage reads."""
    unread = ("search", "edge", "openvino", "loop")
    whole = filled(content) if content else {}
    return json_values({key: whole[key] for key in whole if key not in unread})


def json_values(content: dict[str, Any]) -> dict[str, Any]:
    """Return the values of params.yaml by key, as JSON types."""
    return {key: json.loads(json.dumps(value, default=str)) for key, value in flat(content)}


def shortened(text: str, longest: int) -> str:
    """Shorten a line by cutting its middle, because error messages end with the remedy."""
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def free_name(prefix: str, taken: Collection[str], first: int = 2) -> str:
    """Return the first of PREFIX-2, PREFIX-3 and so on that is not taken."""
    names = (f"{prefix}-{number}" for number in range(first, 10**6))
    return next(name for name in names if name not in taken)
