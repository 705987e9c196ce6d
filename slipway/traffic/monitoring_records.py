"""What a service remembers of its traffic: windows for drift, predictions, and the truths that came later; this is the form on disk.

STATE/watching.sqlite         one SQLite database for all workers of a service (serving/monitoring/ writes it)
STATE/proposals/TIME.md       what a person may do after a drift alarm

Readers need no running service and never write. A prediction is kept without its input: that is in the kept requests
(slipway/traffic/request_log.py).
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipway.system.errors import UnavailableError

DATABASE = "watching.sqlite"
PROPOSALS = "proposals"
SCHEMA_VERSION = 2  # SQLite's user_version
DEFAULT_STATE = Path(".work/serving")  # of SLIPWAY_STATE
# A truth may be that much older than its answer: told by a caller who chose the id, while the answer is on its way, or by another clock.
EARLY_S = 5.0
SCHEMA = """
CREATE TABLE windows (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL, -- its version, a slash, and the variant that answered; in the other tables the version alone
    opened REAL NOT NULL, -- no row was answered before; seconds since 1970, as every time here
    since REAL NOT NULL, -- from when its age counts; later than `opened` where it was too small and carried on
    closed REAL, -- null while rows may come
    num_rows INTEGER NOT NULL,
    content BLOB NOT NULL, -- slipway/drift/window.py; a worker merges its rows into it
    drifted INTEGER, -- 0 or 1; null while it is open, and where it could not be judged
    judgement TEXT, -- JSON: figures of each feature, the estimated quality
    proposal INTEGER NOT NULL DEFAULT 0 -- 1: is to be written, 2: is written
) STRICT;
CREATE UNIQUE INDEX open_window ON windows (model) WHERE closed IS NULL;
CREATE INDEX closed_windows ON windows (model, closed) WHERE closed IS NOT NULL;
CREATE TABLE parts (worker TEXT PRIMARY KEY, sequence INTEGER NOT NULL, time REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE predictions (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL, -- position in the request, from 0
    num_items INTEGER NOT NULL,
    time REAL NOT NULL, -- when it was answered; a caller may use an id again, then all of them are here
    model TEXT NOT NULL,
    label TEXT, -- the predicted one; null for a numeric target
    value REAL, -- the predicted one; null for classes
    PRIMARY KEY (request_id, time, item)
) STRICT, WITHOUT ROWID;
CREATE INDEX predictions_by_time ON predictions (time);
CREATE TABLE truths (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL,
    names_item INTEGER NOT NULL, -- whether the caller said which item; without, it has to be the request's only one
    told REAL NOT NULL,
    label TEXT,
    value REAL,
    joined REAL, -- when, to a prediction; this and the rest is null while it waits for one
    model TEXT,
    answered REAL, -- the prediction's time
    predicted_label TEXT,
    predicted_value REAL,
    PRIMARY KEY (request_id, item)
) STRICT, WITHOUT ROWID;
CREATE INDEX truths_by_time ON truths (told);
CREATE INDEX truths_by_model ON truths (model, joined);
CREATE TABLE quality (model TEXT PRIMARY KEY, time REAL NOT NULL, latest REAL NOT NULL, content TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True)
class GroundTruth:
    """The true label or value that a caller sent for one item of a request."""

    request_id: str
    item: int
    label: str | None  # of classes
    value: float | None  # of a numeric target
    told: float  # when; seconds since 1970


@dataclass(frozen=True)
class DriftedSpan:
    """A window that drifted: requests answered by `model` between two times (seconds since 1970)."""

    model: str  # the version that the answers name
    opened: float
    closed: float


def read_ground_truths(state: Path) -> Iterator[GroundTruth]:
    """Yield every stored ground truth, the oldest first; UnavailableError without a database."""
    with _reading(state) as connection:
        for row in connection.execute(
            "SELECT request_id, item, label, value, told FROM truths ORDER BY told, request_id, item"
        ):
            yield GroundTruth(*row)


def read_drifted_spans(state: Path) -> list[DriftedSpan]:
    """Return the windows that drifted, the oldest first; UnavailableError without a database."""
    with _reading(state) as connection:
        rows = connection.execute(
            "SELECT model, opened, closed FROM windows WHERE drifted = 1 ORDER BY opened"
        ).fetchall()
    return [DriftedSpan(model.partition("/")[0], opened, closed) for model, opened, closed in rows]


@contextmanager
def _reading(state: Path) -> Iterator[sqlite3.Connection]:
    path = state / DATABASE
    if not path.is_file():
        raise UnavailableError(
            f"{path} is not there: give with --state the folder that the service has as SLIPWAY_STATE."
        )
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        ) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise UnavailableError(
                    f"{path} has schema version {version}, this Slipway reads {SCHEMA_VERSION}. Use the service's own."
                )
            yield connection
    except sqlite3.Error as error:
        raise UnavailableError(
            f"{path} cannot be read: {error}. Check that it is the service's, and that this user may read it."
        ) from error
