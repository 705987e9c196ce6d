"""What is written to and read from the database: windows that all workers share, predictions, truths, quality.

Each worker's rows are merged exactly once: a part carries a number, and the transaction that merges it writes that number down, so that
one whose end was not seen is not merged again. Whoever finds a window full, or old enough, judges and closes it, in the same transaction.
"""

import itertools
import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from serving.monitoring.database import Database, remove_moved_aside
from serving.monitoring.settings import Limits
from slipway.drift.window import Window
from slipway.traffic.monitoring_records import EARLY_S

MAX_WINDOWS = 500  # closed ones, of all models
PENDING_S = (
    3600.0  # that a truth waits for its prediction, which a worker may be unable to write down
)
_DAY_S = 86400.0
_HISTORY = 48  # windows in the status
# Of one statement. Each gives the interpreter away and has to get it back, which holds up the event loop more than the work itself.
_ROWS_AT_ONCE = 512
# The time of the answer that a truth of `request_id` is of, told at `told`; slipway/traffic/selection.py has the rule for kept requests.
_ANSWER_TIME = (
    "coalesce((SELECT max(time) FROM predictions WHERE request_id = {request_id} AND time <= {told}), "
    f"(SELECT min(time) FROM predictions WHERE request_id = {{request_id}} AND time > {{told}} AND time <= {{told}} + {EARLY_S}))"
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answered item, as it is remembered for a truth to come."""

    request_id: str
    item: int
    num_items: int
    time: float
    model: str
    label: str | None
    value: float | None


@dataclass(frozen=True)
class Told:
    """One truth that a caller told; `item` is None where the caller named none."""

    request_id: str
    item: int | None
    label: str | None
    value: float | None


@dataclass(frozen=True)
class Heard:
    """What became of it: whether its prediction is known, and whether it took the place of an earlier one."""

    joined: bool
    duplicate: bool
    model: str | None = None  # the version that predicted; None where that is not known
    is_wrong: bool = False  # another label was predicted; False for a value


class ItemNeededError(Exception):
    """A truth without `item` for a request that had several."""

    def __init__(self, position: int, num_items: int) -> None:
        super().__init__(f"the request had {num_items} items")
        self.position = position
        self.num_items = num_items


@dataclass
class Part:
    """What one worker has gathered since its last part that is known to be merged."""

    sequence: int
    windows: dict[str, Window] = field(default_factory=dict)  # by key of the model
    predictions: list[Prediction] = field(default_factory=list)
    begun: dict[str, float] = field(
        default_factory=dict
    )  # by the same key: no row was answered before; seconds since 1970

    @property
    def is_empty(self) -> bool:
        return not self.predictions and not any(window.num_rows for window in self.windows.values())


@dataclass(frozen=True)
class Closed:
    """A window that was closed, or is too small and goes on. `drifted` is None where it was not judged."""

    model: str
    num_rows: int
    drifted: bool | None
    is_too_small: bool
    judgement: dict[str, Any]


@dataclass
class Merged:
    """What a part brought about."""

    closed: list[Closed] = field(default_factory=list)
    num_joined: int = 0  # truths that waited for these predictions
    num_ambiguous: int = 0  # truths that name no item, for requests that had several
    wrong: list[str] = field(
        default_factory=list
    )  # of the joined ones, versions of models that had predicted another label
    windows_s: float = 0.0  # processor time of adding to windows and judging them
    seconds: float = 0.0  # of all, to the end of the transaction: writing predictions takes longer than all else about them
    errors: list[Exception] = field(
        default_factory=list
    )  # of judging: the window is closed nevertheless


class Watched(Protocol):
    """A model whose traffic is watched for drift; see serving/monitoring/models.py."""

    def load(self, content: bytes) -> Window:
        """The window of these bytes; ValueError if they are not one of this model's."""

    def judge(self, window: Window, seconds: float) -> dict[str, Any] | None:
        """Figures of a window with so many seconds' share of false alarms, `drifted` and `features` too; None if it is too small."""


class Store:
    """For one thread. Every method raises sqlite3.Error or OSError where the database cannot be used; then nothing was changed."""

    def __init__(self, state: Path, limits: Limits) -> None:
        self.state = state
        self._limits = limits
        self._database = Database(state)
        self._worker = secrets.token_hex(8)
        self._judgements: dict[
            tuple[int, float], dict[str, Any]
        ] = {}  # by number and end of a window: a new database counts anew

    def close(self) -> None:
        """End the connection."""
        self._database.close()

    def merge(self, part: Part, models: Mapping[str, Watched]) -> Merged:
        """Add a part, unless it is there already, join what waited for its predictions, and close the windows that are full or old."""
        merged, begun = Merged(), time.thread_time()
        with self._database.transaction() as connection:
            now = time.time()  # once no other worker writes
            if not self._is_merged(connection, part):
                for version, window in part.windows.items():
                    if window.num_rows:
                        _add(
                            connection,
                            version,
                            window,
                            models[version],
                            min(now, part.begun.get(version, now)),
                            merged,
                        )
                merged.windows_s = time.thread_time() - begun
                if part.predictions:
                    _remember(connection, part.predictions)
                    _join(connection, min(one.time for one in part.predictions), now, merged)
                connection.execute(
                    "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)",
                    (self._worker, part.sequence, now),
                )
            closing = time.thread_time()
            for version, model in models.items():
                self._close_if_due(connection, version, model, now, merged)
            merged.windows_s += time.thread_time() - closing
        merged.seconds = time.thread_time() - begun
        return merged

    def tell(self, truths: Sequence[Told]) -> list[Heard]:
        """Write down what callers told; all of it or nothing. ItemNeededError for one that does not say which item it means."""
        with self._database.transaction() as connection:
            now = (
                time.time()
            )  # once no other worker writes: who measures looks for later ones alone
            return [
                _tell(connection, position, truth, now) for position, truth in enumerate(truths)
            ]

    def tidy(self) -> int:
        """Remove what is too old or too much; the number of truths that waited for a prediction in vain."""
        now, limits = time.time(), self._limits
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM windows WHERE closed IS NOT NULL AND id NOT IN "
                "(SELECT id FROM windows WHERE closed IS NOT NULL ORDER BY closed DESC LIMIT ?)",
                (MAX_WINDOWS,),
            )
            connection.execute(
                "DELETE FROM windows WHERE closed IS NULL AND since < ?",
                (now - max(7 * _DAY_S, 10 * limits.window_s),),
            )
            connection.execute("DELETE FROM parts WHERE time < ?", (now - _DAY_S,))
            in_vain = connection.execute(
                "DELETE FROM truths WHERE model IS NULL AND told < ?", (now - PENDING_S,)
            ).rowcount
            connection.execute("DELETE FROM predictions WHERE time < ?", (now - limits.feedback_s,))
            connection.execute("DELETE FROM truths WHERE told < ?", (now - limits.feedback_s,))
            # Each kind by itself: truths of unknown requests, of which anybody can send any number, push out none that was joined.
            _keep_newest(connection, "predictions", "time", "TRUE", limits.feedback_rows)
            _keep_newest(connection, "truths", "told", "model IS NOT NULL", limits.feedback_rows)
            in_vain += _keep_newest(
                connection, "truths", "told", "model IS NULL", limits.feedback_rows
            )
        remove_moved_aside(self.state, limits.feedback_s)
        return in_vain

    def history(self, model: str) -> list[dict[str, Any]]:
        """The last windows of a model that were closed, the newest first: their judgement, and whether a proposal was written.

        Later calls give the same judgements: they are not to be changed.
        """
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT id, opened, closed, num_rows, drifted, proposal = 2 FROM windows WHERE model = ? AND closed IS NOT NULL "
                "ORDER BY closed DESC, id DESC LIMIT ?",
                (model, _HISTORY),
            ).fetchall()
            # Asked for every few seconds, and long: each is parsed once.
            self._judgements = {
                key: self._judgements[key]
                if key in self._judgements
                else json.loads(
                    connection.execute(
                        "SELECT judgement FROM windows WHERE id = ?", key[:1]
                    ).fetchone()[0]
                )
                for key in ((row[0], row[2]) for row in rows)
            }
        names = ("opened", "closed", "rows", "drifted", "has_proposal")
        return [
            dict(zip(names, row[1:], strict=True)) | {"judgement": self._judgements[row[0], row[2]]}
            for row in rows
        ]

    def open_rows(self, model: str) -> tuple[float, int] | None:
        """Since when the open window of a model takes rows, and how many it has."""
        with self._database.transaction() as connection:
            found: tuple[float, int] | None = connection.execute(
                "SELECT opened, num_rows FROM windows WHERE model = ? AND closed IS NULL", (model,)
            ).fetchone()
        return found

    def joined(self, model: str, most: int) -> list[tuple[str | float, str | float]]:
        """(truth, prediction) of the last joined items of a model: labels or numbers, the newest first."""
        with self._database.transaction() as connection:
            rows: list[tuple[str | float, str | float]] = connection.execute(
                "SELECT coalesce(label, value), coalesce(predicted_label, predicted_value) FROM truths "
                "WHERE model = ? AND (label IS NULL) = (predicted_label IS NULL) ORDER BY joined DESC LIMIT ?",
                (model, most),
            ).fetchall()
        return rows

    def quality(self, model: str) -> tuple[dict[str, Any] | None, float | None]:
        """What was measured last of a model, and, where truths were joined since then, the time of the last."""
        with self._database.transaction() as connection:
            found = connection.execute(
                "SELECT content, latest FROM quality WHERE model = ?", (model,)
            ).fetchone()
            (latest,) = connection.execute(
                "SELECT max(joined) FROM truths WHERE model = ?", (model,)
            ).fetchone()
        content = json.loads(found[0]) if found else None
        return content, latest if latest is not None and (
            found is None or latest > found[1]
        ) else None

    def write_quality(self, model: str, content: dict[str, Any], latest: float) -> None:
        """Keep what was measured, for the other workers and the next start."""
        with self._database.transaction() as connection:
            row = (model, time.time(), latest, json.dumps(content, allow_nan=False))
            connection.execute("INSERT OR REPLACE INTO quality VALUES (?, ?, ?, ?)", row)
            connection.execute(
                "DELETE FROM quality WHERE model NOT IN (SELECT model FROM quality ORDER BY time DESC LIMIT 50)"
            )

    def proposals_due(self) -> list[tuple[int, str, float, float, int, dict[str, Any]]]:
        """(id, model, opened, closed, rows, judgement) of the windows whose proposal is not written yet."""
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT id, model, opened, closed, num_rows, judgement FROM windows WHERE proposal = 1 ORDER BY id"
            ).fetchall()
        return [(*row[:5], json.loads(row[5])) for row in rows]

    def proposal_written(self, window: int) -> None:
        """Nobody has to write it any more."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE windows SET proposal = 2 WHERE id = ?", (window,))

    def _is_merged(self, connection: sqlite3.Connection, part: Part) -> bool:
        found = connection.execute(
            "SELECT sequence FROM parts WHERE worker = ?", (self._worker,)
        ).fetchone()
        return found is not None and found[0] >= part.sequence

    def _close_if_due(
        self,
        connection: sqlite3.Connection,
        version: str,
        model: Watched,
        now: float,
        merged: Merged,
    ) -> None:
        row = connection.execute(
            "SELECT id, since, num_rows, content FROM windows WHERE model = ? AND closed IS NULL",
            (version,),
        ).fetchone()
        if row is None:
            return
        window_id, since, num_rows, content = row
        is_old = now - since >= self._limits.window_s
        if num_rows < self._limits.window_rows and not is_old:
            return
        try:
            judgement = model.judge(
                model.load(content),
                max(self._seconds_of_budget(connection, version, since, now), 1.0),
            )
            text = json.dumps(judgement, allow_nan=False)
        except Exception as error:  # whatever is wrong with it, another attempt would find the same
            merged.errors.append(error)
            _close(connection, window_id, now, None, _fault(error))
            return
        if judgement is None:
            if is_old:
                connection.execute("UPDATE windows SET since = ? WHERE id = ?", (now, window_id))
                merged.closed.append(Closed(version, num_rows, None, True, {}))
            return
        drifted = bool(judgement["drifted"])
        _close(connection, window_id, now, drifted, text)
        merged.closed.append(Closed(version, num_rows, drifted, False, judgement))

    def _seconds_of_budget(
        self, connection: sqlite3.Connection, version: str, since: float, now: float
    ) -> float:
        """Whose share of false alarms a window may spend that ends now: since the one before ended, but of no more than a whole window.

        These times do not overlap. By its own rows alone, a window that a burst fills would have next to no share, and find nothing.
        """
        (previous,) = connection.execute(
            "SELECT max(closed) FROM windows WHERE model = ? AND closed IS NOT NULL", (version,)
        ).fetchone()
        return min(now - (since if previous is None else previous), self._limits.window_s)


def _add(
    connection: sqlite3.Connection,
    version: str,
    window: Window,
    model: Watched,
    begun: float,
    merged: Merged,
) -> None:
    """Merge rows, the first of them not before `begun`, into the open window of a model, or begin one."""
    found = connection.execute(
        "SELECT id, content, opened FROM windows WHERE model = ? AND closed IS NULL", (version,)
    ).fetchone()
    if found is not None:
        try:
            whole = model.load(found[1])
            whole.merge(window)
        except Exception as error:  # of another version of this code: what it holds cannot be used, the rows at hand can
            merged.errors.append(error)
            _close(connection, found[0], time.time(), None, _fault(error))
        else:
            row = (whole.num_rows, whole.to_bytes(), min(found[2], begun), found[0])
            connection.execute(
                "UPDATE windows SET num_rows = ?, content = ?, opened = ? WHERE id = ?", row
            )
            return
    connection.execute(
        "INSERT INTO windows (model, opened, since, num_rows, content) VALUES (?, ?, ?, ?, ?)",
        (version, begun, begun, window.num_rows, window.to_bytes()),
    )


def _close(
    connection: sqlite3.Connection, window_id: int, now: float, drifted: bool | None, judgement: str
) -> None:
    """Close a window. A proposal is due where a model's traffic begins to drift, and once a day while it goes on."""
    (model,) = connection.execute("SELECT model FROM windows WHERE id = ?", (window_id,)).fetchone()
    previous = connection.execute(
        "SELECT drifted FROM windows WHERE model = ? AND drifted IS NOT NULL ORDER BY closed DESC, id DESC LIMIT 1",
        (model,),
    ).fetchone()
    (last,) = connection.execute(
        "SELECT max(closed) FROM windows WHERE model = ? AND proposal > 0", (model,)
    ).fetchone()
    is_news = previous is None or not previous[0] or last is None or now - last >= _DAY_S
    connection.execute(
        "UPDATE windows SET closed = ?, drifted = ?, judgement = ?, proposal = ? WHERE id = ?",
        (now, drifted, judgement, int(bool(drifted) and is_news), window_id),
    )


def _fault(error: Exception) -> str:
    return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _remember(connection: sqlite3.Connection, predictions: Sequence[Prediction]) -> None:
    rows = [
        (one.request_id, one.item, one.num_items, one.time, one.model, one.label, one.value)
        for one in predictions
    ]
    begin = 0
    while begin < len(rows):
        # Powers of two: Python keeps the last 128 different statements, and one of hundreds of rows is large.
        num_rows = min(_ROWS_AT_ONCE, 1 << (len(rows) - begin).bit_length() - 1)
        some = rows[begin : begin + num_rows]
        begin += num_rows
        places = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * num_rows)
        connection.execute(
            f"INSERT INTO predictions VALUES {places} ON CONFLICT DO UPDATE SET num_items = excluded.num_items, "
            "model = excluded.model, label = excluded.label, value = excluded.value",
            list(itertools.chain.from_iterable(some)),
        )


def _join(connection: sqlite3.Connection, since: float, now: float, merged: Merged) -> None:
    """Give truths the predictions that are there now, none of which is from before `since`: those that waited, and those of an id that
    came again, which were joined to an answer before the right one.
    """
    found = connection.execute(
        "SELECT truths.request_id, truths.item, truths.model IS NULL, NOT truths.names_item AND one.num_items > 1, "
        "truths.label, one.model, one.time, one.label, one.value FROM truths CROSS JOIN predictions AS one "
        "ON one.request_id = truths.request_id AND one.item = truths.item "
        f"AND one.time = {_ANSWER_TIME.format(request_id='truths.request_id', told='truths.told')} "
        "WHERE truths.told >= ? AND truths.answered IS NOT one.time",
        (since - EARLY_S,),
    ).fetchall()
    for request_id, item, has_waited, is_ambiguous, label, *prediction in found:
        if is_ambiguous:
            connection.execute(
                "DELETE FROM truths WHERE request_id = ? AND item = ?", (request_id, item)
            )
            merged.num_ambiguous += 1
            continue
        connection.execute(
            "UPDATE truths SET joined = ?, model = ?, answered = ?, predicted_label = ?, predicted_value = ? "
            "WHERE request_id = ? AND item = ?",
            (now, *prediction, request_id, item),
        )
        merged.num_joined += has_waited
        model, _, predicted, _ = prediction
        if label is not None and label != predicted:
            merged.wrong.append(model)


def _tell(connection: sqlite3.Connection, position: int, truth: Told, now: float) -> Heard:
    key = {"request_id": truth.request_id, "item": truth.item or 0}
    prediction = connection.execute(
        "SELECT model, time, label, value, num_items FROM predictions WHERE request_id = :request_id AND item = :item "
        f"AND time = {_ANSWER_TIME.format(request_id=':request_id', told=':told')}",
        key | {"told": now},
    ).fetchone()
    if prediction is not None and truth.item is None and prediction[-1] > 1:
        raise ItemNeededError(position, prediction[-1])
    before = connection.execute(
        "SELECT model, answered, predicted_label, predicted_value FROM truths WHERE request_id = :request_id AND item = :item",
        key,
    ).fetchone()
    # Told again when its prediction is forgotten, it stays joined to that.
    model, answered, label, value = (
        prediction[:-1] if prediction is not None else before or (None, None, None, None)
    )
    connection.execute(
        "INSERT OR REPLACE INTO truths VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *key.values(),
            truth.item is not None,
            now,
            truth.label,
            truth.value,
            model and now,
            model,
            answered,
            label,
            value,
        ),
    )
    is_wrong = model is not None and truth.label is not None and label != truth.label
    return Heard(
        joined=model is not None, duplicate=before is not None, model=model, is_wrong=is_wrong
    )


def _keep_newest(
    connection: sqlite3.Connection, table: str, time_column: str, kind: str, most: int
) -> int:
    """Of the rows of a kind; how many were removed."""
    key = f"{time_column}, request_id, item"  # many rows have one time
    order = f"{time_column} DESC, request_id DESC, item DESC"
    found = connection.execute(
        f"SELECT {key} FROM {table} WHERE {kind} ORDER BY {order} LIMIT 1 OFFSET ?", (most - 1,)
    ).fetchone()
    if found is None:
        return 0
    return connection.execute(
        f"DELETE FROM {table} WHERE {kind} AND ({key}) < (?, ?, ?)", found
    ).rowcount
