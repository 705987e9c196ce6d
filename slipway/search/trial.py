"""Runs a job of a search: `dvc repro train` in a separate folder.

The checkpoints of an unfinished training are kept outside this folder. A trial that was killed, or
stopped at a rung, resumes from its checkpoint with bit-identical results.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipway.artifacts.bundle import Metric
from slipway.artifacts.locations import TRAINED
from slipway.experiments.causes import find_cause
from slipway.experiments.records import log_path
from slipway.experiments.repository import dvc_environment
from slipway.search.gpus import ReservedGpus, reserved_gpus
from slipway.search.locks import Interrupted, held
from slipway.search.workspace_copy import Snapshot, end_processes, new_folder
from slipway.system import files
from slipway.system.errors import SchemaError, SlipwayError
from slipway.training.checkpoints.checkpoints import newest_manifest
from slipway.training.distributed.stop_signals import PAUSE

_KILLED = re.compile(r"exited with (-9|-15|137|143)\b")
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_ATTEMPTS = 3  # attempts of a training whose process is killed from outside
_SAVES = 3  # attempts to save, because a `slipway run` may save at the same moment
_TAIL = 1 << 18  # bytes at the end of an output in which the cause of a failure is searched
_POLL_S = 0.1
_SAVING = Path(".work/search/saving.lock")  # DVC cannot save two experiments at once


@dataclass(frozen=True)
class TrialPlan:
    """The settings of one job of a search: its params, folders and outputs."""

    name: str  # name of the trial's experiment
    folder: str  # name of the job's folder, which only one job at a time uses
    params: str  # text of params.yaml
    lock: str  # text of dvc.lock after the stages that all trials share
    state: Path  # folder of the trial's checkpoints, kept until the search ends
    answers: Path  # output path of the predictions of the validation rows, without suffix
    metric: str  # metric by which the search selects
    epoch: int  # last epoch of the job
    is_last: bool  # True if the job trains the trial to its end
    threads: int | None  # None: the training chooses
    gpus: Sequence[str] = ()  # GPUs to choose from; empty: the training chooses its devices
    num_gpus: int = 1  # number of GPUs to reserve
    locks: Sequence[int] = ()  # file descriptors that the job's processes inherit


@dataclass(frozen=True)
class JobResult:
    """Status, last epoch and score of a finished job."""

    status: str  # "stopped", "done" or "failed"
    epoch: int
    score: float | None
    metric: Metric | None = None
    cause: str = ""


def run_job(snapshot: Snapshot, plan: TrialPlan, stop: threading.Event) -> JobResult:
    """Train the trial up to `plan.epoch`, and return the result.

    A training that fails because of its values is a result, too.

    Raises:
        Interrupted: `stop` was set before the end.
        SlipwayError: no trial can run here, such as on a full disk.
    """
    if not plan.is_last and (reached := _reached(plan)):
        return reached
    with (
        reserved_gpus(plan.gpus, plan.num_gpus, stop) as gpus,
        new_folder(snapshot, plan.folder, plan.params, plan.lock) as folder,
    ):
        if gpus is None:
            raise Interrupted
        work = folder / ".work/train"
        plan.state.mkdir(parents=True, exist_ok=True)
        work.symlink_to(plan.state.resolve())
        for _ in range(_ATTEMPTS):
            code, output = _reproduce(folder, plan, stop, gpus)
            if stop.is_set() and code != 0:
                raise Interrupted
            if code == 0:
                return _finished(folder, plan, stop, gpus)
            if not plan.is_last and (reached := _reached(plan)):
                return reached
            if code > 0 and not _KILLED.search(output):
                break
            end_processes(folder)
    if _NO_SPACE.search(output):  # a full disk is not caused by the trial's values
        raise SlipwayError(
            f"the training of {plan.name} found no space on the disk: {find_cause(output).text}\n"
            "No trial is lost."
        )
    last = newest_manifest(plan.state)
    return JobResult("failed", last.epoch if last else 0, None, cause=find_cause(output).text)


def reproduce_shared(folder: Path, stages: Sequence[str], log: Path, stop: threading.Event) -> None:
    """Run the stages that all trials share; SlipwayError with the cause if one fails."""
    code, output = run_logged(["repro", *stages], folder, log, stop, {})
    if stop.is_set():
        raise Interrupted
    if code:
        cause = find_cause(output)
        raise SlipwayError(
            f"{cause.stage or 'the pipeline'} failed before the first trial: {cause.text}\n"
            f"Its output is in {log}. Nothing was trained; correct this, then search again."
        )


def run_logged(
    arguments: Sequence[str],
    folder: Path,
    log: Path,
    stop: threading.Event,
    environment: Mapping[str, str],
    locks: Sequence[int] = (),
) -> tuple[int, str]:
    """Run DVC in a folder, and write its output to `log`.

    DVC inherits the file descriptors `locks`. Once `stop` is set, its processes receive SIGTERM,
    so that a training saves a checkpoint.

    Returns:
        The exit code, and the end of the output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=folder,
            env=dvc_environment() | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            pass_fds=locks,
        )
        is_asked = False
        while process.poll() is None:
            if stop.wait(_POLL_S) and not is_asked:
                is_asked = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            elif is_asked:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
    with log.open("rb") as written:
        written.seek(max(start, log.stat().st_size - _TAIL))
        return process.returncode, written.read().decode(errors="replace")


def _reproduce(
    folder: Path, plan: TrialPlan, stop: threading.Event, gpus: ReservedGpus
) -> tuple[int, str]:
    own = gpus.environment
    if not plan.is_last:
        own[PAUSE] = str(plan.epoch)
    if plan.threads is not None:
        own["OMP_THREAD_LIMIT"] = str(plan.threads)
    log = log_path(plan.name).resolve()
    return run_logged(["repro", "train"], folder, log, stop, own, [*plan.locks, *gpus.locks])


def _reached(plan: TrialPlan) -> JobResult | None:
    """Return the result if the checkpoints show that the training reached its rung; else None."""
    saved = newest_manifest(plan.state)
    if saved is None or saved.epoch < plan.epoch:
        return None
    kept = saved.kept_epoch or saved.epoch
    return JobResult("stopped", saved.epoch, saved.history[kept - 1][f"val/{plan.metric}"])


def _finished(
    folder: Path, plan: TrialPlan, stop: threading.Event, gpus: ReservedGpus
) -> JobResult:
    """Measure the trained model, save the trial as an experiment, and return the result."""
    content = json.loads((folder / TRAINED).read_bytes())
    key = f"val_{plan.metric}"
    if key not in content:
        raise SchemaError(
            f"{TRAINED} of {plan.name} has no {key}, expected the metric that the search selects "
            "by. Restore the stage train of dvc.yaml."
        )
    measured = _start_measuring(folder, plan, gpus)
    try:
        _save(folder, plan)
    finally:
        code = measured.wait()
    if stop.is_set() and code:
        raise Interrupted
    metric = _read_metric(plan) if code == 0 else None
    return JobResult("done", int(content["epochs"]), float(content[key]), metric)


def _start_measuring(
    folder: Path, plan: TrialPlan, gpus: ReservedGpus
) -> "subprocess.Popen[bytes]":
    """Start the process that measures intervals, in the trial's folder with the user's code."""
    with log_path(plan.name).open("ab") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "slipway.search.validation"),
                *(plan.metric, str(plan.answers.resolve())),
            ],
            cwd=folder,
            env=dvc_environment() | gpus.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )


def _read_metric(plan: TrialPlan) -> Metric | None:
    path = plan.answers.with_suffix(".json")
    return Metric.model_validate(json.loads(path.read_bytes())) if path.is_file() else None


def _save(folder: Path, plan: TrialPlan) -> None:
    """Save the trial as an experiment of DVC.

    All stages before train are in dvc.lock already, so only train is committed: each commit takes
    over a second. Without the name of the stage, DVC would record later stages, too.
    """
    command = ["exp", "save", "--force", "--name", plan.name, "-I", str(TRAINED), "train"]
    log = log_path(plan.name).resolve()
    with held(_SAVING):
        for _ in range(_SAVES):
            code, output = run_logged(command, folder, log, threading.Event(), {})
            if code == 0:
                return
    raise SlipwayError(
        f"`dvc exp save` of {plan.name} failed: {find_cause(output).text}\n"
        "The trial is trained; correct this, then search again to save it."
    )


def remove_state(state: Path) -> None:
    """Remove the checkpoints of a training that will not be resumed."""
    if state.is_dir():
        files.remove_directory(state)
