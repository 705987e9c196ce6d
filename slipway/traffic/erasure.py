"""Erases logged requests, or single rows of a request, while the service may be running.

A line of a log is overwritten with spaces, which readers skip. Lines are not removed, because a
writer may have the segment open and append to it. The payload is overwritten first and the id last,
so if the process is killed in between, the next call finds the line again.

A line that loses some of its rows is overwritten with a shorter one and spaces. The new line is
written beside the segment first, so the next call ends what a killed one began.
"""

import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipway.inputs.contract import listed_rows
from slipway.inputs.multipart import decode_images, encode_images
from slipway.system import files
from slipway.system.errors import DataError, UnavailableError
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
    RequestRows,
    decode_line,
    encode_line,
    has_row,
    read_requests,
    segments,
    size_if_closed,
)

# Beginning of a line in the request log or the access log; the group is the request id.
_ID = re.compile(rb'\{(?:"time":"[^"\\]*",)?"request_id":"([^"\\]*)"')
_TABLES = ("predictions", "labels")
_COUNT = "SELECT count(*) FROM {} WHERE {}"
_DELETE = "DELETE FROM {} WHERE {}"
_IDS_AT_ONCE = 500  # SQLite limits the number of variables in a statement
_PENDING = re.compile(r"\.(.+\.jsonl)\.(\d+)")  # segment and place of a line that becomes shorter


@dataclass(frozen=True)
class FoundLine:
    """A line with rows to erase, without its line feed."""

    place: int  # number of bytes before the line
    num_bytes: int
    end_of_id: int
    shorter: bytes | None  # the line without these rows; None: all of it goes


def logged_requests(folder: Path, rows: RequestRows) -> Iterator[LoggedRequest]:
    """Yield the intact requests with these ids."""
    for request in read_requests(folder):
        if not isinstance(request, DamagedLine) and request.request_id in rows:
            yield request


def count_lines(folder: Path, rows: RequestRows) -> int:
    """Return the number of log lines with some of these rows."""
    return sum(len(_lines_with(segment, rows)) for segment in segments(folder))


def erase_lines(folder: Path, rows: RequestRows) -> int:
    """Overwrite these rows in the lines of all segments; return the number of lines.

    Raises:
        DataError: a line would not be shorter without its rows. That line was not changed.
    """
    _end_pending(folder)
    num_erased = 0
    for segment in segments(folder):
        lines = _lines_with(segment, rows)
        if not lines:
            continue
        with suppress(FileNotFoundError), segment.open("r+b") as file:  # may be removed meanwhile
            for line in lines:
                if line.shorter is None:
                    for begin, end in ((line.end_of_id, line.num_bytes), (0, line.end_of_id)):
                        _write(file.fileno(), line.place + begin, b" " * (end - begin))
                else:
                    pending = folder / f".{segment.name}.{line.place}"
                    files.write_bytes(pending, line.shorter, files.PRIVATE)
                    _write(file.fileno(), line.place, line.shorter)
                    pending.unlink()
                num_erased += 1
    return num_erased


def count_records(state: Path, rows: RequestRows) -> dict[str, int]:
    """Return the numbers of predictions and labels of these rows; {} without a database."""
    shared = _in_postgres(_COUNT, rows)
    if not (state / DATABASE).is_file():
        return dict(shared)
    with open_records(state) as connection:
        found = Counter(_in_parts(connection, _COUNT, rows)) + _in_outbox(connection, rows)
    return {table: found[table] + shared[table] for table in _TABLES}


def erase_records(state: Path, rows: RequestRows) -> dict[str, int]:
    """Delete the predictions and labels of these rows; return the deleted numbers by table.

    SQLite overwrites deleted rows with zeros, and empties its write-ahead log unless another
    process is reading. PostgreSQL comes second, because a running service may move rows there.

    Raises:
        UnavailableError: a database cannot be written, or has another schema version.
    """
    if not (state / DATABASE).is_file():
        return dict(_in_postgres(_DELETE, rows))
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
            found = Counter(_in_parts(connection, _DELETE, rows))
            found += _in_outbox(connection, rows, erase=True)
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise UnavailableError(
            f"{path} cannot be written: {error}. Check that you may write it, and that no other "
            "process holds it for long; then run the same command again."
        ) from error
    shared = _in_postgres(_DELETE, rows)
    return {table: found[table] + shared[table] for table in _TABLES}


def _in_postgres(statement: str, rows: RequestRows) -> Counter[str]:
    """Run a statement on the PostgreSQL database that services share, if one is set."""
    url = given_url()
    if url is None:
        return Counter()
    with reading_postgres(url, FEEDBACK_SCHEMA) as connection:
        return Counter(_in_parts(connection, statement, rows))


def _in_outbox(
    connection: SqlConnection, rows: RequestRows, *, erase: bool = False
) -> Counter[str]:
    """Count these rows among those waiting for delivery to PostgreSQL, by table.

    With `erase`, also removes them.
    """
    found = Counter[str]()
    exists = "SELECT 1 FROM sqlite_schema WHERE name = 'outbox'"
    if connection.execute(exists).fetchone() is None:
        return found
    entries = connection.execute("SELECT id, kind, content FROM outbox").fetchall()
    for number, table, content in entries:
        waiting = json.loads(content)  # request id and item come first
        kept = [row for row in waiting if not has_row(rows, row[0], row[1] or 0)]
        found[table] += len(waiting) - len(kept)
        if erase and len(kept) < len(waiting):
            connection.execute(
                "UPDATE outbox SET content = ?, num_rows = ? WHERE id = ?",
                (json.dumps(kept), len(kept), number),
            )
    return found


def _in_parts(connection: SqlConnection, statement: str, rows: RequestRows) -> dict[str, int]:
    """Run a statement on each table, with some of the ids at a time; return the rows by table."""
    whole = sorted(name for name, items in rows.items() if items is None)
    parts: list[tuple[str, list[str | int]]] = []
    for begin in range(0, len(whole), _IDS_AT_ONCE):
        some = whole[begin : begin + _IDS_AT_ONCE]
        parts.append((f"request_id IN ({', '.join('?' * len(some))})", [*some]))
    parts += [
        ("request_id = ? AND item = ?", [name, item])
        for name, items in sorted(rows.items())
        for item in sorted(items or ())
    ]
    counts = dict.fromkeys(_TABLES, 0)
    for condition, values in parts:
        for table in _TABLES:
            done = connection.execute(statement.format(table, condition), values)
            counts[table] += done.fetchone()[0] if done.description else done.rowcount
    return counts


def _lines_with(segment: Path, rows: RequestRows) -> list[FoundLine]:
    """Return the lines that hold some of the rows.

    Lengths are without the line feed. A last line without a line feed counts only if no writer has
    the segment open.
    """
    wanted = {name.encode(): items for name, items in rows.items()}
    found, place = [], 0
    with suppress(FileNotFoundError), segment.open("rb") as file:
        for line in file:
            match = _ID.match(line)
            if match and match[1] in wanted:
                is_whole = line.endswith(b"\n")
                if is_whole or size_if_closed(segment) is not None:
                    own = line[: len(line) - is_whole]
                    shorter = _without(own, wanted[match[1]])
                    if shorter != own:
                        found.append(FoundLine(place, len(own), match.end(), shorter))
            place += len(line)
    return found


def _without(line: bytes, items: frozenset[int] | None) -> bytes | None:
    """Return the line without the rows `items`, at most as long as before; None to erase it all.

    A line is erased as a whole if it cannot be read, or if no other rows are left.
    """
    if items is None:
        return None
    try:
        request = decode_line(line)
        erased = items & set(range(request.num_rows)) - set(request.erased)
        if not erased:
            return line
        if len(erased) + len(request.erased) == request.num_rows:
            return None
        shorter = encode_line(without_rows(request, erased)).rstrip(b"\n")
    except ValueError:
        return None
    if len(shorter) > len(line):
        raise DataError(
            f"the logged request {request.request_id} would not be shorter without the rows "
            f"{sorted(erased)}, expected to write it in its place. Remove all of its rows: "
            f"--request-id {request.request_id} --whole-requests"
        )
    return shorter.ljust(len(line))


def without_rows(request: LoggedRequest, items: frozenset[int]) -> LoggedRequest:
    """Return a request without the inputs, predictions and outputs of the rows `items`.

    The other rows keep their numbers. The digest of all inputs is removed as well, because it could
    confirm a guess of the erased row.
    """
    kind, payload = request.content_type, request.payload
    if kind == "application/json":
        rows = listed_rows(json.loads(payload)) or [None]
        left = [None if item in items else row for item, row in enumerate(rows)]
        text = json.dumps({"rows": left}, ensure_ascii=False, separators=(",", ":"))
        payload = text.encode()
    else:
        images = decode_images(kind, payload)
        kind, payload = encode_images(
            [b"" if item in items else image for item, image in enumerate(images)]
        )
    outputs = {}
    for name, values in request.outputs.items():
        outputs[name] = np.array(values)
        outputs[name][sorted(items)] = 0
    return replace(
        request,
        content_type=kind,
        payload=payload,
        inputs_sha256="",
        outputs=outputs,
        answers=[{} if item in items else one for item, one in enumerate(request.answers)],
        erased=tuple(sorted({*request.erased, *items})),
    )


def _end_pending(folder: Path) -> None:
    """Finish the lines that a killed call had begun to shorten."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _PENDING.fullmatch(path.name)
        if match is None:
            continue
        with suppress(FileNotFoundError), (folder / match[1]).open("r+b") as file:
            _write(file.fileno(), int(match[2]), path.read_bytes())
        path.unlink()


def _write(descriptor: int, place: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], place + written)
    os.fsync(descriptor)
