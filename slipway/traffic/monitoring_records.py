"""Reads the monitoring records on disk: drift windows, predictions, and their true labels.

STATE/monitoring.sqlite       one SQLite database for all workers (written by
slipway/serving/monitoring/) STATE/proposals/TIME.md       remediation proposals after drift alarms

Readers need no running service and never write. Predictions are stored without their inputs, which
are in the request log (slipway/traffic/request_log.py).
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipway.system.errors import UnavailableError
from slipway.traffic.postgres import SqlConnection, given_url, reading_postgres

DATABASE = "monitoring.sqlite"
PROPOSALS = "proposals"
SCHEMA_VERSION = 4  # SQLite's user_version
# For each old version: SQL that upgrades a database to the next one and keeps its rows.
MIGRATIONS = {3: "ALTER TABLE labels ADD COLUMN caller TEXT;"}
# Prefix of the `caller` of a label whose row was chosen because it is hard (slipway/traffic/
# label_queue.py). Estimates of quality must leave such labels out.
CHOSEN = "chosen:"
DEFAULT_STATE = Path(".work/serving")  # the default of SLIPWAY_STATE
# Seconds by which a label may come before its answer: clocks differ, and a caller who chose the id
# may send the label before the answer has arrived.
EARLY_S = 5.0
_WINDOWS_SCHEMA = """
CREATE TABLE windows (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL, -- VERSION/VARIANT; other tables have the version only
    opened REAL NOT NULL, -- no row was answered before; all times are seconds since 1970
    since REAL NOT NULL, -- start of its age; later than `opened` after it was too small to judge
    closed REAL, -- null while it takes rows
    num_rows INTEGER NOT NULL,
    content BLOB NOT NULL, -- slipway/drift/window.py
    drifted INTEGER, -- 0 or 1; null while it is open or if judging failed
    judgement TEXT, -- JSON: statistics of each feature, estimated quality
    proposal INTEGER NOT NULL DEFAULT 0 -- 1: due, 2: written
) STRICT;
CREATE UNIQUE INDEX open_window ON windows (model) WHERE closed IS NULL;
CREATE INDEX closed_windows ON windows (model, closed) WHERE closed IS NOT NULL;
CREATE TABLE parts (
    worker TEXT PRIMARY KEY, sequence INTEGER NOT NULL, time REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""
# These tables also exist in PostgreSQL, for services that share feedback.
FEEDBACK_SCHEMA = """
CREATE TABLE predictions (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL, -- position in the request, from 0
    num_items INTEGER NOT NULL,
    time REAL NOT NULL, -- when it was answered; callers may reuse an id
    model TEXT NOT NULL,
    label TEXT, -- predicted; null for a numeric target
    value REAL, -- predicted; null for classes
    PRIMARY KEY (request_id, time, item)
) STRICT, WITHOUT ROWID;
CREATE INDEX predictions_by_time ON predictions (time);
CREATE TABLE labels (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL,
    names_item INTEGER NOT NULL, -- 0: the caller named none, so the request must have only one
    received REAL NOT NULL,
    label TEXT,
    value REAL,
    joined REAL, -- time of the join; this and the rest is null before
    model TEXT,
    answered REAL, -- the prediction's time
    predicted_label TEXT,
    predicted_value REAL,
    caller TEXT, -- name of the API key that sent the label; null without one
    PRIMARY KEY (request_id, item)
) STRICT, WITHOUT ROWID;
CREATE INDEX labels_by_time ON labels (received);
CREATE INDEX labels_by_model ON labels (model, joined);
"""
_QUALITY_SCHEMA = """
CREATE TABLE quality (
    model TEXT PRIMARY KEY, time REAL NOT NULL, latest REAL NOT NULL, content TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""
SCHEMA = _WINDOWS_SCHEMA + FEEDBACK_SCHEMA + _QUALITY_SCHEMA


@dataclass(frozen=True)
class GroundTruth:
    """The true label or value that a caller sent for one item of a request."""

    request_id: str
    item: int
    label: str | None  # null for a numeric target
    value: float | None  # null for classes
    received: float  # seconds since 1970
    caller: str | None = None  # name of the API key; None without one


@dataclass(frozen=True)
class JoinedLabel:
    """A row's true label beside its predicted label; both are class names or numbers."""

    caller: str | None
    truth: str | float
    predicted: str | float
    answered: float  # all times are seconds since 1970
    joined: float

    @property
    def is_chosen(self) -> bool:
        """True if the label queue chose the row because it is hard."""
        return is_chosen(self.caller)


@dataclass(frozen=True)
class JudgedWindow:
    """A closed drift window of one variant of a model, with the features that drifted."""

    model: str  # VERSION/VARIANT
    opened: float
    closed: float
    drifted_features: frozenset[str]  # empty for a clean window
    content: bytes = b""  # its counts (slipway/drift/window.py)
    seconds: float = 0.0  # its duration, which decides its fraction of the false alarms


@dataclass(frozen=True)
class DriftedSpan:
    """The period in which `model` drifted, from a drift window; times in seconds since 1970."""

    model: str  # version
    opened: float
    closed: float


def is_chosen(caller: str | None) -> bool:
    """Return True if `caller` marks a label whose row was chosen because it is hard."""
    return caller is not None and caller.startswith(CHOSEN)


def read_ground_truth(state: Path) -> Iterator[GroundTruth]:
    """Yield every stored ground truth, the oldest first; UnavailableError without a database."""
    with _reading_labels(state) as connection:
        for row in connection.execute(
            "SELECT request_id, item, label, value, received, caller FROM labels "
            "ORDER BY received, request_id, item"
        ):
            yield GroundTruth(*row)


def read_joined_labels(state: Path, *versions: str) -> list[JoinedLabel]:
    """Return the labels joined to predictions of the models `versions`, the latest first."""
    with _reading_labels(state) as connection:
        rows = connection.execute(
            "SELECT caller, label, value, predicted_label, predicted_value, answered, joined "
            "FROM labels "
            f"WHERE model IN ({', '.join('?' * len(versions))}) "
            "AND (label IS NULL) = (predicted_label IS NULL) "
            "ORDER BY joined DESC, request_id, item",
            versions,
        ).fetchall()
    return [
        JoinedLabel(
            caller,
            value if label is None else label,
            predicted_value if predicted is None else predicted,
            *times,
        )
        for caller, label, value, predicted, predicted_value, *times in rows
    ]


def read_judged_windows(state: Path, version: str) -> list[JudgedWindow]:
    """Return the judged windows of a model, the oldest first."""
    with open_records(state) as connection:
        rows = connection.execute(
            "SELECT model, opened, closed, judgement, content FROM windows "
            "WHERE model LIKE ? || '/%' AND drifted IS NOT NULL ORDER BY closed, id",
            (version,),
        ).fetchall()
    judgements = [json.loads(text) for *_, text, _ in rows]
    return [
        JudgedWindow(
            model,
            opened,
            closed,
            frozenset(one["name"] for one in judgement["features"] if one["drifted"]),
            content,
            judgement["seconds"],
        )
        for (model, opened, closed, _, content), judgement in zip(rows, judgements, strict=True)
    ]


def read_drifted_spans(state: Path) -> list[DriftedSpan]:
    """Return the windows that drifted, the oldest first; UnavailableError without a database."""
    with open_records(state) as connection:
        rows = connection.execute(
            "SELECT model, opened, closed FROM windows WHERE drifted = 1 ORDER BY opened"
        ).fetchall()
    return [DriftedSpan(model.partition("/")[0], opened, closed) for model, opened, closed in rows]


def _reading_labels(state: Path) -> AbstractContextManager[SqlConnection]:
    """Open the database of the labels: PostgreSQL if services share them, else SQLite."""
    url = given_url()
    return reading_postgres(url, FEEDBACK_SCHEMA) if url else open_records(state)


@contextmanager
def open_records(state: Path) -> Iterator[sqlite3.Connection]:
    """Open the database for reading; UnavailableError without one, or with another schema."""
    path = state / DATABASE
    if not path.is_file():
        raise UnavailableError(
            f"{path} does not exist. Set --state to the service's SLIPWAY_STATE folder."
        )
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        ) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise UnavailableError(
                    f"{path} has schema version {version}, this Slipway reads {SCHEMA_VERSION}. "
                    "Use the version of Slipway that runs the service."
                )
            yield connection
    except sqlite3.Error as error:
        raise UnavailableError(
            f"{path} cannot be read: {error}. Check that it is the service's database and that you "
            "may read it."
        ) from error
