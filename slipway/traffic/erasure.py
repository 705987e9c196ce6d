"""Erases requests from the service's records, also while the service runs.

A line of a log is overwritten with spaces, which readers skip. Lines are not removed, because a
writer may have the segment open and append to it. The payload is overwritten first and the id last,
so if the process is killed in between, the next call finds the line again.
"""

import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

from slipway.system.errors import UnavailableError
from slipway.traffic.monitoring_records import (
    DATABASE,
    FEEDBACK_SCHEMA,
    SCHEMA_VERSION,
    open_records,
)
from slipway.traffic.postgres import SqlConnection, given_url, reading_postgres
from slipway.traffic.request_log import (
    DamagedLine,
    LoggedRequest,
    read_requests,
    segments,
    size_if_closed,
)

# Beginning of a line in the request log or the access log; the group is the request id.
_ID = re.compile(rb'\{(?:"time":"[^"\\]*",)?"request_id":"([^"\\]*)"')
_TABLES = ("predictions", "labels")
_COUNT = "SELECT count(*) FROM {} WHERE request_id IN ({})"
_DELETE = "DELETE FROM {} WHERE request_id IN ({})"
_IDS_AT_ONCE = 500  # SQLite limits the number of variables in a statement


def logged_requests(folder: Path, ids: Collection[str]) -> Iterator[LoggedRequest]:
    """Yield the intact requests with these ids."""
    for request in read_requests(folder):
        if not isinstance(request, DamagedLine) and request.request_id in ids:
            yield request


def count_lines(folder: Path, ids: Collection[str]) -> int:
    """Return the number of log lines of these requests."""
    return sum(len(_places(segment, ids)) for segment in segments(folder))


def erase_lines(folder: Path, ids: Collection[str]) -> int:
    """Overwrite the lines of these requests in all segments; return their number."""
    num_erased = 0
    for segment in segments(folder):
        places = _places(segment, ids)
        if not places:
            continue
        with suppress(FileNotFoundError), segment.open("r+b") as file:  # may be removed meanwhile
            for place, num_bytes, end_of_id in places:
                for begin, end in ((end_of_id, num_bytes), (0, end_of_id)):
                    _write_spaces(file.fileno(), place + begin, end - begin)
                num_erased += 1
    return num_erased


def count_records(state: Path, ids: Collection[str]) -> dict[str, int]:
    """Return the numbers of predictions and labels of these requests; {} without a database."""
    shared = _in_postgres(_COUNT, ids)
    if not (state / DATABASE).is_file():
        return dict(shared)
    with open_records(state) as connection:
        found = Counter(_in_parts(connection, _COUNT, ids)) + _in_outbox(connection, ids)
    return {table: found[table] + shared[table] for table in _TABLES}


def erase_records(state: Path, ids: Collection[str]) -> dict[str, int]:
    """Delete the predictions and labels of these requests; return the deleted numbers by table.

    SQLite overwrites deleted rows with zeros, and empties its write-ahead log unless another
    process is reading. PostgreSQL comes second, because a running service may move rows there.

    Raises:
        UnavailableError: a database cannot be written, or has another schema version.
    """
    if not (state / DATABASE).is_file():
        return dict(_in_postgres(_DELETE, ids))
    path = state / DATABASE
    try:
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise UnavailableError(
                    f"{path} has schema version {version}, this Slipway writes {SCHEMA_VERSION}. "
                    "Use the version of Slipway that runs the service."
                )
            connection.execute("PRAGMA secure_delete = ON").fetchall()
            connection.execute("BEGIN IMMEDIATE")
            found = Counter(_in_parts(connection, _DELETE, ids))
            found += _in_outbox(connection, ids, erase=True)
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise UnavailableError(
            f"{path} cannot be written: {error}. Check that you may write it, and that no other "
            "process holds it for long; then run the same command again."
        ) from error
    shared = _in_postgres(_DELETE, ids)
    return {table: found[table] + shared[table] for table in _TABLES}


def _in_postgres(statement: str, ids: Collection[str]) -> Counter[str]:
    """Run a statement on the PostgreSQL database that services share, if one is set."""
    url = given_url()
    if url is None:
        return Counter()
    with reading_postgres(url, FEEDBACK_SCHEMA) as connection:
        return Counter(_in_parts(connection, statement, ids))


def _in_outbox(
    connection: SqlConnection, ids: Collection[str], *, erase: bool = False
) -> Counter[str]:
    """Count the rows that wait for delivery to PostgreSQL, by table; `erase` also removes them."""
    found = Counter[str]()
    exists = "SELECT 1 FROM sqlite_schema WHERE name = 'outbox'"
    if connection.execute(exists).fetchone() is None:
        return found
    entries = connection.execute("SELECT id, kind, content FROM outbox").fetchall()
    for number, table, content in entries:
        rows = json.loads(content)
        kept = [row for row in rows if row[0] not in ids]
        found[table] += len(rows) - len(kept)
        if erase and len(kept) < len(rows):
            connection.execute(
                "UPDATE outbox SET content = ?, num_rows = ? WHERE id = ?",
                (json.dumps(kept), len(kept), number),
            )
    return found


def _in_parts(connection: SqlConnection, statement: str, ids: Collection[str]) -> dict[str, int]:
    """Run a statement on each table, for limited numbers of ids; return the rows by table."""
    counts = dict.fromkeys(_TABLES, 0)
    names = sorted(ids)
    for begin in range(0, len(names), _IDS_AT_ONCE):
        some = names[begin : begin + _IDS_AT_ONCE]
        for table in _TABLES:
            places = ", ".join("?" * len(some))
            done = connection.execute(statement.format(table, places), some)
            counts[table] += done.fetchone()[0] if done.description else done.rowcount
    return counts


def _places(segment: Path, ids: Collection[str]) -> list[tuple[int, int, int]]:
    """Return (offset, length, end of the id) of each line of these requests, in bytes.

    Lengths are without the line feed. A last line without a line feed counts only if no writer has
    the segment open.
    """
    wanted = {name.encode() for name in ids}
    found, place = [], 0
    with suppress(FileNotFoundError), segment.open("rb") as file:
        for line in file:
            match = _ID.match(line)
            if match and match[1] in wanted:
                is_whole = line.endswith(b"\n")
                if is_whole or size_if_closed(segment) is not None:
                    found.append((place, len(line) - is_whole, match.end()))
            place += len(line)
    return found


def _write_spaces(descriptor: int, place: int, num_bytes: int) -> None:
    written = 0
    while written < num_bytes:
        written += os.pwrite(descriptor, b" " * (num_bytes - written), place + written)
    os.fsync(descriptor)
