"""`slipway search`: chooses trials, runs them outside the workspace, and records every result."""

import itertools
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slipway.config.edit import changed_text
from slipway.config.params import filled, parse_params, value_at
from slipway.config.search import SearchParams
from slipway.config.stage_graph import read_pipeline
from slipway.config.yaml_files import parse_yaml
from slipway.experiments import repository
from slipway.experiments.records import (
    ExperimentRecord,
    Validation,
    now,
    params_of,
    read_records,
    write_record,
)
from slipway.planning.search_space import Space, changed_content, read_space
from slipway.preflight.project import check_project
from slipway.search.console import SearchEnd, introduction, result_text
from slipway.search.gpus import visible_gpus
from slipway.search.journal import JobLine, ResultLine
from slipway.search.locks import Interrupted, held, try_lock
from slipway.search.page import PAGE, optimism_of, search_page
from slipway.search.study import (
    STUDIES,
    Study,
    identity,
    later_metrics,
    open_study,
    shared_lock,
    shared_stages,
)
from slipway.search.trial import (
    JobResult,
    TrialPlan,
    remove_state,
    reproduce_shared,
    run_job,
)
from slipway.search.workspace_copy import (
    Snapshot,
    new_folder,
    remove_folders,
    take_snapshot,
)
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import ParamsError

PARAMS, LOCK = Path("params.yaml"), STUDIES / "lock"
_SHARED_LOG, _SETUP = STUDIES / "shared.log", STUDIES / "setup.lock"
_FOLDER_LOCKS = STUDIES / "locks"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXAMPLE = "docs/how-to/search.md has one to begin with"


def search(name: str | None, *, is_quiet: bool = False, is_joint: bool = False) -> SearchEnd:
    """Run trials until the budget is used, and write the page; resumes an interrupted equal search.

    `is_quiet` omits the lines of progress. With `is_joint`, several processes in the same folder,
    on any machine, share the trials; each trains one trial at a time. Raises ParamsError for a
    mistake in the section `search` before anything is trained, and SlipwayError if no trial can
    run here.
    """
    text, content = read_project()
    whole = parse_params(content)
    params = whole.search
    if params is None:
        raise ParamsError(
            "params.yaml has no section search, expected one with a space, a method and a budget; "
            f"{_EXAMPLE}."
        )
    space = read_space(content, params)
    study = run_trials(text, space, params, name, is_quiet=is_quiet, is_joint=is_joint)
    optimism = optimism_of(study, space, whole.evaluate.top_k, whole.seed)
    files.write_text(PAGE, search_page(study, space, optimism))
    return SearchEnd(study, optimism)


def read_project() -> tuple[str, dict[str, Any]]:
    """Check the whole project; return the text of params.yaml and its parsed content."""
    text = PARAMS.read_text() if PARAMS.is_file() else ""
    check_project(with_search=True)
    content: dict[str, Any] = parse_yaml(text.encode(), str(PARAMS))
    return text, content


def run_trials(
    text: str,
    space: Space,
    params: SearchParams,
    name: str | None,
    *,
    prefix: str = "search",
    is_quiet: bool = False,
    is_joint: bool = False,
) -> Study:
    """Run trials until the end of the budget; return the study with their results.

    Args:
        text: the text of params.yaml; the content of `space` differs at most in section `search`.
        name: the name of the study; None for PREFIX-NUMBER, or for the latest equal study.
        prefix: beginning of the name of a new study if `name` is None.
    """
    purpose = "`slipway search`"
    with files.lock(LOCK, purpose, is_shared=is_joint), _signals() as stop:
        if not is_joint:
            remove_folders()
        running = _Search(text, space, params, stop, is_quiet=is_quiet, is_joint=is_joint)
        try:
            return running.run(name, prefix)
        except Interrupted:
            stop.end()
            raise


class _Search:
    """A running search: starts jobs, waits for results, and records them."""

    def __init__(
        self,
        text: str,
        space: Space,
        params: SearchParams,
        stop: "_Stop",
        *,
        is_quiet: bool,
        is_joint: bool,
    ) -> None:
        self._is_joint = is_joint
        self._num_workers = 1 if is_joint else params.workers
        self._text, self._params, self._space = text, params, space
        self._content = content = space.values
        self._stop, self._is_quiet = stop, is_quiet
        self._pipeline = read_pipeline(content)
        self._lock = ""
        # A single trial at a time chooses its GPUs as any training does.
        shares_gpus = params.workers > 1 and value_at(content, "train.accelerator") != "cpu"
        self._gpus = visible_gpus() if shares_gpus else []
        self._running: dict[Future[JobResult], tuple[_Claim, float]] = {}
        self._interrupted: list[JobLine] = []

    def run(self, name: str | None, prefix: str) -> Study:
        with held(_SETUP, self._stop.event):
            snapshot = take_snapshot(self._content, later_metrics(self._pipeline))
            digest = self._run_shared(snapshot)
            epochs = int(value_at(self._content, "train.epochs"))
            threads = max(1, num_cores() // self._num_workers)
            study = open_study(name, prefix, digest, self._params, epochs, threads)
        self._study = study
        for damage in study.journal.damages:
            print(f"warning: {damage}", file=sys.stderr)
        repository.keep_snapshot(study.name, snapshot.tree)
        where = " in each process" if self._is_joint else ""
        self._say(introduction(study, self._space, self._num_workers, where))
        with ThreadPoolExecutor(self._num_workers) as pool:
            try:
                self._work(snapshot, pool)
            except BaseException:
                self._stop.event.set()
                raise
        if self._stop.number:
            for job in self._interrupted:
                cause = "the search was ended; run `slipway search` again to resume"
                self._update(job, status="interrupted", cause=cause)
            self._stop.end()
        with held(study.lock):
            for trial in range(study.schedule.num_trials):
                remove_state(study.state(trial))
        return study

    def _run_shared(self, snapshot: Snapshot) -> str:
        """Run the stages that all trials share; return the digest that identifies the search."""
        shared = shared_stages(self._pipeline, list(self._params.space))
        started = time.monotonic()
        self._say(f"shared stages: {', '.join(shared)}")
        with new_folder(snapshot, "shared", self._text, None) as folder:
            reproduce_shared(folder, shared, _SHARED_LOG.resolve(), self._stop.event)
            self._lock = shared_lock((folder / "dvc.lock").read_text(), shared)
            code = folder / "code.yaml"
            digest = identity(self._content, self._lock, code.read_text() if code.is_file() else "")
        self._say(f"shared stages: done in {time.monotonic() - started:.0f} s")
        return digest

    def _work(self, snapshot: Snapshot, pool: ThreadPoolExecutor) -> None:
        """Run jobs until the end of the budget, or a signal."""
        stop = self._stop.event
        while not stop.is_set():
            while len(self._running) < self._num_workers and not stop.is_set():
                found = self._study.claim(self._space)
                if found is None:
                    break
                claim = _Claim(*found, *_free_folder())
                self._update(claim.job, status="running", process=os.getpid(), host=platform.node())
                future = pool.submit(run_job, snapshot, self._plan(claim), stop)
                self._running[future] = claim, time.monotonic()
            if self._running:
                done, _ = wait(self._running, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    self._end(future)
            elif self._study.unfinished:  # other processes run the remaining jobs
                stop.wait(1)
            else:
                return
        wait(self._running)
        for future in list(self._running):
            self._end(future)

    def _plan(self, claim: "_Claim") -> TrialPlan:
        study, job = self._study, claim.job
        is_pinned = study.threads != num_cores()
        changes = self._space.changes(job.values)
        devices = value_at(filled(changed_content(self._space.content, changes)), "train.devices")
        return TrialPlan(
            name=study.trial_name(job.trial),
            folder=claim.folder,
            params=changed_text(self._text, changes),
            lock=self._lock,
            state=study.state(job.trial),
            answers=study.answers(job.trial),
            metric=self._params.metric,
            epoch=job.epoch,
            is_last=job.level == len(study.schedule.rungs) - 1,
            threads=study.threads if is_pinned else None,
            gpus=self._gpus,
            num_gpus=devices if isinstance(devices, int) else 1,
            locks=(claim.folder_lock.fileno(), claim.trial_lock.fileno()),
        )

    def _end(self, future: "Future[JobResult]") -> None:
        """Record the result of a finished job, and release the locks of its trial and folder."""
        claim, started = self._running.pop(future)
        with claim.folder_lock, claim.trial_lock:
            try:
                found = future.result()
            except Interrupted:
                self._interrupted.append(claim.job)
                return
            self._add_result(claim.job, found, time.monotonic() - started)

    def _add_result(self, job: JobLine, found: JobResult, seconds: float) -> None:
        line = ResultLine(
            event="result",
            job=job.job,
            trial=job.trial,
            status=found.status,
            epoch=found.epoch,
            score=found.score,
            metric=found.metric,
            seconds=round(seconds, 1),
            cause=found.cause,
        )
        with held(self._study.lock):
            self._study.add_result(line)
        self._write_result(job, line)
        self._say(result_text(self._study, job, line))

    def _update(self, job: JobLine, **changes: Any) -> None:
        """Change the record of a trial, and write it."""
        write_record(self._record(job).model_copy(update=changes))

    def _record(self, job: JobLine) -> ExperimentRecord:
        """Return the existing record of a trial, or a new one."""
        name = self._study.trial_name(job.trial)
        known = {record.name: record for record in read_records()}
        if name in known:
            return known[name]
        return ExperimentRecord(
            format_version=1,
            name=name,
            started=now(),
            seconds=None,
            status="running",
            cause="",
            stage="train",
            params=params_of(changed_content(self._space.content, self._space.changes(job.values))),
            results=None,
            process=os.getpid(),
            group=None,
            search=self._study.name,
        )

    def _write_result(self, job: JobLine, line: ResultLine) -> None:
        cause, score = line.cause, None
        if line.status == "stopped":
            cause = f"stopped after epoch {line.epoch}: others were better there"
        if line.score is not None:
            score = Validation(
                name=self._params.metric, epoch=line.epoch, value=line.score, metric=line.metric
            )
        self._update(
            job,
            status=line.status,
            cause=cause,
            seconds=round(self._study.seconds(line.trial), 1),
            validation=score,
        )

    def _say(self, text: str) -> None:
        if not self._is_quiet:
            print(text, flush=True)


@dataclass(frozen=True)
class _Claim:
    """A job with its folder, and the locks of both, which the job's processes inherit."""

    job: JobLine
    trial_lock: IO[bytes]
    folder: str
    folder_lock: IO[bytes]


def _free_folder() -> tuple[str, IO[bytes]]:
    """Lock a folder that no trial uses; return its name and the lock."""
    names = (f"worker-{number}" for number in itertools.count())
    locks = ((name, try_lock(_FOLDER_LOCKS / name)) for name in names)
    return next((name, lock) for name, lock in locks if lock)


@dataclass
class _Stop:
    """The signal that the user or the system sent to end the search; `number` is 0 before it."""

    event: threading.Event
    number: int = 0

    def end(self) -> None:
        """End the process as shells expect after a signal.

        Raises KeyboardInterrupt after Ctrl-C, else exits with the status 128 + signal number.
        """
        print("\nended; run `slipway search` again to resume", flush=True)
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + self.number)


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Handle signals: the first ends all trials after a checkpoint, the second this process."""
    stop = _Stop(threading.Event())

    def handle(number: int, _: FrameType | None) -> None:
        if stop.number:
            os._exit(128 + number)
        stop.number = number
        stop.event.set()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
