"""Copies the files that `slipway take` replaces, so that a failed or killed take can be undone.

The copy is complete before DVC changes anything, and is removed when DVC is done. If the next
command finds a copy, that take was interrupted.
"""

import shutil
from pathlib import Path

from slipway.experiments import repository
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import SchemaError

FOLDER = Path(".work/experiments/before_take")
_JOURNAL, _FILES = "take.json", "files"


class TakeJournal(Contract):
    """The experiment that `slipway take` restores, and the files that this may change."""

    name: str
    paths: list[str]  # those without a copy did not exist
    index: str  # git's tree of it; "" if git could not write one


def begin(name: str) -> None:
    """Copy every file that differs from the experiment's."""
    paths = repository.differences(name)
    with files.new_directory(FOLDER) as folder:
        for path in map(Path, paths):
            if path.is_file():
                copy = folder / _FILES / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
        journal = TakeJournal(name=name, paths=paths, index=repository.index_tree())
        files.write_json(folder / _JOURNAL, journal.model_dump(mode="json"))


def end() -> None:
    """Remove the copies."""
    files.remove_directory(FOLDER)


def undo() -> str:
    """Undo an interrupted `slipway take`: bring back the files as they were before it.

    Then checks out DVC's outputs that belong to them. Returns a message for the user; "" if no
    take was interrupted. If this fails, the copied files stay, and the next command tries again.
    """
    place = FOLDER / _JOURNAL
    if not place.is_file():
        return ""
    fix = f"Remove {FOLDER}; its folder `{_FILES}` has the files as they were."
    journal = parse_record(TakeJournal, place, place.read_bytes(), SchemaError, fix)
    for path in map(Path, journal.paths):
        copy = FOLDER / _FILES / path
        if copy.is_file():
            files.write_bytes(path, copy.read_bytes(), copy.stat().st_mode & 0o777)
        else:
            path.unlink(missing_ok=True)
    repository.restore_index(journal.index)
    missing = repository.check_out()
    end()
    done = f"`slipway take {journal.name}` was not finished: the workspace is as it was before"
    lacks = ", without outputs that DVC no longer has; `slipway run` makes them again"
    return f"{done}{lacks}:\n{missing}" if missing else f"{done}."
