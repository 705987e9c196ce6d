"""Stores predictions and the true labels that callers send, with SQL in an open transaction.

A label belongs to the last prediction of its request id before the label arrived, or else to the
first one within EARLY_S seconds after it. `slipway/traffic/selection.py` applies the same rule to
the request log.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from slipway.traffic.monitoring_records import CHOSEN, EARLY_S
from slipway.traffic.postgres import SqlConnection

# Rows per INSERT. Every statement releases the interpreter lock and has to get it back, which
# delays the event loop more than the work itself.
ROWS_PER_INSERT = 512
# Exists only in the local database: rows for the database that several services share.
_OUTBOX = (
    "CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, "
    "num_rows INTEGER NOT NULL, content TEXT NOT NULL) STRICT"
)
_MAX_ENTRIES = 200  # most entries that are read at once
_REPLACED = (  # labels replaced by a later label of the same item
    *("names_item", "received", "label", "value", "joined", "model", "answered"),
    *("predicted_label", "predicted_value", "caller"),
)
_ANSWER_TIME = (
    "coalesce((SELECT max(time) FROM predictions "
    "WHERE request_id = {request_id} AND time <= {received}), "
    "(SELECT min(time) FROM predictions WHERE request_id = {request_id} "
    f"AND time > {{received}} AND time <= {{received}} + {EARLY_S}))"
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one item of a request, stored until its label arrives."""

    request_id: str
    item: int
    num_items: int
    time: float
    model: str
    label: str | None
    value: float | None


@dataclass(frozen=True)
class FeedbackItem:
    """One true label or value; `item` is None if the caller gave none."""

    request_id: str
    item: int | None
    label: str | None
    value: float | None
    caller: str | None = None  # name of the API key that sent it

    def belongs_to(self, num_items: int) -> bool:
        """Return True if `item` is one of `num_items` items, or if there is only one."""
        return num_items == 1 if self.item is None else self.item < num_items


@dataclass(frozen=True)
class FeedbackResult:
    """The outcome of one feedback item."""

    joined: bool  # True if it was joined to a stored prediction
    duplicate: bool  # True if it replaced an earlier label
    model: str | None = None  # version that predicted; None if unknown
    is_wrong: bool = False  # another label was predicted; False for numbers


@dataclass(frozen=True)
class Joins:
    """The result of `join_labels`: labels that were joined to predictions after waiting."""

    num_joined: int = 0
    num_ambiguous: int = 0  # labels without `item` for requests with several items; deleted
    wrong_models: tuple[str, ...] = ()  # versions that predicted another label, once per label


class ItemNeededError(Exception):
    """Raised for a label without `item` whose request has several items."""

    def __init__(self, position: int, num_items: int) -> None:
        super().__init__(f"the request had {num_items} items")
        self.position = position
        self.num_items = num_items


class OutboxFullError(Exception):
    """Raised if too many labels wait for the database that several services share."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} labels wait for SLIPWAY_DATABASE_URL")
        self.num_waiting = num_waiting


def insert_predictions(connection: SqlConnection, predictions: Sequence[Prediction]) -> None:
    """Store predictions. One with the same id, time and item as a stored one replaces it."""
    rows = [
        (one.request_id, one.item, one.num_items, one.time, one.model, one.label, one.value)
        for one in predictions
    ]
    start = 0
    while start < len(rows):
        # Powers of two: sqlite3 caches the last 128 statements, and long ones are large.
        num_rows = min(ROWS_PER_INSERT, 1 << (len(rows) - start).bit_length() - 1)
        chunk = rows[start : start + num_rows]
        start += num_rows
        places = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * num_rows)
        connection.execute(
            f"INSERT INTO predictions VALUES {places} "
            "ON CONFLICT (request_id, time, item) DO UPDATE SET "
            "num_items = excluded.num_items, model = excluded.model, label = excluded.label, "
            "value = excluded.value",
            list(itertools.chain.from_iterable(chunk)),
        )


def join_labels(connection: SqlConnection, since: float, now: float) -> Joins:
    """Join stored labels to predictions made at `since` or later.

    This includes labels that were joined to an earlier prediction of a reused request id.
    """
    answer_time = _ANSWER_TIME.format(request_id="labels.request_id", received="labels.received")
    found = connection.execute(
        "SELECT labels.request_id, labels.item, labels.model IS NULL, "
        "labels.names_item = 0 AND one.num_items > 1, labels.label, one.model, one.time, "
        "one.label, one.value FROM labels CROSS JOIN predictions AS one "
        "WHERE one.request_id = labels.request_id AND one.item = labels.item "
        f"AND one.time = {answer_time} "
        "AND labels.received >= ? "
        "AND (labels.answered IS NULL OR labels.answered <> one.time)",
        (since - EARLY_S,),
    ).fetchall()
    num_joined = num_ambiguous = 0
    wrong_models = []
    for request_id, item, was_waiting, is_ambiguous, label, *prediction in found:
        if is_ambiguous:
            connection.execute(
                "DELETE FROM labels WHERE request_id = ? AND item = ?", (request_id, item)
            )
            num_ambiguous += 1
            continue
        connection.execute(
            "UPDATE labels SET joined = ?, model = ?, answered = ?, predicted_label = ?, "
            "predicted_value = ? WHERE request_id = ? AND item = ?",
            (now, *prediction, request_id, item),
        )
        num_joined += was_waiting
        model, _, predicted, _ = prediction
        if label is not None and label != predicted:
            wrong_models.append(model)
    return Joins(num_joined, num_ambiguous, tuple(wrong_models))


def insert_label(
    connection: SqlConnection,
    position: int,
    item: FeedbackItem,
    received: float,
    joined: float | None = None,
) -> FeedbackResult:
    """Store a label and join it if its prediction is known; ItemNeededError if it is ambiguous.

    `joined` is the time of the join if the label was received earlier.
    """
    key = {"request_id": item.request_id, "item": item.item or 0}
    answer_time = _ANSWER_TIME.format(request_id=":request_id", received=":received")
    prediction = connection.execute(
        "SELECT model, time, label, value, num_items FROM predictions "
        f"WHERE request_id = :request_id AND item = :item AND time = {answer_time}",
        key | {"received": received},
    ).fetchone()
    if prediction is not None and item.item is None and prediction[-1] > 1:
        raise ItemNeededError(position, prediction[-1])
    before = connection.execute(
        "SELECT model, answered, predicted_label, predicted_value FROM labels "
        "WHERE request_id = :request_id AND item = :item",
        key,
    ).fetchone()
    joined_to = before  # a corrected label stays joined although its prediction was deleted
    if prediction is not None:
        joined_to = prediction[:-1]
    model, answered, label, value = joined_to or (None, None, None, None)
    connection.execute(
        f"INSERT INTO labels VALUES ({', '.join('?' * (2 + len(_REPLACED)))}) "
        "ON CONFLICT (request_id, item) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in _REPLACED),
        (
            *key.values(),
            int(item.item is not None),
            received,
            item.label,
            item.value,
            model and (joined or received),
            model,
            answered,
            label,
            value,
            item.caller,
        ),
    )
    is_wrong = model is not None and item.label is not None and label != item.label
    return FeedbackResult(model is not None, before is not None, model, is_wrong)


def joined_labels(
    connection: SqlConnection, model: str, max_rows: int
) -> list[tuple[str | float, str | float]]:
    """Return (truth, prediction) of the last joined items of a model, newest first.

    Rows that the label queue chose for their difficulty are left out.
    """
    rows = connection.execute(
        "SELECT label, value, predicted_label, predicted_value FROM labels "
        "WHERE model = ? AND (label IS NULL) = (predicted_label IS NULL) "
        "AND coalesce(caller, '') NOT LIKE ? ORDER BY joined DESC LIMIT ?",
        (model, f"{CHOSEN}%", max_rows),
    ).fetchall()
    return [
        (value, predicted_value) if label is None else (label, predicted)
        for label, value, predicted, predicted_value in rows
    ]


def delete_old_labels(
    connection: SqlConnection,
    max_age_s: float,
    max_pending_s: float,
    max_rows: int,
    now: float,
) -> int:
    """Delete old and surplus predictions and labels; return the number of labels never joined."""
    num_unknown: int = connection.execute(
        "DELETE FROM labels WHERE model IS NULL AND received < ?", (now - max_pending_s,)
    ).rowcount
    connection.execute("DELETE FROM predictions WHERE time < ?", (now - max_age_s,))
    connection.execute("DELETE FROM labels WHERE received < ?", (now - max_age_s,))
    # Joined and waiting labels have separate limits: any caller can send any number of labels of
    # unknown requests, and they must not displace joined ones.
    _keep_newest(connection, "predictions", "time", "TRUE", max_rows)
    _keep_newest(connection, "labels", "received", "model IS NOT NULL", max_rows)
    return num_unknown + _keep_newest(connection, "labels", "received", "model IS NULL", max_rows)


def _keep_newest(
    connection: SqlConnection, table: str, time_column: str, condition: str, max_rows: int
) -> int:
    """Of the rows that meet `condition`, delete all but the `max_rows` newest.

    Returns the number of deleted rows. Other rows stay.
    """
    key = f"{time_column}, request_id, item"  # many rows share one time
    order = f"{time_column} DESC, request_id DESC, item DESC"
    oldest = connection.execute(
        f"SELECT {key} FROM {table} WHERE {condition} ORDER BY {order} LIMIT 1 OFFSET ?",
        (max_rows - 1,),
    ).fetchone()
    if oldest is None:
        return 0
    num_deleted: int = connection.execute(
        f"DELETE FROM {table} WHERE {condition} AND ({key}) < (?, ?, ?)", oldest
    ).rowcount
    return num_deleted


def put_predictions(
    connection: SqlConnection, predictions: Sequence[Prediction], max_rows: int
) -> int:
    """Add predictions to the outbox, and drop its oldest rows beyond `max_rows`.

    Returns the number of dropped rows.
    """
    _put(connection, "predictions", [astuple(one) for one in predictions])
    num_dropped = 0
    while num_waiting(connection, "predictions") > max_rows:
        (number, num_rows) = connection.execute(
            "SELECT id, num_rows FROM outbox WHERE kind = 'predictions' ORDER BY id LIMIT 1"
        ).fetchone()
        connection.execute("DELETE FROM outbox WHERE id = ?", (number,))
        num_dropped += num_rows
    return num_dropped


def put_labels(
    connection: SqlConnection, items: Sequence[FeedbackItem], received: float, max_rows: int
) -> None:
    """Add labels to the outbox; OutboxFullError if more than `max_rows` would wait."""
    _put(connection, "labels", [(*astuple(item), received) for item in items])
    if num_waiting(connection, "labels") > max_rows:
        raise OutboxFullError(max_rows)  # the transaction is rolled back


def read_outbox(connection: SqlConnection, max_rows: int) -> list[tuple[int, str, list[Any]]]:
    """Return the oldest entries (id, kind, rows) of the outbox, until they have `max_rows` rows.

    The last entry may exceed that number, because no entry is divided.
    """
    connection.execute(_OUTBOX)
    found: list[tuple[int, str, list[Any]]] = []
    num_rows = 0
    for number, kind, content in connection.execute(
        "SELECT id, kind, content FROM outbox ORDER BY id LIMIT ?", (_MAX_ENTRIES,)
    ).fetchall():
        found.append((number, kind, json.loads(content)))
        num_rows += len(found[-1][2])
        if num_rows >= max_rows:
            break
    return found


def num_waiting(connection: SqlConnection, kind: str) -> int:
    """Return the number of rows in the outbox of this `kind`; "%" means all kinds."""
    connection.execute(_OUTBOX)
    (found,) = connection.execute(
        "SELECT coalesce(sum(num_rows), 0) FROM outbox WHERE kind LIKE ?", (kind,)
    ).fetchone()
    return int(found)


def _put(connection: SqlConnection, kind: str, rows: Sequence[tuple[Any, ...]]) -> None:
    connection.execute(_OUTBOX)
    connection.execute(
        "INSERT INTO outbox (kind, num_rows, content) VALUES (?, ?, ?)",
        (kind, len(rows), json.dumps(rows)),
    )
