"""`slipway run`: checks the project, sets params, runs the stages, and always writes a record."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.edit import read_assignments
from slipway.config.mistakes import hint
from slipway.config.params import read_content
from slipway.config.stage_graph import Pipeline, read_pipeline
from slipway.experiments import repository, take_journal
from slipway.experiments.causes import find_cause
from slipway.experiments.duration import predicted, stages_that_run
from slipway.experiments.records import (
    ExperimentRecord,
    log_path,
    new_name,
    now,
    params_of,
    read_records,
    shortened,
    write_record,
)
from slipway.experiments.reproduction import Reproduction, is_running
from slipway.experiments.results import read_results
from slipway.preflight.project import check_project
from slipway.project.network_change import with_assignments
from slipway.reports import summary
from slipway.system import files
from slipway.system.errors import LockedError, ParamsError, SlipwayError

PARAMS, LOCK = Path("params.yaml"), Path(".work/experiments/lock")
_LONGEST_CAUSE = 400  # characters; the stage has printed all of it
_NOT_SAVED = "killed before DVC saved it; `slipway run` repeats it in seconds"
_STOPPED = "run the same command again to resume from the last checkpoint"


@dataclass(frozen=True)
class ExperimentRequest:
    """The arguments of `slipway run`: stages and assignments in any order, and a name."""

    words: Sequence[str] = ()  # STAGE or KEY=VALUE
    name: str | None = None
    is_quiet: bool = False  # the output of the stages goes only into the log

    @property
    def assignments(self) -> list[str]:
        """The arguments of the form KEY=VALUE."""
        return [word for word in self.words if "=" in word]

    @property
    def stages(self) -> list[str]:
        """The arguments without "=", which name stages."""
        return [word for word in self.words if "=" not in word]

    def stage(self, pipeline: Pipeline) -> str | None:
        """Return the requested stage; raises ParamsError for an unknown one, or for several."""
        stages = self.stages
        for stage in stages:
            if stage not in pipeline.outs:
                near = hint(stage, list(pipeline.outs), "the stages are")
                raise ParamsError(
                    f"{stage!r} is not a stage of dvc.yaml, expected a stage or KEY=VALUE; {near}"
                )
        if len(stages) > 1:
            raise ParamsError(
                f"the stages {', '.join(stages)} were given, expected at most one. "
                "Give the last one: the stages before it run as well."
            )
        return stages[0] if stages else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lock the project for a run; raises LockedError if another run, or its DVC, is still active.

    Undoes a `slipway take` that was killed.
    """
    with files.lock(LOCK, "`slipway run`"):
        for record in read_records():
            if record.status == "running" and record.group and is_running(record.group):
                raise LockedError(
                    f"{record.name} was killed, but its DVC still runs as process {record.group}; "
                    "expected none. It ends with its stage: wait for it, or end it with "
                    f"`kill -- -{record.group}`."
                )
        repository.restore_head()
        if undone := take_journal.undo():
            print(undone, flush=True)
        yield


def run(request: ExperimentRequest) -> ExperimentRecord:
    """Run the pipeline and return the record, even if the run failed.

    Raises SlipwayError, without a record, if nothing was run.
    """
    with alone():
        stage = request.stage(read_pipeline())
        name = new_name(request.name)
        lines = _set_params(request.assignments)
        if not request.is_quiet:
            lines.append(f"experiment {name}; {log_path(name)} has DVC's lines, too")
            print("\n".join(lines), flush=True)
            if text := _time_needed(stage):
                print(text, flush=True)
        return _reproduce(name, stage, is_quiet=request.is_quiet)


def _time_needed(stage: str | None) -> str:
    content = read_content()
    try:
        stages = stages_that_run(content, read_pipeline(content), stage)
        return predicted(content, stages, read_records())
    except (SlipwayError, OSError):  # the stage that it concerns reports it
        return ""


def _unfinished_stage() -> str | None:
    """Return the stage that the last run left half done, the training if it is not known."""
    last = next((one for one in read_records() if one.search is None), None)
    is_unfinished = last is not None and last.ended not in ("done", "running")
    return (last.ended_at or "train") if last and is_unfinished else None


def _set_params(assignments: list[str]) -> list[str]:
    """Write new values to params.yaml and check the project; restore the file if it is refused.

    Returns what was changed, line by line.
    """
    before = PARAMS.read_text()
    after, lines = before, list[str]()
    if assignments:
        after, lines = with_assignments(before, read_assignments(assignments))
        lines.append("(params.yaml stays so after the run)")
    if after != before:
        files.write_text(PARAMS, after)
    try:
        check_project()
    except BaseException:
        if after != before:
            files.write_text(PARAMS, before)
        raise
    return lines


def _reproduce(name: str, stage: str | None, *, is_quiet: bool) -> ExperimentRecord:
    content = read_content()
    params, started = params_of(content), time.monotonic()
    resumed = _unfinished_stage()
    record = ExperimentRecord(
        format_version=1,
        name=name,
        started=now(),
        seconds=None,
        status="running",
        cause="",
        stage=stage,
        params=params,
        results=None,
        process=os.getpid(),
        group=None,
    )
    reproduction = Reproduction(log_path(name), is_quiet)

    def note_group(group: int) -> None:
        write_record(record.model_copy(update={"group": group}))

    write_record(record)
    reproduction.run(stage, note_group)
    end = _end(reproduction, params)
    pipeline = read_pipeline(content)
    results = None
    with contextlib.suppress(SlipwayError):  # a stage reports it when it reads the file
        results = read_results(Path(), _up_to_date(pipeline, end, stage), content)
    record = record.model_copy(
        update={
            "seconds": round(time.monotonic() - started, 1),
            "status": end.status,
            "cause": end.cause,
            "ended_at": end.stage,
            "stage_seconds": {
                ran: seconds
                for ran, seconds in reproduction.stage_seconds.items()
                if ran != resumed  # the earlier run did a part of it
            },
            "results": results,
        }
    )
    if record.status != "done" or stage is not None:
        write_record(record)
        return record
    write_record(record.model_copy(update={"cause": _NOT_SAVED}))  # true if it is killed now
    try:
        repository.save(name, [path for paths in pipeline.metrics.values() for path in paths])
    except SlipwayError as error:
        record = record.model_copy(update={"cause": f"it cannot be taken: {error}"})
    write_record(record)
    return record


def conclude(record: ExperimentRecord, *, is_quiet: bool = False) -> None:
    """Print the result of a run.

    After a run of all stages, this is the project's summary, which ends with the next step. Raises
    SlipwayError if the run failed or missed a quality gate, KeyboardInterrupt if it was stopped.
    """
    log = log_path(record.name)
    if record.status == "interrupted":
        print(f"\n{record.name} was interrupted: {record.cause}. Its output: {log}")
        raise KeyboardInterrupt
    if record.status != "done":
        raise SlipwayError(
            f"{record.name} failed after {record.seconds:.0f} s: "
            f"{shortened(record.reason.rstrip('.'), _LONGEST_CAUSE)}.\n"
            f"Its output is in {log}. Run the same command again after the correction: finished "
            "stages are not repeated."
        )
    print(f"\n{record.name}: done in {record.seconds:.0f} s; `slipway compare` lists it\n")
    if record.cause:
        print(f"warning: {record.cause}\n")
    if not is_quiet and (hint := commit_hint(record)):
        print(f"{hint}\n")
    if record.stage is None and "verify" in read_pipeline().outs:
        summary.main(Path())


def commit_hint(record: ExperimentRecord) -> str:
    """Return the command that commits the results of a run of all stages; "" if git has them."""
    folders = {Path(path).parts[0] for paths in read_pipeline().metrics.values() for path in paths}
    if record.stage is not None or not repository.has_commit():
        return ""
    paths = repository.uncommitted(["params.yaml", "dvc.lock", *sorted(folders)])
    command = f"git add {' '.join(paths)} && git commit -m {record.name}"
    return f"keep this state in git, so that others and CI have it: {command}" if paths else ""


@dataclass(frozen=True)
class _End:
    status: str
    cause: str = ""
    stage: str = ""  # of a failure or an interruption


def _end(reproduction: Reproduction, params: dict[str, Any]) -> _End:
    edited = _edited_keys(params)
    if reproduction.exit_code == 0 and not edited:
        return _End("done")
    found = find_cause(reproduction.output)
    if reproduction.exit_code == 0:
        return _End(
            "failed",
            f"params.yaml was edited while it ran: {', '.join(edited)}; expected no change. The "
            "results may be of the former values. Run again",
        )
    if reproduction.signals:
        return _End("interrupted", _STOPPED, found.stage)
    return _End("failed", found.text, found.stage)


def _edited_keys(params: dict[str, Any]) -> list[str]:
    """List the keys that were edited since the start."""
    try:
        now_there = params_of(read_content())
    except SlipwayError:
        return ["it cannot be read now"]
    return sorted(
        key for key in params.keys() | now_there.keys() if params.get(key) != now_there.get(key)
    )


def _up_to_date(pipeline: Pipeline, end: _End, stage: str | None) -> list[str]:
    """List the stages that the run left up to date."""
    if end.status == "done":
        return [*pipeline.before(stage), stage] if stage else list(pipeline.outs)
    return pipeline.before(end.stage) if end.stage else []
