"""The entries of the history: JSON lines, each with the SHA-256 of the line before it.

This chain reveals if a line was changed, removed or inserted. It does not reveal missing lines at
the end, or a history that was written again as a whole: to detect these, keep the digest of the
last line elsewhere.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, ValidationError

from slipway.artifacts.bundle import MANIFEST
from slipway.serving.rollout.state import Event, EventKind, Model, Rollout, RolloutError
from slipway.serving.rollout.store import BUNDLE, CERTIFICATE, copy_folder
from slipway.system import files
from slipway.system.contract import Contract

HISTORY = "history.jsonl"
Draft = Mapping[str, Any]  # fields of an entry, without its place in the chain


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
    """A line of the history: an event, and the models that serve requests after it."""

    format_version: Literal[1, 2]
    number: int
    event: int | None  # number of the event in the state; null for the start or end of a service
    time: float  # seconds since 1970
    what: EventKind | Literal["started", "stopped"]
    model: str
    by: str  # the operator; "": the workers decided
    reason: str
    stable: Served | None  # null: SLIPWAY_BUNDLE, before a worker has loaded it
    candidate: str | None
    # Fraction of the live requests that the candidate answers. Format 1 calls it `share`.
    fraction: float = Field(validation_alias=AliasChoices("fraction", "share"))
    previous: str  # SHA-256 of the line before, in hex; "" for the first
    service: str = ""  # service that started or stopped, in a history that several services share


def chained(drafts: Iterable[Draft], number: int, last: bytes) -> Iterator[bytes]:
    """Yield the lines for new entries, chained to line `number`, whose bytes are `last`.

    For the first entry of a history these are 0 and b"".
    """
    for place, draft in enumerate(drafts, start=number + 1):
        previous = hashlib.sha256(last).hexdigest() if last else ""
        entry = Entry.model_validate(
            {**draft, "format_version": 2, "number": place, "previous": previous}
        )
        unused = None if entry.service else {"service"}
        last = json.dumps(entry.model_dump(mode="json", exclude=unused), sort_keys=True).encode()
        yield last


def parse_lines(lines: Iterable[bytes], source: object) -> list[Entry]:
    """Parse all lines. Raises RolloutError, which names the first line that breaks the chain."""
    entries: list[Entry] = []
    previous = ""
    for number, line in enumerate(lines, start=1):
        wrong = f"{source} was changed or damaged: line {number}"
        fix = "Restore it from a backup. Until then the service adds no entries."
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            raise RolloutError(f"{wrong} is not an entry. {fix}") from None
        if (entry.number, entry.previous) != (number, previous):
            raise RolloutError(f"{wrong} does not fit line {number - 1}. {fix}")
        entries.append(entry)
        previous = hashlib.sha256(line).hexdigest()
    return entries


def read_history(path: Path) -> list[Entry]:
    """Read all complete entries of the history. Without the file there are none.

    A last line that was not written to its end is ignored; the next change writes it again. Raises
    RolloutError with the number of the first line that breaks the chain of digests.
    """
    return parse_lines(files.complete_lines(path), path)


def entry_at(entries: Sequence[Entry], moment: float) -> Entry | None:
    """Return the last entry at or before `moment` (seconds since 1970); None if all are later."""
    return next((entry for entry in reversed(entries) if entry.time <= moment), None)


def in_time(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries in order of time if several services wrote them; else in the given order.

    An entry that waited for the database stands behind later ones in the chain. In the history of
    one service the order of the chain counts, because its clock may jump.
    """
    if any(entry.service for entry in entries):
        return sorted(entries, key=lambda entry: (entry.time, entry.number))
    return list(entries)


def serving_at(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the version that each running service serves after the given entries, by its name.

    Args:
        entries: entries of a shared history, by time.
    """
    found: dict[str, str] = {}
    for entry in entries:
        if entry.what == "started" and entry.service:
            found[entry.service] = entry.model
        elif entry.what == "stopped":
            found.pop(entry.service, None)
        elif entry.what in ("swapped", "promoted") and entry.stable is not None:
            found = dict.fromkeys(found, entry.stable.version)
    return found


def drafts_of(
    folder: Path, rollout: Rollout, new: Sequence[Event], stable: Served | None
) -> list[Draft]:
    """Return an entry for each of the `new` latest events of `rollout`.

    Args:
        folder: the folder with the copies of the models.
        stable: the model that was served before the events.
    """
    drafts: list[Draft] = []
    for event in new:
        if event.what in ("swapped", "promoted"):
            stable = _served_copy(folder, rollout.stable)
        candidate = rollout.candidate if event is new[-1] else None
        drafts.append(
            event.model_dump(exclude={"number"})
            | {
                "event": event.number,
                "stable": stable,
                "candidate": candidate.name if candidate else None,
                "fraction": candidate.fraction if candidate else 0.0,
            }
        )
    return drafts


def _served_copy(folder: Path, model: Model | None) -> Served | None:
    if model is None:
        return None
    copy = copy_folder(folder, model)
    return served_files(model.version, copy / BUNDLE, copy / CERTIFICATE)


def served_files(version: str, bundle: Path, certificate: Path) -> Served:
    """Describe a served model by its files, or only by its version if they are missing.

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
