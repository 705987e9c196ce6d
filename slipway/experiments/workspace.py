"""`slipway take` and `slipway reset`: change the workspace without losing the user's edits."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from slipway.config.params import no_project, read_content, value_at
from slipway.config.stage_graph import read_pipeline
from slipway.config.yaml_text import as_yaml
from slipway.experiments import repository, take_journal
from slipway.experiments.records import (
    ExperimentRecord,
    find_record,
    params_of,
    read_records,
    shortened,
)
from slipway.experiments.run import PARAMS, alone
from slipway.system.errors import LockedError, ParamsError

_LONGEST_CAUSE, _LONGEST_COMMAND = 400, 80  # characters
_PROGRAMS = ("dvc", "slipway", "bentoml")
_WORK, _REPORTS = Path(".work"), Path("reports")
# What others than stages keep in .work: records, downloads, settings, DVC's state, and the state of
# the service, with feedback, history and rolled-out models.
_KEPT = ("experiments", "search", "cache", "config", "dvc", "home", "serving")
# Keys of params.yaml that may name the user's own files.
_OF_THE_USER = (
    *("data.path", "data.split_file", "data.checksums"),
    *("evaluate.reference_model", "train.pretrained", "precompute.tokenizer"),
)


def take(name: str, *, accept_loss: bool) -> ExperimentRecord | None:
    """Restore an experiment in the workspace: params, code, metrics, outputs; return its record.

    A trial of a search ends with the stage train, so the stages after it remain to be run.

    Raises ParamsError if the experiment does not exist, if DVC has no results of it, or if edits
    would be lost, unless `accept_loss`. Raises SlipwayError if DVC fails; then the workspace is as
    before.
    """
    if not PARAMS.exists():
        raise no_project(PARAMS)
    with alone():
        record = find_record(name, read_records())
        if name not in repository.experiments():
            assert record is not None
            raise ParamsError(_why_not(record))
        if not accept_loss:
            repository.refuse_unsaved_edits(repository.unsaved_edits())
        take_journal.begin(name)
        try:
            repository.apply(name, _never_made(record))
        except BaseException as error:
            error.add_note(take_journal.undo())
            raise
        take_journal.end()
        return record


def opened_before(trial: ExperimentRecord) -> list[str]:
    """List other trials of the search whose stages after the training have run.

    Each of them was evaluated on the test rows, so a further choice by these rows is optimistic.
    """
    records = read_records()
    evaluated = [one.params for one in records if one.stage is None and one.results is not None]
    return [
        other.name
        for other in records
        if other.search == trial.search and other.name != trial.name and other.params in evaluated
    ]


def _never_made(record: ExperimentRecord | None) -> list[str]:
    """List the outputs of the stages that a trial of a search did not run."""
    if record is None or record.search is None or record.stage is None:
        return []
    pipeline = read_pipeline()
    ran = [*pipeline.before(record.stage), record.stage]
    return [path for stage, paths in pipeline.outs.items() if stage not in ran for path in paths]


def _why_not(record: ExperimentRecord) -> str:
    """Describe why an experiment cannot be taken, and the command that repeats it."""
    why = shortened(record.reason.rstrip("."), _LONGEST_CAUSE) or "its results were not kept"
    if record.ended == "done" and record.stage:
        why = f"it ended with the stage {record.stage}"
    here = params_of(read_content())
    again = [
        f"'{key}={as_yaml(value)}'"
        for key, value in record.params.items()
        if here.get(key) != value
    ]
    return (
        f"{record.name} cannot be taken: {why}; expected a run of all stages that is done. "
        f"Repeat it: slipway run {' '.join(again)}".rstrip()
    )


def removable() -> list[Path]:
    """List what `slipway reset` removes: outputs of stages, pages and work in progress.

    Never the data or another file that params.yaml names, a file in git, DVC's cache, the records
    of experiments, the state of the service, and downloads.
    """
    with alone():  # undoes a killed `slipway take` before anything is listed
        content = read_content()
        _require_idle()
    outputs = [path for paths in read_pipeline(content).outs.values() for path in paths]
    pages = [*_REPORTS.glob("*.html"), *_REPORTS.glob("*.png")]
    work = [path for path in _WORK.glob("*") if path.name not in _KEPT]
    found = dict.fromkeys([*map(Path, outputs), *pages, *work])
    values = [value_at(content, key) for key in _OF_THE_USER]
    mine = [Path(value) for value in values if isinstance(value, str)]
    return [
        path
        for path in found
        if (path.exists() or path.is_symlink())
        and not any(_overlap(path, other) for other in mine)
        and not repository.is_tracked(path)
    ]


def reset(paths: list[Path]) -> None:
    """Remove the paths while nothing runs."""
    with alone():
        _require_idle()
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _require_idle() -> None:
    """Raise LockedError if DVC, a stage, a verb or a service of this project still runs."""
    if working := working_in(Path()):
        shown = "; ".join(f"`{command}` is process {one}" for one, command in working.items())
        raise LockedError(
            f"this project is in use: {shown}; expected nothing that reads or writes what reset "
            f"removes. Wait for the end, or bring it about: kill {' '.join(map(str, working))}"
        )


def working_in(project: Path) -> dict[int, str]:
    """Return the command of each process that works in a project, by its id, as far as Linux says.

    These are DVC, stages, the service and verbs of `slipway`, started in the project or below it.
    Processes that one of them has started are left out, and so are those around this one.
    """
    root, parents, found = project.resolve(), dict[int, int](), dict[int, str]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is another user's
            process, place = int(entry.name), Path(os.readlink(entry / "cwd"))
            parents[process] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if place.is_relative_to(root) and (command := _command(words)):
                found[process] = command
    process = os.getpid()
    while process in parents:
        found.pop(process, None)
        process = parents[process]
    return {one: found[one] for one in sorted(found) if parents[one] not in found}


def _command(words: Sequence[str]) -> str:
    """Return the command of a program that works in a project, shortened; "" for any other one."""
    is_python = Path(words[0]).name.startswith("python")
    for place, word in enumerate(words[: 4 if is_python else 1]):
        module = word if place and words[place - 1] == "-m" else ""
        name = module.partition(".")[0] or Path(word).name
        rest = [one for one in words[place + 1 :] if one]
        if name in _PROGRAMS and (module or place < 2) and rest[:1] not in (["reset"], ["show"]):
            shown = name if module in ("", name, f"{name}.cli") else f"python -m {module}"
            return shortened(" ".join([shown, *rest]), _LONGEST_COMMAND)
    return ""


def _overlap(one: Path, other: Path) -> bool:
    first, second = one.resolve(), other.resolve()
    return first.is_relative_to(second) or second.is_relative_to(first)
