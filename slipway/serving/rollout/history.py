"""Changes the rollout's state, and records each change in SLIPWAY_STATE/history.jsonl.

Each line of the history is a JSON entry with the SHA-256 of the line before it. This chain reveals
if a line was changed, removed or inserted. It does not reveal missing lines at the end, or a
history that was written again as a whole: to detect these, keep the digest of the last line
elsewhere. `slipway/loop/history.py` prints the history.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from slipway.artifacts.bundle import MANIFEST
from slipway.serving.rollout.state import (
    FILE,
    EventKind,
    Model,
    Rollout,
    RolloutError,
    read_rollout,
)
from slipway.serving.rollout.store import BUNDLE, CERTIFICATE, copy_folder
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import LockedError

logger = logging.getLogger("bentoml.slipway")

HISTORY = "history.jsonl"
_LOCK_WAIT_S = 10.0  # changes take milliseconds
_LOCK_POLL_S = 0.02
_threads = threading.Lock()  # the file lock excludes other processes only
_LONGEST_REASON = 500


class Author(NamedTuple):
    """The operator who gave a command, and the operator's reason for it."""

    name: str
    reason: str = ""

    @property
    def because(self) -> str:
        """Return the reason of an event that a command causes, such as "by command: REASON"."""
        reason = self.reason[:_LONGEST_REASON]
        return f"by command: {reason}" if reason else "by command"


class Served(Contract):
    """A served model and its origin.

    Fields are null if the model's files were missing when the entry was written.
    """

    version: str
    certificate: str | None = None  # SHA-256 of certificate.json, in hex
    gates: str | None = None  # "passed", "missed" or "none"
    data: str | None = None  # digest of the data, as DVC has it
    git_revision: str | None = None
    git_dirty: bool | None = None


class Entry(Contract):
    """A line of the history: an event, and the models that answer requests after it."""

    format_version: Literal[1]
    number: int
    event: int | None  # of rollout.json; null for a start with SLIPWAY_BUNDLE
    time: float  # seconds since 1970
    what: EventKind | Literal["started"]
    model: str
    by: str  # the operator; "": the workers decided
    reason: str
    stable: Served | None  # null: SLIPWAY_BUNDLE, before a worker has loaded it
    candidate: str | None
    share: float  # of the live requests, which the candidate answers
    previous: str  # SHA-256 of the line before, in hex; "" for the first


def change_rollout(folder: Path, change: Callable[[Rollout], Rollout]) -> Rollout:
    """Apply `change` to the state under a lock. Returns the new state.

    If the state differs, it is written and its new events are added to the history. If the history
    cannot be written, this is only logged, and the next change adds the missing entries. Raises
    LockedError if another process holds the lock for seconds.
    """
    with _state_lock(folder):
        before = read_rollout(folder)
        after = change(before)
        if after == before:
            return before
        after = after.changed(revision=before.revision + 1)
        text = files.canonical_json(after.model_dump(mode="json", by_alias=True))
        files.write_text(folder / FILE, text, files.PRIVATE)  # because of the secret salt
        try:
            _record_events(folder, after)
        except (OSError, RolloutError) as error:
            logger.error("cannot write the history of rollouts (%s); the rollout continues", error)
        return after


def record_served(folder: Path, version: str, bundle: Path, certificate: Path) -> None:
    """Record in the history that the workers serve SLIPWAY_BUNDLE in this version.

    Does nothing if the last entry says so already.
    """
    with _state_lock(folder):
        entries, candidate = read_history(folder / HISTORY), read_rollout(folder).candidate
        if entries and entries[-1].stable and entries[-1].stable.version == version:
            return
        line = {
            "event": None,
            "time": time.time(),
            "what": "started",
            "model": version,
            "by": "",
            "reason": "SLIPWAY_BUNDLE is served",
            "stable": _served(version, bundle, certificate),
            "candidate": candidate.name if candidate else None,
            "share": candidate.share if candidate else 0.0,
        }
        _append(folder / HISTORY, [line])


def read_history(path: Path) -> list[Entry]:
    """Read all complete entries of the history. Without the file there are none.

    A last line that was not written to its end is ignored; the next change writes it again. Raises
    RolloutError with the number of the first line that breaks the chain of digests.
    """
    entries: list[Entry] = []
    previous = ""
    for number, line in enumerate(complete_lines(path), start=1):
        wrong = f"{path} was changed or damaged: line {number}"
        fix = "Restore the file from a backup. Until then the service adds no entries."
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            raise RolloutError(f"{wrong} is not an entry. {fix}") from None
        if (entry.number, entry.previous) != (number, previous):
            raise RolloutError(f"{wrong} does not fit line {number - 1}. {fix}")
        entries.append(entry)
        previous = hashlib.sha256(line).hexdigest()
    return entries


def entry_at(entries: Sequence[Entry], moment: float) -> Entry | None:
    """Return the last entry up to `moment`, in seconds since 1970; None if all are later."""
    return next((entry for entry in reversed(entries) if entry.time <= moment), None)


def _record_events(folder: Path, rollout: Rollout) -> None:
    """Append the events of the state that the history lacks.

    These may include events of a process that was killed before it could record them.
    """
    entries = read_history(folder / HISTORY)
    recorded = max((entry.event or 0 for entry in entries), default=0)
    stable = entries[-1].stable if entries else None
    new = [event for event in rollout.events if event.number > recorded]
    lines = []
    for event in new:
        if event.what in ("swapped", "promoted"):
            stable = _served_copy(folder, rollout.stable)
        candidate = rollout.candidate if event is new[-1] else None
        lines.append(
            event.model_dump(exclude={"number"})
            | {
                "event": event.number,
                "stable": stable,
                "candidate": candidate.name if candidate else None,
                "share": candidate.share if candidate else 0.0,
            }
        )
    _append(folder / HISTORY, lines)


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Append entries after the last complete line, with their numbers and the chain of digests."""
    if not lines:
        return
    before = complete_lines(path)
    last, added = before[-1] if before else b"", b""
    for number, line in enumerate(lines, start=len(before) + 1):
        previous = hashlib.sha256(last).hexdigest() if last else ""
        entry = Entry.model_validate(
            {**line, "format_version": 1, "number": number, "previous": previous}
        )
        last = json.dumps(entry.model_dump(mode="json"), sort_keys=True).encode()
        added += last + b"\n"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, files.PRIVATE), "wb") as file:
        file.truncate(sum(len(line) + 1 for line in before))
        file.seek(0, os.SEEK_END)
        file.write(added)
        file.flush()
        os.fsync(file.fileno())


def complete_lines(path: Path) -> list[bytes]:
    """Return all lines of the history that were written to their end."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _served_copy(folder: Path, model: Model | None) -> Served | None:
    if model is None:
        return None
    copy = copy_folder(folder, model)
    return _served(model.version, copy / BUNDLE, copy / CERTIFICATE)


def _served(version: str, bundle: Path, certificate: Path) -> Served:
    """Describe a served model from its files, or only by its version if they are missing.

    Verifies nothing: the files were verified before the model was served.
    """
    try:
        lineage = json.loads((bundle / MANIFEST).read_bytes())["lineage"]
        gates = json.loads(certificate.read_bytes())["gates"]
        digest = files.sha256_file(certificate)
    except (OSError, ValueError, KeyError, TypeError):
        return Served(version=version)
    data = lineage["data"]
    return Served(
        version=version,
        certificate=digest,
        gates=gates,
        data=data["digest"] if data else None,
        git_revision=lineage["git_revision"],
        git_dirty=lineage["git_dirty"],
    )


@contextmanager
def _state_lock(folder: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_WAIT_S
    with _threads:
        while True:
            try:
                with files.lock(folder / "rollout.lock", "a change of the rollout"):
                    yield
                return
            except LockedError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOCK_POLL_S)
