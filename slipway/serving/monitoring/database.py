"""Opens the monitoring database of all workers, with one connection for each thread.

A database that is damaged, or has another schema, is moved aside by one of the workers: the time
becomes part of its name, and an empty database replaces it. It may hold ids, predictions and
labels, so `remove_moved_aside` deletes it later. Methods raise sqlite3.Error or OSError for faults
of the disk and for locks of other processes.
"""

import fcntl
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from slipway.system import files
from slipway.traffic.monitoring_records import DATABASE, MIGRATIONS, SCHEMA, SCHEMA_VERSION

logger = logging.getLogger("bentoml.slipway")

BUSY_S = 1.0  # longest wait for a lock of another process
_LOCK = "monitoring.lock"
_SUFFIXES = ("", "-wal", "-shm")  # suffixes of SQLite's files
_MOMENT = "%Y%m%dT%H%M%S.%fZ"  # time in the name of a database that was moved aside
_ASIDE = re.compile(rf"{re.escape(DATABASE)}\.(\d{{8}}T\d{{6}}\.\d{{6}}Z)(-wal|-shm)?")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Per connection; SQLite's default is 2,000. Random ids rarely hit a cached page.
_CACHE_KIB = 256
_JOURNAL_BYTES = 16 << 20  # size of the write-ahead log after a checkpoint


class Database:
    """A connection to the monitoring database, for use by one thread."""

    def __init__(self, state: Path) -> None:
        self.path = state / DATABASE
        self._state = state
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the open database

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a write transaction; roll it back on any error."""
        connection = self._open()
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError):
            self.close()  # the next transaction opens and checks it again
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):  # the connection is discarded either way
                connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._file != _identity(self.path):
            logger.warning("%s was replaced or removed; opening it again", self.path)
            self.close()
        if self._connection is None:
            files.make_private_directory(self._state)
            with self._locked():
                self._connection = self._connect()
                self._file = _identity(self.path)
        return self._connection

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time create a database or move one aside."""
        with (self._state / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _connect(self) -> sqlite3.Connection:
        """Connect to a sound database, creating it if needed.

        Moves an unsound one aside and raises sqlite3.DatabaseError.
        """
        if not self.path.exists():
            for suffix in _SUFFIXES[1:]:  # left from a removed database; SQLite would read them
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self.path.touch(files.PRIVATE)  # SQLite gives the files beside it the same mode
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            # A killed process loses no commit; a power failure may lose the last seconds.
            for setting in (
                "synchronous = NORMAL",
                f"journal_size_limit = {_JOURNAL_BYTES}",
                f"cache_size = -{_CACHE_KIB}",
            ):
                connection.execute(f"PRAGMA {setting}").close()
            if _is_empty(connection):
                connection.execute("PRAGMA journal_mode = WAL").close()
                connection.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            _migrate(connection)
            fault = _fault(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            if not _is_damage(error):
                raise
            fault = str(error)
        if fault is None:
            return connection
        connection.close()
        self._move_aside(fault)
        raise sqlite3.DatabaseError(f"{self.path} was unusable and was moved aside: {fault}")

    def _move_aside(self, fault: str) -> None:
        aside = f"{DATABASE}.{datetime.now(UTC):{_MOMENT}}"
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(self._state / f"{aside}{suffix}")
        logger.error(
            "%s is unusable: %s; moved it to %s and started a new database",
            self.path,
            fault,
            self._state / aside,
        )


def remove_moved_aside(state: Path, seconds: float) -> None:
    """Delete databases that were moved aside more than `seconds` ago."""
    for path in state.iterdir() if state.is_dir() else ():
        match = _ASIDE.fullmatch(path.name)
        if match:
            moved = datetime.strptime(match[1], _MOMENT).replace(tzinfo=UTC)
            if time.time() - moved.timestamp() > seconds:
                path.unlink(missing_ok=True)  # another worker may delete it at the same time


def _is_empty(connection: sqlite3.Connection) -> bool:
    with closing(connection.execute("SELECT count(*) FROM sqlite_schema")) as found:
        (count,) = found.fetchone()
    return not count


def _migrate(connection: sqlite3.Connection) -> None:
    """Upgrade a database of an older schema to the current one, without losing rows."""
    with closing(connection.execute("PRAGMA user_version")) as found:
        (version,) = found.fetchone()
    for older in range(version, SCHEMA_VERSION):
        if older in MIGRATIONS:
            connection.executescript(
                f"BEGIN IMMEDIATE; {MIGRATIONS[older]} PRAGMA user_version = {older + 1}; COMMIT;"
            )


def _fault(connection: sqlite3.Connection) -> str | None:
    with closing(connection.execute("PRAGMA user_version")) as found:
        (version,) = found.fetchone()
    if version != SCHEMA_VERSION:
        return f"it has schema version {version}, expected {SCHEMA_VERSION}"
    with closing(connection.execute("PRAGMA quick_check(1)")) as found:
        (answer,) = found.fetchone()
    return None if answer == "ok" else f"it is damaged: {answer}"


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary_code in _DAMAGED


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
