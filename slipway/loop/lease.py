"""The loop's locks: one call at a time in a state folder, and one loop on a shared database.

Services that share SLIPWAY_DATABASE_URL follow one rollout, so only one loop may propose models to
it. Its journal and candidates are files, so the loop cannot go on at another machine. The database
therefore names the loop that it belongs to, by its SLIPWAY_STATE. A loop that was not called for a
day loses it to the next one that asks.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slipway.loop.decisions import moment
from slipway.loop.journal import FOLDER
from slipway.serving.rollout.records.database import database_time, service_name
from slipway.system import files
from slipway.system.errors import LockedError, UnavailableError
from slipway.traffic.postgres import DATABASE_URL, LOOP, given_url, lasting_lock, reading_postgres

TABLES = """
CREATE TABLE IF NOT EXISTS holder (
    name TEXT NOT NULL, host TEXT NOT NULL, process BIGINT NOT NULL, state TEXT NOT NULL,
    since REAL NOT NULL, seen REAL NOT NULL
);
"""
ABSENT_S = 86400.0  # after this time without a call, another loop may take the lease
_LIMIT_S = 30.0  # time limit of a transaction


@dataclass(frozen=True)
class Holder:
    """The loop that holds the lease; times are the database's, in seconds since 1970."""

    name: str  # of its service, which is kept in its SLIPWAY_STATE
    host: str
    process: int  # id of its last call's process
    state: str  # path of its SLIPWAY_STATE
    since: float  # begin of its last call
    seen: float  # the last time at which it began or ended a call


def loop_lock(state: Path) -> AbstractContextManager[None]:
    """Hold the lock of the loop in `state`. Raises LockedError while another process holds it."""
    return files.lock(state / FOLDER / "loop.lock", "`slipway loop`")


@contextmanager
def lease(state: Path) -> Iterator[Callable[[], None]]:
    """Hold the lease on SLIPWAY_DATABASE_URL, if it is set, during one call of the loop.

    Yields a function that raises UnavailableError if the lease was lost with the connection; call
    it before each step, and before its record. Raises LockedError if another loop holds the lease.
    """
    url = given_url()
    if url is None:
        yield lambda: None
        return
    name = service_name(state)
    with ExitStack() as stack:
        with reading_postgres(url, TABLES, LOOP, _LIMIT_S) as connection:
            check = stack.enter_context(lasting_lock(url, LOOP))
            row = connection.execute("SELECT * FROM holder").fetchone()
            now = database_time(connection)
            reason = refusal(Holder(*row) if row else None, name, now, is_running=check is None)
            if reason or check is None:
                raise LockedError(reason)
            own = Holder(name, socket.gethostname(), os.getpid(), str(state.resolve()), now, now)
            connection.execute("DELETE FROM holder")
            values = list(vars(own).values())
            connection.execute(
                f"INSERT INTO holder VALUES ({', '.join('?' * len(values))})", values
            )
        yield check
        with (
            suppress(UnavailableError),  # the steps are recorded; the next call renews the lease
            reading_postgres(url, TABLES, LOOP, _LIMIT_S) as connection,
        ):
            connection.execute("UPDATE holder SET seen = ?", [database_time(connection)])


def refusal(holder: Holder | None, name: str, now: float, *, is_running: bool) -> str:
    """Return the reason to refuse the lease to the loop `name`; "" if it gets the lease.

    Args:
        holder: the last one that held the lease; None if nobody did.
        now: the database's time, in seconds since 1970.
        is_running: another process holds the lease at the moment.
    """
    place = f"{holder.host}, SLIPWAY_STATE {holder.state}" if holder else "an unknown machine"
    if is_running:
        process = (
            f"process {holder.process} since {moment(holder.since)}" if holder else "a process"
        )
        return (
            f"`slipway loop` is running for this {DATABASE_URL} as {process} on {place}. Expected "
            "one call at a time. Wait for it, or end that process, then try again."
        )
    if holder is None or holder.name == name or now >= holder.seen + ABSENT_S:
        return ""
    return (
        f"the loop of this {DATABASE_URL} belongs to {place}: its last call was process "
        f"{holder.process} at {moment(holder.seen)}. Expected one loop for one database, because "
        "its journal and candidates are there. Call `slipway loop` there only; if that machine is "
        f"gone, a call here succeeds from {moment(holder.seen + ABSENT_S)} on."
    )
