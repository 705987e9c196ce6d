"""The PostgreSQL database in which several services share predictions and labels.

Its schema `slipway` has the feedback tables of the SQLite database, and the same SQL runs on both.
Its schema `slipway_rollout` has the rollout and its history, and `slipway_loop` names the loop that
proposes models. In each schema an advisory lock lets only one transaction run at a time: a label
and its prediction may arrive from two services at once, and the second must see the first.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol

from slipway.system.errors import UnavailableError

DATABASE_URL = "SLIPWAY_DATABASE_URL"
FEEDBACK, ROLLOUT, LOOP = "slipway", "slipway_rollout", "slipway_loop"  # names of the schemas
_FORMAT = 1  # stored as the comment of each schema
_CONNECT_S = 5
_LOCK = 0x736C6970  # first number of the advisory lock that all transactions in a schema take
# The timeouts end the transaction of a service that hangs, because it holds up all others.
_BEGIN = (
    "SET LOCAL search_path = {name}; SET LOCAL statement_timeout = '20s'; "
    "SET LOCAL idle_in_transaction_session_timeout = '20s'; "
    f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext('{{name}}'))"
)
# A lock that is held for hours: the server ends no idle transaction, and notices within two minutes
# that the client's machine is gone.
_LASTING = (
    "SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL tcp_keepalives_idle = 60; "
    "SET LOCAL tcp_keepalives_interval = 10; SET LOCAL tcp_keepalives_count = 6"
)
_NAMED = re.compile(r":(\w+)")


class SqlConnection(Protocol):
    """The interface that connections of SQLite and of PostgreSQL share."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...


class PostgresConnection:
    """A PostgreSQL transaction that accepts SQLite's placeholders (`?` and `:name`)."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = (), /) -> Any:
        if isinstance(parameters, Mapping):
            named = {name: _storable(value) for name, value in parameters.items()}
            return self._connection.execute(_NAMED.sub(r"%(\1)s", sql), named)
        return self._connection.execute(sql.replace("?", "%s"), list(map(_storable, parameters)))


class SharedDatabase:
    """A connection for use by one thread, opened by the first transaction.

    Methods raise psycopg.Error.
    """

    def __init__(self, url: str, schema: str, name: str = FEEDBACK) -> None:
        """Store the address.

        Args:
            schema: the SQL that creates the tables in SQLite.
            name: of the schema in PostgreSQL.
        """
        self._url = url
        self._name = name
        self._schema = schema.replace(" STRICT, WITHOUT ROWID", "").replace(
            " REAL", " DOUBLE PRECISION"
        )
        self._connection: Any = None

    @contextmanager
    def transaction(self, limit_s: float | None = None) -> Iterator[PostgresConnection]:
        """Run a transaction while no other one runs; roll it back on any error.

        After `limit_s` seconds the connection is cut, because a server that hangs never answers.
        """
        import psycopg

        if self._connection is None:
            self._connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_S,
                application_name="slipway",
                prepare_threshold=None,  # connection poolers do not support prepared statements
            )
        watchdog = threading.Timer(limit_s or 0, _cut, (self._connection,))
        watchdog.daemon = True
        if limit_s is not None:
            watchdog.start()
        try:
            with self._connection.transaction():
                self._connection.execute(_BEGIN.format(name=self._name))
                self._create()
                yield PostgresConnection(self._connection)
        except BaseException:
            self.close()  # the next transaction opens it again
            raise
        finally:
            watchdog.cancel()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # the connection is discarded either way
                connection.close()

    def _create(self) -> None:
        found = self._connection.execute(
            f"SELECT obj_description(oid) FROM pg_namespace WHERE nspname = '{self._name}'"
        ).fetchone()
        if found == (str(_FORMAT),):
            return
        if found not in (None, (None,)):
            raise UnavailableError(
                f"the schema {self._name} of {DATABASE_URL} has format {found[0]!r}, this "
                f"Slipway has {_FORMAT}. Use the version of Slipway that wrote it, or another "
                "database."
            )
        if found is None:
            self._connection.execute(f"CREATE SCHEMA {self._name}")
        self._connection.execute(f"{self._schema} COMMENT ON SCHEMA {self._name} IS '{_FORMAT}'")


def _cut(connection: Any) -> None:
    """End the connection under a thread that waits for it."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


@contextmanager
def reading_postgres(
    url: str, schema: str, name: str = FEEDBACK, limit_s: float | None = None
) -> Iterator[PostgresConnection]:
    """Run one transaction, for a command; UnavailableError if the database cannot be used."""
    try:
        import psycopg
    except ImportError as error:
        raise UnavailableError(
            f"{DATABASE_URL} is set, but psycopg is missing ({error}). Install it: "
            "pip install 'slipway-ml[postgres]'"
        ) from error
    database = SharedDatabase(url, schema, name)
    try:
        with database.transaction(limit_s) as connection:
            yield connection
    except psycopg.Error as error:
        raise UnavailableError(
            f"the database of {DATABASE_URL} cannot be used: {error}. Check that it runs and that "
            "you may read and write it."
        ) from error
    finally:
        database.close()


@contextmanager
def lasting_lock(url: str, name: str) -> Iterator[Callable[[], None] | None]:
    """Hold an advisory lock on a connection of its own; yields None if another one holds it.

    Yields a function that raises UnavailableError once the connection, and with it the lock, is
    lost. Raises psycopg.Error. The lock is one of a transaction, which connection poolers support;
    between its statements the transaction holds no snapshot, so it does not delay a vacuum.
    """
    import psycopg

    def check() -> None:
        try:
            connection.execute("SELECT 1")
        except psycopg.Error as error:
            reason = " ".join(str(error).split())
            raise UnavailableError(
                f"the connection to {DATABASE_URL} was lost, and with it the lock of this process "
                f"({reason}). Expected one that stays. Check the database, then try again."
            ) from error

    with closing(
        psycopg.connect(
            url,
            connect_timeout=_CONNECT_S,
            application_name=name,
            prepare_threshold=None,
            keepalives_idle=60,
        )
    ) as connection:
        connection.execute(_LASTING)
        found = connection.execute(
            "SELECT pg_try_advisory_xact_lock(%s, hashtext(%s))", (_LOCK, f"{name} lasting")
        ).fetchone()
        yield check if found == (True,) else None


def given_url() -> str | None:
    """Return SLIPWAY_DATABASE_URL of this process; None if it is unset or empty."""
    return os.environ.get(DATABASE_URL) or None


def _storable(value: Any) -> Any:
    """Replace the characters of a text that PostgreSQL refuses; other values stay unchanged."""
    if not isinstance(value, str):
        return value
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
