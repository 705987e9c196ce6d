"""Stores the rollout and its history in PostgreSQL, for all services on SLIPWAY_DATABASE_URL.

All services on one database follow one rollout. A change of its state and the entries of its events
are one transaction, so no event is lost or recorded twice, and the chain of entries has one end.
`rollout.json` of each service is a copy, with which it serves while the database is down. What a
service has to record meanwhile waits in `rollout.waiting.json` until its next transaction.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipway.serving.rollout.records.entries import (
    HISTORY,
    Draft,
    Entry,
    Served,
    chained,
    drafts_of,
    parse_lines,
    read_history,
)
from slipway.serving.rollout.reports import REPORTS, Report, read_own_reports
from slipway.serving.rollout.state import (
    EMPTY,
    Rollout,
    RolloutError,
    read_rollout,
    state_lock,
    write_rollout,
)
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.traffic.postgres import ROLLOUT, SqlConnection, given_url, reading_postgres

logger = logging.getLogger("bentoml.slipway")

TABLES = """
CREATE TABLE IF NOT EXISTS rollout (revision BIGINT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    number BIGINT PRIMARY KEY, key TEXT NOT NULL UNIQUE, service TEXT NOT NULL, line TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS services (
    name TEXT PRIMARY KEY, seen REAL NOT NULL, serving TEXT, reports TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS models (
    folder TEXT PRIMARY KEY, added REAL NOT NULL, files TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS parts (
    sha256 TEXT NOT NULL, part INTEGER NOT NULL, content BYTEA NOT NULL, PRIMARY KEY (sha256, part)
);
CREATE TABLE IF NOT EXISTS uploads (sha256 TEXT PRIMARY KEY, seen REAL NOT NULL);
"""
WAITING = "rollout.waiting.json"
_NAME = "service.name"
_LIMIT_S = 30.0  # time limit of a transaction
SILENT_S = 30.0  # after this time without a report, the workers of a service count as stopped
LOST_S = 60.0  # after this time without a report, the history says that the service stopped


class LocalEnd(Contract):
    """A candidate whose rollout this service ended while the database was down."""

    candidate: int  # id of the candidate
    what: Literal["refused", "rolled_back"]
    reason: str
    time: float  # seconds since 1970


class WaitingEntry(Contract):
    """A history entry that waits for the database; its `key` prevents that it is added twice."""

    key: str
    draft: dict[str, Any]


class Waiting(Contract):
    """The content of `rollout.waiting.json`: entries and ends that wait for the database."""

    format_version: Literal[1]
    entries: list[WaitingEntry]
    end: LocalEnd | None


@dataclass(frozen=True)
class Recorded:
    """The complete history, as `read_recorded` returns it."""

    lines: list[bytes]
    entries: list[Entry]
    rollout: Rollout
    source: str  # name of the history in messages


def service_name(folder: Path) -> str:
    """Return the name of the service of this SLIPWAY_STATE, such as "pod-7-3f2a9c"."""
    path = folder / _NAME
    with state_lock(folder):
        if not path.exists():
            files.write_text(path, f"{socket.gethostname()}-{secrets.token_hex(3)}", files.PRIVATE)
        return path.read_text()


def read_waiting(folder: Path) -> Waiting:
    """Return the entries that wait for the database. Raises RolloutError for a damaged file."""
    path = folder / WAITING
    try:
        payload = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Waiting(format_version=1, entries=[], end=None)
    return parse_record(Waiting, path, payload, RolloutError, "Restore it, or remove it.")


def add_waiting(folder: Path, draft: Draft | None = None, end: LocalEnd | None = None) -> None:
    """Store an entry or a candidate's end until the database is up; call within `state_lock`."""
    before = read_waiting(folder)
    entries = list(before.entries)
    if draft is not None:
        entries.append(WaitingEntry(key=secrets.token_hex(16), draft=dict(draft)))
    after = Waiting(format_version=1, entries=entries, end=end or before.end)
    _write_waiting(folder, after)


def _write_waiting(folder: Path, waiting: Waiting) -> None:
    text = files.canonical_json(waiting.model_dump(mode="json"))
    files.write_text(folder / WAITING, text, files.PRIVATE)


@contextmanager
def shared_transaction(url: str) -> Iterator[SqlConnection]:
    """Run a transaction on the shared rollout; UnavailableError if the database is down."""
    with reading_postgres(url, TABLES, ROLLOUT, _LIMIT_S) as connection:
        yield connection


def change_shared(folder: Path, url: str, change: Callable[[Rollout], Rollout]) -> Rollout:
    """Apply `change` to the shared state, and record its events. Returns the new state."""
    with shared_transaction(url) as connection:
        after, waiting = apply(connection, folder, change)
    settle(folder, after, waiting)
    return after


def apply(
    connection: SqlConnection, folder: Path, change: Callable[[Rollout], Rollout]
) -> tuple[Rollout, Waiting]:
    """Add the waiting entries, apply `change`, and record its events.

    Returns the new state, and the entries that waited. After the commit, call `settle`.
    """
    waiting = read_waiting(folder)
    stored = stored_rollout(connection)
    if stored is None or stored.revision == 0:
        stored = _adopted(connection, folder, stored)
    for entry in waiting.entries:
        _append_once(connection, entry.key, entry.draft)
    after = change(_with_end(stored, waiting.end))
    if after != stored:
        after = after.changed(revision=stored.revision + 1)
        _store(connection, after)
        new = [event for event in after.events if event.number > stored.num_events]
        drafts = drafts_of(folder, after, new, _stable(connection, stored))
        append(connection, [(f"event-{draft['event']}", draft) for draft in drafts])
    return after, waiting


def settle(folder: Path, rollout: Rollout, waiting: Waiting) -> None:
    """Copy the committed state to `rollout.json`, and drop the waiting entries that were added.

    A state whose models are not here yet is copied by `RolloutSync`, which gets them.
    """
    with state_lock(folder):
        now = read_waiting(folder)
        added = {entry.key for entry in waiting.entries}
        left = [entry for entry in now.entries if entry.key not in added]
        end = now.end if now.end != waiting.end else None
        if (left, end) != (now.entries, now.end):
            _write_waiting(folder, Waiting(format_version=1, entries=left, end=end))
        if rollout.revision > read_rollout(folder).revision and not missing_models(folder, rollout):
            write_rollout(folder, rollout)


def missing_models(folder: Path, rollout: Rollout) -> set[str]:
    """Return the folders of models in the state that this service has no copy of."""
    return {name for name in rollout.folders if not (folder / "models" / name).exists()}


def _with_end(rollout: Rollout, end: LocalEnd | None) -> Rollout:
    """Return the state after a candidate ended because this service ended it alone."""
    if end is None or rollout.candidate is None or rollout.candidate.id != end.candidate:
        return rollout
    after = rollout.ended(end.what, end.reason)
    *before, event = after.events
    logged = rollout.num_logged == rollout.num_events  # this service logged and counted the end
    return after.changed(
        events=[*before, event.model_copy(update={"time": end.time})],
        num_logged=after.num_events if logged else rollout.num_logged,
    )


def stored_rollout(connection: SqlConnection) -> Rollout | None:
    row = connection.execute("SELECT content FROM rollout").fetchone()
    if row is None:
        return None
    fix = "Use the version of Slipway that wrote it."
    return parse_record(Rollout, Path("SLIPWAY_DATABASE_URL"), row[0].encode(), RolloutError, fix)


def _store(connection: SqlConnection, rollout: Rollout) -> None:
    text = files.canonical_json(rollout.model_dump(mode="json", by_alias=True))
    connection.execute("DELETE FROM rollout")
    connection.execute("INSERT INTO rollout VALUES (?, ?)", (rollout.revision, text))


def _adopted(connection: SqlConnection, folder: Path, stored: Rollout | None) -> Rollout:
    """Store this service's state and history as the shared ones, unless it has no state yet."""
    own = read_rollout(folder)
    if stored is not None and own.revision == 0:
        return stored
    _store(connection, own)
    if last_entry(connection) is None:
        entries = read_history(folder / HISTORY)
        places = {"number", "previous", "format_version"}
        append(
            connection,
            [(f"adopted-{one.number}", one.model_dump(exclude=places)) for one in entries],
        )
    return own


def last_entry(connection: SqlConnection, service: str | None = None) -> Entry | None:
    """Return the last entry; with `service`, that of this service."""
    condition, values = ("WHERE service = ?", [service]) if service else ("", [])
    row = connection.execute(
        f"SELECT line FROM history {condition} ORDER BY number DESC LIMIT 1", values
    ).fetchone()
    return Entry.model_validate_json(row[0]) if row else None


def _stable(connection: SqlConnection, rollout: Rollout) -> Served | None:
    """Return the model that the services serve, as the history describes it.

    The entry of a service's start may join late, and then names an older model. Only SLIPWAY_BUNDLE
    is described by such entries.
    """
    condition = "WHERE service = ''" if rollout.stable else ""
    row = connection.execute(
        f"SELECT line FROM history {condition} ORDER BY number DESC LIMIT 1"
    ).fetchone()
    return Entry.model_validate_json(row[0]).stable if row else None


def append(connection: SqlConnection, drafts: Sequence[tuple[str, Draft]]) -> None:
    """Append entries with their keys at the end of the chain."""
    row = connection.execute(
        "SELECT number, line FROM history ORDER BY number DESC LIMIT 1"
    ).fetchone()
    number, last = row or (0, "")
    lines = chained((draft for _, draft in drafts), number, last.encode())
    for place, ((key, draft), line) in enumerate(zip(drafts, lines, strict=True), number + 1):
        connection.execute(
            "INSERT INTO history VALUES (?, ?, ?, ?)",
            (place, key, draft.get("service", ""), line.decode()),
        )


def _append_once(connection: SqlConnection, key: str, draft: Draft) -> None:
    """Append an entry that waited, unless it is in the history already or says nothing new."""
    found = connection.execute("SELECT 1 FROM history WHERE key = ?", (key,)).fetchone()
    if found is not None:
        return
    if draft["what"] == "started":
        before = last_entry(connection, draft["service"])
        is_running = before is not None and before.what != "stopped"
        last = connection.execute(
            "SELECT line FROM history WHERE service IN ('', ?) ORDER BY number DESC LIMIT 1",
            (draft["service"],),
        ).fetchone()
        stable = Entry.model_validate_json(last[0]).stable if last else None
        if is_running and stable is not None and stable.version == draft["model"]:
            return
    append(connection, [(key, draft)])


def read_recorded(folder: Path) -> Recorded:
    """Read the whole history, from SLIPWAY_DATABASE_URL if it is set, else from SLIPWAY_STATE.

    Raises RolloutError for the first line that breaks the chain of digests, and UnavailableError if
    the database is down.
    """
    url = given_url()
    if url is None:
        path = folder / HISTORY
        lines = files.complete_lines(path)
        return Recorded(lines, parse_lines(lines, path), read_rollout(folder), str(path))
    with shared_transaction(url) as connection:
        found = connection.execute("SELECT line FROM history ORDER BY number").fetchall()
        rollout = stored_rollout(connection) or EMPTY
    lines = [line.encode() for (line,) in found]
    source = "the history in SLIPWAY_DATABASE_URL"
    return Recorded(lines, parse_lines(lines, source), rollout, source)


def exchange_reports(
    connection: SqlConnection, folder: Path, rollout: Rollout, *, was_seen: bool
) -> list[Report]:
    """Store the reports of this service's workers, and return those of the other services.

    Args:
        was_seen: this process reported before, so that it is back if it counted as lost.
    """
    name, now = service_name(folder), database_time(connection)
    own = read_own_reports(folder)
    serving = next((one.serving for one in own if one.is_alive and one.serving), None)
    text = REPORTS.dump_json(
        [one.model_copy(update={"service": name, "is_live": one.is_alive}) for one in own]
    ).decode()
    rows = connection.execute("SELECT name, seen, serving, reports FROM services").fetchall()
    served_before = next((row[2] for row in rows if row[0] == name), None)
    if not serving or (served_before is None and was_seen):
        last = last_entry(connection, name)
        if last is not None and last.what == "started" and not serving:
            model = served_before or last.model
            _append_stop(connection, rollout, name, model, time.time(), "no worker serves")
        elif last is not None and last.what == "stopped" and serving:
            _append_return(connection, rollout, name, serving, last.stable)
    connection.execute(
        "INSERT INTO services VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "seen = excluded.seen, serving = excluded.serving, reports = excluded.reports",
        (name, now, serving, text),
    )
    return _others(connection, rollout, name, now, rows)


def read_others(connection: SqlConnection, folder: Path, rollout: Rollout) -> list[Report]:
    """Return the reports of the other services."""
    rows = connection.execute("SELECT name, seen, serving, reports FROM services").fetchall()
    now = database_time(connection)
    return _others(connection, rollout, service_name(folder), now, rows)


def _others(
    connection: SqlConnection,
    rollout: Rollout,
    own_name: str,
    now: float,
    rows: Sequence[tuple[str, float, str | None, str]],
) -> list[Report]:
    """Return the other services' reports. Records and removes services that stopped reporting.

    Reports about the candidate stay: its evidence needs them.
    """
    candidate = rollout.candidate.id if rollout.candidate else None
    found: list[Report] = []
    for name, seen, serving, text in rows:
        if name == own_name:
            continue
        reports = REPORTS.validate_json(text)
        if now - seen > SILENT_S:
            reports = [one.model_copy(update={"stopped": True}) for one in reports]
        if now - seen > LOST_S:
            if serving:
                reason = f"it has not reported for {LOST_S:g} s"
                _append_stop(connection, rollout, name, serving, seen, reason)
                connection.execute("UPDATE services SET serving = NULL WHERE name = ?", (name,))
            if not any(candidate == one.candidate for one in reports):
                connection.execute("DELETE FROM services WHERE name = ?", (name,))
        found += reports
    return found


def _append_stop(
    connection: SqlConnection, rollout: Rollout, name: str, model: str, moment: float, reason: str
) -> None:
    last = last_entry(connection)
    draft = service_draft(rollout, "stopped", name, model, moment, reason)
    append(connection, [(secrets.token_hex(16), draft | {"stable": last and last.stable})])


def _append_return(
    connection: SqlConnection, rollout: Rollout, name: str, model: str, stable: Served | None
) -> None:
    """Record that a service reports again after it counted as lost; it then served `stable`."""
    if stable is None or stable.version != model:
        stable = Served(version=model)
    draft = service_draft(rollout, "started", name, model, time.time(), "it reports again")
    append(connection, [(secrets.token_hex(16), draft | {"stable": stable})])


def service_draft(
    rollout: Rollout, what: str, service: str, model: str, moment: float, reason: str
) -> dict[str, Any]:
    """Return an entry about a service, without its `stable`; `service` is "" in a local history."""
    candidate = rollout.candidate
    return {
        "event": None,
        "time": moment,
        "what": what,
        "model": model,
        "by": "",
        "reason": reason,
        "candidate": candidate.name if candidate else None,
        "fraction": candidate.fraction if candidate else 0.0,
        "service": service,
    }


def database_time(connection: SqlConnection) -> float:
    (now,) = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    return float(now)
