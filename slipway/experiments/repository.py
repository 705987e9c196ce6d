"""Runs git and DVC: lists experiments, saves the workspace as an experiment, applies one."""

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from slipway.system import files
from slipway.system.disk_faults import disk_fault
from slipway.system.errors import ParamsError, SlipwayError, UnavailableError

_REFS = "refs/exps"  # of DVC: refs/exps/aa/bbb.../NAME
_SNAPSHOTS = "refs/slipway"  # the workspace at the start of each search: refs/slipway/NAME
_HEAD = Path(".work/experiments/head")  # the branch, while DVC detaches HEAD
# DVC writes these; they are not edits of the user.
_WRITTEN = ("dvc.lock", "metrics/")
_LACKS_OUTPUTS = "ERROR: Checkout failed"  # of DVC
_SHOWN = 5


def dvc_environment() -> dict[str, str]:
    """Return the variables for DVC and its stages, which are `python -m ...` of this Python."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    own = {"PATH": path, "DVC_NO_ANALYTICS": "1", "PYTHONUNBUFFERED": "1"}
    return _committer() | os.environ | own


def _committer() -> dict[str, str]:
    """Return a name and an address for DVC's commits, if git knows none; it needs both."""
    if _git("config", "user.name") and _git("config", "user.email"):
        return {}
    values = {"NAME": "slipway", "EMAIL": "slipway@localhost"}
    roles = ("GIT_AUTHOR", "GIT_COMMITTER")
    return {f"{role}_{key}": value for role in roles for key, value in values.items()}


def experiments() -> dict[str, str]:
    """Return the commit of each experiment that DVC keeps, by name; empty without git."""
    lines = _git("for-each-ref", "--format=%(refname) %(objectname)", _REFS).splitlines()
    found = [line.split() for line in lines]
    # Others, such as refs/exps/exec/EXEC_HEAD, are DVC's own.
    return {ref.split("/")[4]: commit for ref, commit in found if len(ref.split("/")) == 5}


def has_commit() -> bool:
    """Return True if there is a commit, which DVC's experiments need."""
    return bool(_git("rev-parse", "--verify", "-q", "HEAD"))


def file_at(commit: str, path: str) -> str:
    """Return the text of a file in a commit; "" if it has none."""
    return _git("show", f"{commit}:./{path}")


def tracked_files(paths: Iterable[Path]) -> list[str]:
    """Return the paths that git tracks; an empty list without git."""
    names = [str(path) for path in paths]
    return _git("ls-files", "--", *names).splitlines() if names else []


def commit_time(commit: str) -> str:
    """Return the time of a commit as ISO 8601."""
    return _git("show", "-s", "--format=%cI", commit)


def write_files(commit: str, paths: list[str], folder: Path) -> None:
    """Write the commit's version of each file below `folder`; skip files that it lacks."""
    for path in paths:
        if text := file_at(commit, path):
            files.write_text(folder / path, text)


def save(name: str, metrics: list[str]) -> None:
    """Save the workspace as an experiment of DVC, with the stages' outputs and the metrics files.

    All stages must be up to date, because DVC records each as it is.
    """
    included = [part for path in metrics if Path(path).exists() for part in ("-I", path)]
    _with_head("exp", "save", "--name", name, *included, "dvc.yaml")  # no other one below it


def apply(name: str, lacking: Collection[str] = ()) -> None:
    """Restore an experiment in the workspace: tracked files, metrics and outputs.

    `lacking` are outputs of stages that the experiment never ran; DVC's complaint about these is
    ignored.
    """
    _with_head("exp", "apply", experiments()[name], lacking=lacking)


def differences(name: str) -> list[str]:
    """List the files below this folder that differ from those of an experiment."""
    return _git("diff", "--name-only", "--relative", experiments()[name]).splitlines()


def index_tree() -> str:
    """Write git's index as a tree and return its name; "" if it has conflicts."""
    return _git("write-tree")


def restore_index(tree: str) -> None:
    """Restore the index that `index_tree` wrote; no file is touched."""
    _git("read-tree", tree or "HEAD")


def check_out() -> str:
    """Restore the outputs in dvc.lock; return DVC's message about outputs that it does not have.

    Raises SlipwayError for any other failure, such as a full disk.
    """
    answer = _dvc("checkout", "--force")
    # It warns of outputs that no run has made yet before it says which it does not have.
    lines = _said(answer).splitlines()
    said = "\n".join(line for line in lines if not line.startswith("WARNING:"))
    if answer.returncode and not said.startswith(_LACKS_OUTPUTS):
        raise SlipwayError(
            f"DVC cannot put the former outputs back: {disk_fault(OSError(said)) or said}\n"
            "Correct this. The next `slipway run`, `take` or `reset` tries it again."
        )
    return said if answer.returncode else ""


def restore_head() -> None:
    """Put HEAD back on its branch if a kill left it detached; no file is touched."""
    if _HEAD.is_file():
        if not _git("symbolic-ref", "-q", "HEAD"):
            _git("symbolic-ref", "HEAD", _HEAD.read_text())
            _git("reset", "-q")
        _HEAD.unlink()


def keep_snapshot(name: str, tree: str) -> None:
    """Save a git tree as the workspace at the start of the search `name`."""
    message = f"The workspace before {name}"
    commit = _git("commit-tree", tree, "-p", "HEAD", "-m", message, environment=dvc_environment())
    _git("update-ref", f"{_SNAPSHOTS}/{name}", commit)


def uncommitted(paths: list[str]) -> list[str]:
    """Return the paths whose current content git has neither committed nor ignored."""
    return [path for path in paths if _git("status", "--porcelain", "--", path)]


def is_tracked(path: Path) -> bool:
    """Return True if git tracks the file, or a file in the folder."""
    return bool(_git("ls-files", "--", str(path)))


def unsaved_edits() -> list[str]:
    """List the tracked files with edits that no commit, experiment or search holds."""
    changed = _git("diff", "--name-only", "--relative", "HEAD").splitlines()
    edited = [path for path in changed if not path.startswith(_WRITTEN)]
    if not edited:
        return []
    snapshots = _git("for-each-ref", "--format=%(objectname)", _SNAPSHOTS).split()
    for commit in [*experiments().values(), *snapshots]:
        if not _git("diff", "--name-only", commit, "--", *edited):
            return []
    return edited


def refuse_unsaved_edits(edits: list[str]) -> None:
    """Raise ParamsError that names the edits; returns if there are none."""
    if edits:
        more = f" and {len(edits) - _SHOWN} more" if len(edits) > _SHOWN else ""
        raise ParamsError(
            f"{', '.join(edits[:_SHOWN])}{more} would lose edits that no commit and no experiment "
            "holds; expected none. Keep them with `git commit -am MESSAGE` or `slipway run`, or "
            "give them up with --yes."
        )


def _with_head(*arguments: str, lacking: Collection[str] = ()) -> None:
    """Run a DVC command that detaches HEAD meanwhile; raises SlipwayError with DVC's message."""
    branch = _git("symbolic-ref", "-q", "HEAD")
    if branch:
        files.write_text(_HEAD, branch)
    try:
        answer = _dvc(*arguments)
    finally:
        restore_head()
    if answer.returncode and not _lacks_only(_said(answer), lacking):
        said = _said(answer)
        fault = disk_fault(OSError(said)) or said
        raise SlipwayError(
            f"`dvc {' '.join(arguments[:2])}` failed: {fault}\nCorrect this, then run it again."
        )


def _lacks_only(said: str, lacking: Collection[str]) -> bool:
    """Return True if DVC's message reports only that these outputs are missing."""
    _, failed, listed = said.partition(_LACKS_OUTPUTS)
    missing = [line.strip() for line in listed.partition("\nIs your cache")[0].splitlines()[1:]]
    return bool(failed and missing) and set(missing) <= set(lacking)


def _said(answer: "subprocess.CompletedProcess[str]") -> str:
    """Return DVC's message without its closing lines about support."""
    return (answer.stderr.strip() or answer.stdout.strip()).partition("\n\nHaving any")[0]


def _dvc(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run DVC; it ends if this process is killed."""
    ends_with_us = [sys.executable, "-m", "slipway.system.parent_death", str(os.getpid())]
    return subprocess.run(
        [*ends_with_us, sys.executable, "-m", "dvc", *arguments],
        env=dvc_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def _git(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run git in this folder; return what it printed, or "" if it failed."""
    try:
        answer = subprocess.run(
            ["git", *arguments], env=environment, capture_output=True, text=True
        )
    except OSError:
        raise UnavailableError(
            "git is not installed, expected it for DVC. Install it, then run this again."
        ) from None
    return "" if answer.returncode else answer.stdout.strip()
