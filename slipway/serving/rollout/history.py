"""Changes the rollout's state, and records every change in the history.

The history is SLIPWAY_STATE/history.jsonl, or with SLIPWAY_DATABASE_URL a table that all services
share (slipway/serving/rollout/records/). `slipway/loop/history.py` prints it.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from slipway.serving.rollout.records.database import (
    LocalEnd,
    add_waiting,
    change_shared,
    service_draft,
    service_name,
)
from slipway.serving.rollout.records.entries import (
    HISTORY,
    Draft,
    chained,
    drafts_of,
    read_history,
    served_files,
)
from slipway.serving.rollout.state import (
    Rollout,
    RolloutError,
    read_rollout,
    state_lock,
    write_rollout,
)
from slipway.system import files
from slipway.traffic.postgres import given_url

logger = logging.getLogger("bentoml.slipway")

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


def change_rollout(
    folder: Path, change: Callable[[Rollout], Rollout], *, is_shared: bool = True
) -> Rollout:
    """Apply `change` to the state while it is locked. Returns the new state.

    If the state differs, it is written and its new events are added to the history. If the history
    cannot be written, this is only logged, and the next change adds the missing entries. Raises
    LockedError if another process holds the lock for seconds.

    With SLIPWAY_DATABASE_URL and `is_shared` the state is that of all services. Raises
    UnavailableError if the database is down; then nothing was changed.
    """
    url = given_url() if is_shared else None
    if url is not None:
        return change_shared(folder, url, change)
    with state_lock(folder):
        before = read_rollout(folder)
        after = change(before)
        if after == before:
            return before
        after = after.changed(revision=before.revision + 1)
        write_rollout(folder, after)
        try:
            _record_events(folder, after)
        except (OSError, RolloutError) as error:
            logger.error("cannot write the history of rollouts (%s); the rollout continues", error)
        return after


def return_alone(folder: Path, decision: Callable[[Rollout], Rollout]) -> Rollout | None:
    """End the candidate in this service alone, while the shared database is down.

    Does nothing, and returns None, unless `decision` ends the candidate against it. The end waits
    for the database, and then holds for all services.
    """
    with state_lock(folder):
        before = read_rollout(folder)
        after = decision(before)
        event = after.events[-1] if after.events else None
        if before.candidate is None or after.candidate is not None or event is None:
            return None
        if event.what not in ("refused", "rolled_back"):
            return None
        end = LocalEnd(
            candidate=before.candidate.id, what=event.what, reason=event.reason, time=event.time
        )
        add_waiting(folder, end=end)
        after = after.changed(num_logged=after.num_events)
        write_rollout(folder, after)  # revision unchanged: the database assigns the next one
        return after


def record_served(folder: Path, version: str, bundle: Path, certificate: Path) -> None:
    """Record in the history that the workers serve this version of SLIPWAY_BUNDLE.

    Does nothing if the last entry says so already.
    """
    is_shared = given_url() is not None
    service = service_name(folder) if is_shared else ""
    with state_lock(folder):
        rollout = read_rollout(folder)
        model = rollout.stable.version if rollout.stable else "SLIPWAY_BUNDLE"
        draft = service_draft(
            rollout, "started", service, version, time.time(), f"{model} is served"
        )
        stable = served_files(version, bundle, certificate)
        if is_shared:
            add_waiting(folder, draft | {"stable": stable.model_dump(mode="json")})
            return
        entries = read_history(folder / HISTORY)
        if entries and entries[-1].stable and entries[-1].stable.version == version:
            return
        _append(folder / HISTORY, [draft | {"stable": stable}])


def _record_events(folder: Path, rollout: Rollout) -> None:
    """Append the events of the state that are missing from the history.

    These may include events of a process that was killed before it could record them.
    """
    entries = read_history(folder / HISTORY)
    recorded = max((entry.event or 0 for entry in entries), default=0)
    new = [event for event in rollout.events if event.number > recorded]
    stable = entries[-1].stable if entries else None
    _append(folder / HISTORY, drafts_of(folder, rollout, new, stable))


def _append(path: Path, drafts: Sequence[Draft]) -> None:
    """Append entries after the last complete line, with their numbers and chained digests."""
    if not drafts:
        return
    before = files.complete_lines(path)
    lines = chained(drafts, len(before), before[-1] if before else b"")
    added = b"".join(line + b"\n" for line in lines)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, files.PRIVATE), "wb") as file:
        file.truncate(sum(len(line) + 1 for line in before))
        file.seek(0, os.SEEK_END)
        file.write(added)
        file.flush()
        os.fsync(file.fileno())
