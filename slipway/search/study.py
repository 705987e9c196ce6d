"""A search on disk: its journal and the states of its trials below `.work/search/NAME/`.

A search resumes if an equal one exists. Two searches are equal if they have the same space, method,
seed and number of workers, the same params of all stages up to train, the same code and the same
rows. The budget may differ.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML

from slipway.config.params import filled
from slipway.config.search import SearchParams
from slipway.config.stage_graph import Pipeline
from slipway.config.yaml_files import parse_yaml
from slipway.experiments import repository
from slipway.experiments.records import EXPERIMENTS
from slipway.planning.search_space import Space
from slipway.search.journal import JobLine, Journal, ResultLine, StudyLine
from slipway.search.locks import held, try_lock
from slipway.search.proposals import propose
from slipway.search.schedule import END, WAIT, NewTrial, Promotion, Schedule
from slipway.system import files
from slipway.system.errors import SlipwayError

STUDIES = Path(".work/search")
_JOURNAL = "journal.jsonl"
_NUMBERED = re.compile(r"([a-z]+)-(\d+)")
_TRAIN = "train"
# Sections of params.yaml on which the model and its validation score depend.
_SECTIONS = ("seed", "data", "clean", "split", "precompute", "augment", "train")


@dataclass
class Study:
    """A search: its journal on disk and its schedule in memory."""

    journal: Journal
    schedule: Schedule

    @property
    def name(self) -> str:
        return self.journal.study.name

    @property
    def threads(self) -> int:
        """The number of threads of each process of a trial."""
        return self.journal.study.threads

    @property
    def folder(self) -> Path:
        return STUDIES / self.name

    def state(self, trial: int) -> Path:
        """Return the folder of a trial's checkpoints."""
        return self.folder / "checkpoints" / f"{trial:03d}"

    def answers(self, trial: int) -> Path:
        """Return the path of a trial's answers to the validation rows, without its suffix."""
        return self.folder / "answers" / f"{trial:03d}"

    def trial_name(self, trial: int) -> str:
        """Return the name of a trial's experiment."""
        return f"{self.name}-{trial:03d}"

    @property
    def lock(self) -> Path:
        """Return the path of the lock of the journal."""
        return self.folder / "lock"

    @property
    def unfinished(self) -> list[JobLine]:
        """The started jobs that have no result yet."""
        schedule = self.schedule
        return [job for job in schedule.jobs if job.job not in schedule.results]

    def refresh(self) -> None:
        """Read the journal again, with the lines that other processes have appended."""
        self.journal.read()
        self.schedule.jobs, self.schedule.results = _decisions(self.journal)

    def claim(self, space: Space) -> tuple[JobLine, IO[bytes]] | None:
        """Return a job that no process runs, and the lock of its trial; None if there is none now.

        The caller must pass the lock to the trial's processes, and close it after the result.
        """
        with held(self.lock):
            self.refresh()
            while True:
                for job in self.unfinished:
                    if lock := try_lock(self.folder / "locks" / f"{job.trial:03d}"):
                        return job, lock
                new = next_job(self.schedule, space)
                if new is None:
                    return None
                self.add_job(new)

    def add_job(self, line: JobLine) -> None:
        """Append a job to the journal and the schedule."""
        self.journal.append(line)
        self.schedule.jobs.append(line)

    def add_result(self, line: ResultLine) -> None:
        """Append the result of a job to the journal and the schedule."""
        self.journal.append(line)
        self.schedule.results[line.job] = line

    def seconds(self, trial: int) -> float:
        """Return the total duration of a trial's jobs in seconds."""
        return sum(one.seconds for one in self.schedule.results.values() if one.trial == trial)


def next_job(schedule: Schedule, space: Space) -> JobLine | None:
    """Return the next job, for the caller to add to the schedule; None if there is none now."""
    while True:
        decision = schedule.next()
        if decision in (WAIT, END):
            return None
        if isinstance(decision, Promotion):
            values = next(job.values for job in schedule.jobs if job.trial == decision.trial)
            trial, level = decision.trial, decision.level
        else:
            assert isinstance(decision, NewTrial)
            trial, level = schedule.num_trials, 0
            found = propose(space, schedule.params, trial, decision.outcomes)
            if found is None:
                schedule.is_exhausted = True
                continue
            values = found
        is_last = level == len(schedule.rungs) - 1
        epochs = int(values.get("train.epochs", schedule.epochs))
        return JobLine(
            event="job",
            job=len(schedule.jobs),
            trial=trial,
            values=values,
            level=level,
            epoch=epochs if is_last else schedule.rungs[level],
        )


def shared_stages(pipeline: Pipeline, keys: Sequence[str]) -> list[str]:
    """List the stages before train that no key of the space affects, in their order."""
    shared: list[str] = []
    for stage in pipeline.before(_TRAIN):
        reads = any(_overlap(key, read) for key in keys for read in pipeline.params[stage])
        if not reads and all(before in shared for before in pipeline.before(stage)):
            shared.append(stage)
    return shared


def trial_stages(pipeline: Pipeline) -> list[str]:
    """List the stages of a trial, in their order."""
    return [*pipeline.before(_TRAIN), _TRAIN]


def later_metrics(pipeline: Pipeline) -> list[str]:
    """List the metrics files of the stages that no trial runs."""
    own = trial_stages(pipeline)
    return [path for stage, paths in pipeline.metrics.items() if stage not in own for path in paths]


def shared_lock(text: str, shared: Sequence[str]) -> str:
    """Return the text of dvc.lock with only the stages `shared` by all trials."""
    import io

    content = parse_yaml(text.encode(), "dvc.lock")
    content["stages"] = {name: entry for name, entry in content["stages"].items() if name in shared}
    written = io.StringIO()
    YAML(typ="safe", pure=True).dump(content, written)
    return written.getvalue()


def identity(content: Mapping[str, Any], lock: str, code: str) -> str:
    """Return a digest of everything that all trials of a search have in common.

    Args:
        lock: the text of dvc.lock after the shared stages.
        code: the text of code.yaml.
    """
    search = {key: value for key, value in content["search"].items() if key != "budget"}
    sections = {name: filled(content).get(name) for name in _SECTIONS}
    return files.digest_json(
        {"search": search, "params": sections, "lock": lock, "code": code},
    )


def open_study(
    name: str | None, prefix: str, digest: str, params: SearchParams, epochs: int, threads: int
) -> Study:
    """Return the existing study of an equal search, or create one.

    A new study is called `name`, or PREFIX-NUMBER if `name` is None. `threads` is the number of
    threads of each process of a trial. Raises ParamsError or SlipwayError if another search has
    this name.
    """
    damages: list[str] = []
    for path in sorted(STUDIES.glob(f"*/{_JOURNAL}")):
        journal = Journal(path).read()
        damages += journal.damages
        try:
            first = journal.study
        except SlipwayError as error:
            damages.append(str(error))
            continue
        if first.identity == digest and name in (None, first.name):
            study = Study(journal, _schedule(journal, params))
            journal.damages = damages
            return study
        if first.name == name:
            raise SlipwayError(
                f"{name} is another search: its space, method, params, code or rows differ. "
                "Expected an equal one or a new name. Leave --name out, or choose another."
            )
    study = _new_study(name, prefix, digest, params, epochs, threads)
    study.journal.damages = damages
    return study


def _new_study(
    name: str | None, prefix: str, digest: str, params: SearchParams, epochs: int, threads: int
) -> Study:
    taken = {path.name for path in STUDIES.glob("*")}
    taken |= {found.rpartition("-")[0] for found in repository.experiments()}
    taken |= {path.stem.rpartition("-")[0] for path in EXPERIMENTS.glob("*.json")}
    if name is None:
        found = [_NUMBERED.fullmatch(one) for one in taken]
        numbers = [int(one[2]) for one in found if one and one[1] == prefix]
        name = f"{prefix}-{max(numbers, default=0) + 1}"
    elif name in taken:
        raise SlipwayError(
            f"{name} is the name of experiments already, and a name is used once. Choose another."
        )
    journal = Journal(STUDIES / name / _JOURNAL)
    journal.append(
        StudyLine(
            event="study",
            format_version=1,
            name=name,
            identity=digest,
            threads=threads,
            epochs=epochs,
        )
    )
    return Study(journal, _schedule(journal, params))


def _schedule(journal: Journal, params: SearchParams) -> Schedule:
    return Schedule(params, journal.study.epochs, *_decisions(journal))


def _decisions(journal: Journal) -> tuple[list[JobLine], dict[int, ResultLine]]:
    """Return (jobs, results by job) of a journal; jobs after the first lost one are left out."""
    found = {line.job: line for line in journal.lines if isinstance(line, JobLine)}
    jobs: list[JobLine] = []
    while len(jobs) in found:
        jobs.append(found[len(jobs)])
    results = {line.job: line for line in journal.lines if isinstance(line, ResultLine)}
    return jobs, results


def _overlap(one: str, other: str) -> bool:
    """Return True if both keys are equal, or one contains the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
