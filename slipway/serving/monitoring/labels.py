"""Stored predictions and the true labels that callers send: SQL on one open transaction.

A label belongs to the last answer of its request id before the label arrived, or else to the first
answer within EARLY_S after it. `slipway/traffic/selection.py` applies the same rule to the request
log.
"""

import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from slipway.traffic.monitoring_records import EARLY_S

# Rows per INSERT. Every statement releases the interpreter lock and has to get it back, which
# delays the event loop more than the work itself.
ROWS_PER_INSERT = 512
_ANSWER_TIME = (
    "coalesce((SELECT max(time) FROM predictions "
    "WHERE request_id = {request_id} AND time <= {received}), "
    "(SELECT min(time) FROM predictions WHERE request_id = {request_id} "
    f"AND time > {{received}} AND time <= {{received}} + {EARLY_S}))"
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answered item, stored until its label arrives."""

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

    joined: bool  # to a stored prediction
    duplicate: bool  # it replaced an earlier label
    model: str | None = None  # version that predicted; None if unknown
    is_wrong: bool = False  # another label was predicted; False for numbers


@dataclass(frozen=True)
class Joins:
    """Labels that were joined to a prediction after waiting for it."""

    num_joined: int = 0
    num_ambiguous: int = 0  # labels without `item` for requests with several items; deleted
    wrong_models: tuple[str, ...] = ()  # versions that predicted another label, once per label


class ItemNeededError(Exception):
    """A label without `item` for a request with several items."""

    def __init__(self, position: int, num_items: int) -> None:
        super().__init__(f"the request had {num_items} items")
        self.position = position
        self.num_items = num_items


def insert_predictions(connection: sqlite3.Connection, predictions: Sequence[Prediction]) -> None:
    """Store predictions; one with the same id, time and item replaces the other."""
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
            f"INSERT INTO predictions VALUES {places} ON CONFLICT DO UPDATE SET "
            "num_items = excluded.num_items, model = excluded.model, label = excluded.label, "
            "value = excluded.value",
            list(itertools.chain.from_iterable(chunk)),
        )


def join_labels(connection: sqlite3.Connection, since: float, now: float) -> Joins:
    """Join stored labels to predictions answered at `since` or later.

    This includes labels that were joined to an earlier answer of a reused request id.
    """
    answer_time = _ANSWER_TIME.format(request_id="labels.request_id", received="labels.received")
    found = connection.execute(
        "SELECT labels.request_id, labels.item, labels.model IS NULL, "
        "NOT labels.names_item AND one.num_items > 1, labels.label, one.model, one.time, "
        "one.label, one.value FROM labels CROSS JOIN predictions AS one "
        "ON one.request_id = labels.request_id AND one.item = labels.item "
        f"AND one.time = {answer_time} "
        "WHERE labels.received >= ? AND labels.answered IS NOT one.time",
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
    connection: sqlite3.Connection, position: int, item: FeedbackItem, now: float
) -> FeedbackResult:
    """Store a label and join it if its prediction is known; ItemNeededError if it is ambiguous."""
    key = {"request_id": item.request_id, "item": item.item or 0}
    answer_time = _ANSWER_TIME.format(request_id=":request_id", received=":received")
    prediction = connection.execute(
        "SELECT model, time, label, value, num_items FROM predictions "
        f"WHERE request_id = :request_id AND item = :item AND time = {answer_time}",
        key | {"received": now},
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
        "INSERT OR REPLACE INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *key.values(),
            item.item is not None,
            now,
            item.label,
            item.value,
            model and now,
            model,
            answered,
            label,
            value,
            item.caller,
        ),
    )
    is_wrong = model is not None and item.label is not None and label != item.label
    return FeedbackResult(model is not None, before is not None, model, is_wrong)


def delete_old_labels(
    connection: sqlite3.Connection,
    max_age_s: float,
    max_pending_s: float,
    max_rows: int,
    now: float,
) -> int:
    """Delete old and surplus predictions and labels; return the number of labels never joined."""
    num_unknown = connection.execute(
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
    connection: sqlite3.Connection, table: str, time_column: str, condition: str, max_rows: int
) -> int:
    """Delete all but the newest rows that meet `condition`; return the number of deleted rows."""
    key = f"{time_column}, request_id, item"  # many rows share one time
    order = f"{time_column} DESC, request_id DESC, item DESC"
    oldest = connection.execute(
        f"SELECT {key} FROM {table} WHERE {condition} ORDER BY {order} LIMIT 1 OFFSET ?",
        (max_rows - 1,),
    ).fetchone()
    if oldest is None:
        return 0
    return connection.execute(
        f"DELETE FROM {table} WHERE {condition} AND ({key}) < (?, ?, ?)", oldest
    ).rowcount
