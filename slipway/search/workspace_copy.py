"""Makes the folders of trials: git worktrees, with the untracked files that a trial needs.

A snapshot contains the workspace's tracked files with their uncommitted edits, so an edit during a
search changes no trial. Untracked code is copied, data is linked. All folders share DVC's cache.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.config.params import value_at
from slipway.experiments.repository import dvc_environment
from slipway.system import files
from slipway.system.errors import SlipwayError, UnavailableError

FOLDERS = Path(".work/search/folders")
# Keys of params.yaml that may name untracked files.
_PATHS = (
    *("data.path", "data.split_file", "data.checksums"),
    *("evaluate.reference_model", "train.pretrained", "precompute.tokenizer"),
)
_LARGEST_COPY = 64 << 20  # bytes of an untracked file or folder; larger ones are linked
_BTIME = 1_000_000_000  # DVC finds its saved state by it, so a folder's next use finds it again
_GRACE_S = 30.0


@dataclass(frozen=True)
class Snapshot:
    """The state of the workspace at the start of a search."""

    root: Path  # root of the git repository
    project: Path  # folder of the project, relative to `root`
    tree: str  # hash of the git tree with the tracked files and their edits
    untracked: list[Path]  # relative to the project; a folder stands for everything in it
    cache: Path  # DVC's cache
    content: Mapping[str, Any]  # content of params.yaml
    absent: Sequence[str]  # paths to remove from trials: metrics of the stages after train


def take_snapshot(content: Mapping[str, Any], absent: Sequence[str]) -> Snapshot:
    """Take a snapshot of the workspace; UnavailableError if the project has no commit."""
    if not _succeeds("rev-parse", "--verify", "-q", "HEAD"):
        raise UnavailableError(
            "this project has no commit, expected one: DVC keeps trials as experiments of a "
            "commit. Run `git add -A && git commit -m 'A new project'`, then search again."
        )
    root = Path(git("rev-parse", "--show-toplevel"))
    index = FOLDERS.parent / "index"
    index.parent.mkdir(parents=True, exist_ok=True)
    # Keep the index's time: git needs it to notice edits made in the same second.
    shutil.copy2(git("rev-parse", "--git-path", "index"), index)
    own = {"GIT_INDEX_FILE": str(index.resolve())}
    git("add", "--update", ":/", environment=own)
    tree = git("write-tree", environment=own)
    index.unlink()
    listed = git("ls-files", "--others", "--exclude-standard", "--directory", "-z")
    return Snapshot(
        root,
        Path.cwd().relative_to(root),
        tree,
        [Path(name) for name in listed.split("\0") if name],
        Path(_dvc("cache", "dir")),
        content,
        absent,
    )


@contextlib.contextmanager
def new_folder(snapshot: Snapshot, name: str, params: str, lock: str | None) -> Iterator[Path]:
    """Create a copy of the project below `.work/search/folders`, and remove it after the block.

    Args:
        params: the text of the copy's params.yaml.
        lock: the text of the copy's dvc.lock; None keeps that of the workspace.
    """
    place = (FOLDERS / name).resolve()
    remove_folder(place)
    try:
        git("worktree", "add", "--quiet", "--detach", "--no-checkout", str(place), "HEAD")
        git("read-tree", "-u", "--reset", snapshot.tree, folder=place)
        project = place / snapshot.project
        _fill(snapshot, project)
        for path in snapshot.absent:
            (project / path).unlink(missing_ok=True)
        (project / "params.yaml").write_text(params)
        # DVC cannot stash a file that differs from HEAD in the index only.
        git("add", "params.yaml", folder=project)
        if lock is not None:
            (project / "dvc.lock").write_text(lock)
        yield project
    finally:
        remove_folder(place)


def remove_folder(place: Path) -> None:
    """End the processes in a folder, and remove the folder."""
    if place.exists():
        end_processes(place)
        # Some versions of `git worktree remove` refuse folders with untracked files.
        files.remove_directory(place)
    _succeeds("worktree", "prune")


def remove_folders() -> None:
    """Remove the folders that a killed search left, and end the processes in them."""
    for place in FOLDERS.glob("*"):
        remove_folder(place.resolve())


def end_processes(place: Path) -> None:
    """End every process in the folder: by SIGTERM, then by SIGKILL.

    After SIGTERM a training saves a checkpoint. Raises SlipwayError if a process survives.
    """
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    while found := _processes(place):
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        if number == signal.SIGKILL and time.monotonic() > deadline + _GRACE_S:
            raise UnavailableError(
                f"processes {', '.join(map(str, found))} still run in {place} after SIGKILL, "
                "expected none. End them, then search again."
            )
        started = time.monotonic()
        while _processes(place) and time.monotonic() < (
            deadline if number == signal.SIGTERM else started + 1
        ):
            time.sleep(0.1)
        number = signal.SIGKILL


def _processes(place: Path) -> list[int]:
    """List the ids of processes whose working directory is the folder or below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(entry / "cwd")).is_relative_to(place):
                found.append(int(entry.name))
    return [process for process in found if process != os.getpid()]


def _fill(snapshot: Snapshot, project: Path) -> None:
    """Add the files that git does not track: untracked code, data, DVC's settings and its cache."""
    from dvc.config import Config

    here = Path.cwd()
    named = [value_at(snapshot.content, key) for key in _PATHS]
    data = [Path(os.path.normpath(one)) for one in named if isinstance(one, str)]
    for path in snapshot.untracked:
        is_data = any(path.is_relative_to(one) or one.is_relative_to(path) for one in data)
        if (here / path).exists() and not is_data:
            _bring(here / path, project / path)
    for path in data:
        if not path.is_absolute() and (here / path).exists():
            _link(here / path, project / path)
    if (here / ".dvc/config.local").is_file():
        shutil.copyfile(here / ".dvc/config.local", project / ".dvc/config.local")
    with Config(str(project / ".dvc")).edit("local") as config:
        config.setdefault("cache", {})
        config["cache"]["dir"] = str(snapshot.cache)
        config["cache"].setdefault("type", ["reflink", "hardlink", "copy"])
    moment = project / ".dvc/tmp/btime"
    moment.parent.mkdir(exist_ok=True)
    moment.touch()
    os.utime(moment, (_BTIME, _BTIME))
    (project / ".work").mkdir(exist_ok=True)
    # The features of a frozen body, which trials share.
    (here / ".work/features").mkdir(parents=True, exist_ok=True)
    _link(here / ".work/features", project / ".work/features")
    if (here / ".work/code.json").is_file():  # cached digests of code, which would take seconds
        shutil.copyfile(here / ".work/code.json", project / ".work/code.json")


def _bring(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _is_small(source):
        target.symlink_to(source)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _is_small(path: Path) -> bool:
    size = 0
    every = path.rglob("*") if path.is_dir() else [path]
    for one in every:
        size += one.lstat().st_size
        if size > _LARGEST_COPY:
            return False
    return True


def _link(source: Path, target: Path) -> None:
    """Link data from the workspace; in a folder with tracked files, link only untracked ones."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    elif source.is_dir() and target.is_dir() and not target.is_symlink():
        for place, _, names in os.walk(source):
            for name in names:
                copy = target / Path(place, name).relative_to(source)
                if not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.symlink_to(Path(place, name))


def git(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run git and return its output; SlipwayError with git's message if it fails."""
    return _run(["git", *arguments], folder, environment)


def _succeeds(*arguments: str) -> bool:
    try:
        git(*arguments)
    except SlipwayError:
        return False
    return True


def _dvc(*arguments: str) -> str:
    return _run([sys.executable, "-m", "dvc", *arguments], None, None)


def _run(command: list[str], folder: Path | None, environment: Mapping[str, str] | None) -> str:
    answer = subprocess.run(
        command,
        cwd=folder,
        env=dvc_environment() | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        said = answer.stderr.strip() or answer.stdout.strip()
        raise SlipwayError(
            f"`{' '.join(command[:3])}` failed: {said}\nCorrect this, then search again."
        )
    return answer.stdout.strip()
