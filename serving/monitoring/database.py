"""One thread's connection to the database of all workers: opened when it is needed, and opened anew when something happened to it.

A database that is damaged or of another form is moved aside under a name that says when, and a new one is begun. It may hold ids,
predictions and truths, so it is removed in its turn. Of several workers one moves it. Every method raises sqlite3.Error or OSError where
the disk, or another process, refuses.
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
from slipway.traffic.monitoring_records import DATABASE, SCHEMA, SCHEMA_VERSION

logger = logging.getLogger("bentoml.slipway")

BUSY_S = 1.0  # that another process may hold the database before it is an error
_LOCK = "watching.lock"
_BESIDE = ("", "-wal", "-shm")  # SQLite's files
_MOMENT = "%Y%m%dT%H%M%S.%fZ"  # in the name of what was moved aside
_ASIDE = re.compile(rf"{re.escape(DATABASE)}\.(\d{{8}}T\d{{6}}\.\d{{6}}Z)(-wal|-shm)?")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CACHE_KIB = 256  # of a connection, instead of 2,000: ids have no order, so few pages are met again, and writing takes as long
_JOURNAL_BYTES = 16 << 20  # what is left of the write-ahead log on disk


class Database:
    """For one thread."""

    def __init__(self, state: Path) -> None:
        self.path = state / DATABASE
        self._state = state
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of what is open

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and one writer at a time; after an error nothing of it is there."""
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
            self.close()  # the next one opens it, and looks whether it is sound
            raise

    def close(self) -> None:
        """End the connection; the next transaction opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):  # it is given up either way
                connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._file != _identity(self.path):
            logger.warning("%s was exchanged or removed, it is opened anew", self.path)
            self.close()
        if self._connection is None:
            files.make_private_directory(self._state)
            with self._alone():
                self._connection = self._usable()
                self._file = _identity(self.path)
        return self._connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time begins a database, or moves one aside."""
        with (self._state / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _usable(self) -> sqlite3.Connection:
        """A connection to a sound database, begun where there was none; sqlite3.DatabaseError after an unsound one was moved aside."""
        if not self.path.exists():
            for suffix in _BESIDE[
                1:
            ]:  # of one that somebody removed: they would be taken for the new one's
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self.path.touch(files.PRIVATE)  # SQLite gives the files beside it the same mode
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            # A killed process loses nothing that was committed; a machine that loses its power may lose the last seconds.
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
        raise sqlite3.DatabaseError(f"{self.path} could not be used and was moved aside: {fault}")

    def _move_aside(self, fault: str) -> None:
        aside = f"{DATABASE}.{datetime.now(UTC):{_MOMENT}}"
        for suffix in _BESIDE:
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(self._state / f"{aside}{suffix}")
        logger.error(
            "%s cannot be used: %s. It is now %s, and a new one is begun",
            self.path,
            fault,
            self._state / aside,
        )


def remove_moved_aside(state: Path, seconds: float) -> None:
    """Remove the databases that were moved aside longer ago than this; OSError where the disk refuses."""
    for path in state.iterdir() if state.is_dir() else ():
        match = _ASIDE.fullmatch(path.name)
        if (
            match
            and time.time() - datetime.strptime(match[1], _MOMENT).replace(tzinfo=UTC).timestamp()
            > seconds
        ):
            path.unlink(missing_ok=True)  # another worker may be at it


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nothing is in it: it is new, or the disk was full when it was begun."""
    with closing(connection.execute("SELECT count(*) FROM sqlite_schema")) as found:
        (count,) = found.fetchone()
    return not count


def _fault(connection: sqlite3.Connection) -> str | None:
    """Why a database cannot be used, or None."""
    with closing(connection.execute("PRAGMA user_version")) as found:
        (version,) = found.fetchone()
    if version != SCHEMA_VERSION:
        return f"it has schema version {version}, expected {SCHEMA_VERSION}"
    with closing(connection.execute("PRAGMA quick_check(1)")) as found:
        (answer,) = found.fetchone()
    return None if answer == "ok" else f"it is damaged: {answer}"


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return (
        getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
    )  # the rest of the code says where


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
