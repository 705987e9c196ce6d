"""The monitoring database: shared drift windows, predictions, labels and measured quality.

Each worker's rows are merged exactly once: a part has a sequence number, which the transaction that
merges it stores. So a part whose result was lost is not merged twice. A worker that finds a window
full, or old enough, judges and closes it in the same transaction.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.drift.window import Window
from slipway.serving.monitoring.database import Database, remove_moved_aside
from slipway.serving.monitoring.labels import (
    FeedbackItem,
    FeedbackResult,
    Joins,
    Prediction,
    delete_old_labels,
    insert_label,
    insert_predictions,
    join_labels,
    joined_labels,
    num_waiting,
    put_labels,
    put_predictions,
)
from slipway.serving.monitoring.models import MonitoredModel
from slipway.serving.monitoring.settings import Limits

MAX_WINDOWS = 500  # most closed windows, over all models
PENDING_S = 3600.0  # a label waits this long for a prediction that another worker still holds
_DAY_S = 86400.0
_MAX_OPEN_S = 7 * _DAY_S  # longest time that a window stays open, or ten window lengths
_HISTORY = 48  # number of windows in the status
_MAX_QUALITIES = 50  # number of models whose measured quality is kept


@dataclass
class Part:
    """The traffic that one worker collected since its last merge."""

    sequence: int
    windows: dict[str, Window] = field(default_factory=dict)  # windows by model key
    predictions: list[Prediction] = field(default_factory=list)
    # For each model key, a time before which no row was answered; seconds since 1970.
    opened: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.predictions and not any(window.num_rows for window in self.windows.values())


@dataclass(frozen=True)
class ClosedWindow:
    """A drift window and its verdict; `drifted` is None if it stays open, with too few rows."""

    model: str
    num_rows: int
    drifted: bool | None
    judgement: dict[str, Any]


@dataclass
class MergeResult:
    """The effects of merging one part, and the processor time that it took."""

    closed: list[ClosedWindow] = field(default_factory=list)
    joins: Joins = field(default_factory=Joins)
    num_dropped: int = 0  # oldest predictions for the database of several services
    windows_s: float = 0.0  # processor time of merging and judging windows
    seconds: float = 0.0  # processor time of the whole transaction
    errors: list[Exception] = field(default_factory=list)  # windows closed without a verdict


class Store:
    """Monitoring database, for one thread.

    Methods raise sqlite3.Error or OSError if the database is unusable; nothing has changed then.
    """

    def __init__(self, state: Path, limits: Limits) -> None:
        self.state = state
        self._limits = limits
        self._database = Database(state)
        self._worker = secrets.token_hex(8)
        # Parsed once, since /status reads them every few seconds. The key has the closing time
        # because a new database counts its windows from 1 again.
        self._judgements: dict[tuple[int, float], dict[str, Any]] = {}

    def close(self) -> None:
        self._database.close()

    def merge(self, part: Part, models: Mapping[str, MonitoredModel]) -> MergeResult:
        """Merge a part, unless it was merged before; join labels, and close full or old windows."""
        result, started = MergeResult(), time.thread_time()
        with self._database.transaction() as connection:
            now = time.time()  # inside the transaction: no other worker writes
            if not self._is_merged(connection, part):
                for key, window in part.windows.items():
                    if window.num_rows:
                        opened = min(now, part.opened.get(key, now))
                        _merge_window(connection, key, window, models[key], opened, result)
                result.windows_s = time.thread_time() - started
                if part.predictions and self._limits.database_url:
                    result.num_dropped = put_predictions(
                        connection, part.predictions, self._limits.feedback_rows
                    )
                elif part.predictions:
                    insert_predictions(connection, part.predictions)
                    since = min(prediction.time for prediction in part.predictions)
                    result.joins = join_labels(connection, since, now)
                connection.execute(
                    "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)",
                    (self._worker, part.sequence, now),
                )
            closing_started = time.thread_time()
            for key, model in models.items():
                self._close_if_due(connection, key, model, now, result)
            result.windows_s += time.thread_time() - closing_started
        result.seconds = time.thread_time() - started
        return result

    def add_feedback(self, items: Sequence[FeedbackItem]) -> list[FeedbackResult]:
        """Store all labels, or none if one cannot be stored.

        Raises ItemNeededError for one that does not name its item, and OutboxFullError if too many
        labels wait for the database of several services.
        """
        with self._database.transaction() as connection:
            now = time.time()  # inside the transaction: `quality` looks for later labels only
            if self._limits.database_url:
                put_labels(connection, items, now, self._limits.feedback_rows)
                return [FeedbackResult(joined=False, duplicate=False) for _ in items]
            return [
                insert_label(connection, position, item, now) for position, item in enumerate(items)
            ]

    def tidy(self) -> int:
        """Delete old and surplus entries; return the number of labels that were never joined."""
        now, limits = time.time(), self._limits
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM windows WHERE closed IS NOT NULL AND id NOT IN "
                "(SELECT id FROM windows WHERE closed IS NOT NULL ORDER BY closed DESC LIMIT ?)",
                (MAX_WINDOWS,),
            )
            connection.execute(
                "DELETE FROM windows WHERE closed IS NULL AND since < ?",
                (now - max(_MAX_OPEN_S, 10 * limits.window_s),),
            )
            connection.execute("DELETE FROM parts WHERE time < ?", (now - _DAY_S,))
            num_unknown = delete_old_labels(
                connection, limits.feedback_s, PENDING_S, limits.feedback_rows, now
            )
        remove_moved_aside(self.state, limits.feedback_s)
        return num_unknown

    def history(self, model: str) -> list[dict[str, Any]]:
        """Return the last closed windows of a model with their judgements, newest first.

        Do not change the judgements: later calls return the same objects.
        """
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT id, opened, closed, num_rows, drifted, proposal = 2 FROM windows "
                "WHERE model = ? AND closed IS NOT NULL ORDER BY closed DESC, id DESC LIMIT ?",
                (model, _HISTORY),
            ).fetchall()
            known, self._judgements = self._judgements, {}
            for window_id, _, closed, *_ in rows:
                judgement = known.get((window_id, closed))
                if judgement is None:
                    (text,) = connection.execute(
                        "SELECT judgement FROM windows WHERE id = ?", (window_id,)
                    ).fetchone()
                    judgement = json.loads(text)
                self._judgements[window_id, closed] = judgement
        names = ("opened", "closed", "rows", "drifted", "has_proposal")
        return [
            dict(zip(names, row[1:], strict=True)) | {"judgement": self._judgements[row[0], row[2]]}
            for row in rows
        ]

    def open_window(self, model: str) -> tuple[float, int] | None:
        """Return the opening time and row count of a model's open window."""
        with self._database.transaction() as connection:
            found: tuple[float, int] | None = connection.execute(
                "SELECT opened, num_rows FROM windows WHERE model = ? AND closed IS NULL", (model,)
            ).fetchone()
        return found

    def joined(self, model: str, max_rows: int) -> list[tuple[str | float, str | float]]:
        """Return (truth, prediction) of the last joined items of a model, newest first.

        Rows that the label queue chose for their difficulty are left out.
        """
        with self._database.transaction() as connection:
            return joined_labels(connection, model, max_rows)

    def quality(self, model: str) -> tuple[dict[str, Any] | None, float | None]:
        """Return the last measured quality, and the time of a label joined later, if any."""
        with self._database.transaction() as connection:
            found = connection.execute(
                "SELECT content, latest FROM quality WHERE model = ?", (model,)
            ).fetchone()
            (latest,) = connection.execute(
                "SELECT max(joined) FROM labels WHERE model = ?", (model,)
            ).fetchone()
        if found is None:
            return None, latest
        is_new = latest is not None and latest > found[1]
        return json.loads(found[0]), latest if is_new else None

    def write_quality(self, model: str, content: dict[str, Any], latest: float) -> None:
        row = (model, time.time(), latest, json.dumps(content, allow_nan=False))
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO quality VALUES (?, ?, ?, ?)", row)
            connection.execute(
                "DELETE FROM quality WHERE model NOT IN "
                "(SELECT model FROM quality ORDER BY time DESC LIMIT ?)",
                (_MAX_QUALITIES,),
            )

    def num_waiting(self) -> int | None:
        """Return the number of rows that wait for the shared database; None without one."""
        if not self._limits.database_url:
            return None
        with self._database.transaction() as connection:
            return num_waiting(connection, "%")

    def proposals_due(self) -> list[tuple[int, str, float, float, int, dict[str, Any]]]:
        """Return (id, model, opened, closed, rows, judgement) of windows without their proposal."""
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT id, model, opened, closed, num_rows, judgement FROM windows "
                "WHERE proposal = 1 ORDER BY id"
            ).fetchall()
        return [(*row[:5], json.loads(row[5])) for row in rows]

    def mark_proposal_written(self, window_id: int) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE windows SET proposal = 2 WHERE id = ?", (window_id,))

    def _is_merged(self, connection: sqlite3.Connection, part: Part) -> bool:
        found = connection.execute(
            "SELECT sequence FROM parts WHERE worker = ?", (self._worker,)
        ).fetchone()
        return found is not None and found[0] >= part.sequence

    def _close_if_due(
        self,
        connection: sqlite3.Connection,
        key: str,
        model: MonitoredModel,
        now: float,
        result: MergeResult,
    ) -> None:
        row = connection.execute(
            "SELECT id, since, num_rows, content FROM windows WHERE model = ? AND closed IS NULL",
            (key,),
        ).fetchone()
        if row is None:
            return
        window_id, since, num_rows, content = row
        is_old = now - since >= self._limits.window_s
        if num_rows < self._limits.window_rows and not is_old:
            return
        try:
            seconds = max(self._budget_seconds(connection, key, since, now), 1.0)
            judgement = model.judge(model.load(content), seconds)
            text = json.dumps(judgement, allow_nan=False)
        except Exception as error:  # another attempt would fail in the same way
            result.errors.append(error)
            _close(connection, window_id, now, None, _error_text(error))
            return
        if judgement is None:
            if is_old:
                connection.execute("UPDATE windows SET since = ? WHERE id = ?", (now, window_id))
                result.closed.append(ClosedWindow(key, num_rows, None, {}))
            return
        drifted = bool(judgement["drifted"])
        _close(connection, window_id, now, drifted, text)
        result.closed.append(ClosedWindow(key, num_rows, drifted, judgement))

    def _budget_seconds(
        self, connection: sqlite3.Connection, key: str, since: float, now: float
    ) -> float:
        """Return the time whose false-alarm budget the window may spend.

        The time starts when the previous window closed, and is at most one window length, so these
        times never overlap. Counted from its own first row, a window filled by a burst would have
        almost no budget and detect nothing.
        """
        (previous,) = connection.execute(
            "SELECT max(closed) FROM windows WHERE model = ? AND closed IS NOT NULL", (key,)
        ).fetchone()
        return min(now - (since if previous is None else previous), self._limits.window_s)


def _merge_window(
    connection: sqlite3.Connection,
    key: str,
    window: Window,
    model: MonitoredModel,
    opened: float,
    result: MergeResult,
) -> None:
    """Merge rows, predicted at `opened` or later, into the model's open window, or open one."""
    found = connection.execute(
        "SELECT id, content, opened FROM windows WHERE model = ? AND closed IS NULL", (key,)
    ).fetchone()
    if found is not None:
        window_id, content, opened_before = found
        try:
            total = model.load(content)
            total.merge(window)
        except Exception as error:  # another version wrote it; the new rows are still usable
            result.errors.append(error)
            _close(connection, window_id, time.time(), None, _error_text(error))
        else:
            connection.execute(
                "UPDATE windows SET num_rows = ?, content = ?, opened = ? WHERE id = ?",
                (total.num_rows, total.to_bytes(), min(opened_before, opened), window_id),
            )
            return
    connection.execute(
        "INSERT INTO windows (model, opened, since, num_rows, content) VALUES (?, ?, ?, ?, ?)",
        (key, opened, opened, window.num_rows, window.to_bytes()),
    )


def _close(
    connection: sqlite3.Connection, window_id: int, now: float, drifted: bool | None, judgement: str
) -> None:
    """Close a window. A proposal becomes due when drift begins, and daily while it lasts."""
    (model,) = connection.execute("SELECT model FROM windows WHERE id = ?", (window_id,)).fetchone()
    previous = connection.execute(
        "SELECT drifted FROM windows WHERE model = ? AND drifted IS NOT NULL "
        "ORDER BY closed DESC, id DESC LIMIT 1",
        (model,),
    ).fetchone()
    (last_proposal,) = connection.execute(
        "SELECT max(closed) FROM windows WHERE model = ? AND proposal > 0", (model,)
    ).fetchone()
    drift_begins = previous is None or not previous[0]
    is_day_old = last_proposal is None or now - last_proposal >= _DAY_S
    needs_proposal = bool(drifted) and (drift_begins or is_day_old)
    connection.execute(
        "UPDATE windows SET closed = ?, drifted = ?, judgement = ?, proposal = ? WHERE id = ?",
        (now, drifted, judgement, int(needs_proposal), window_id),
    )


def _error_text(error: Exception) -> str:
    return json.dumps({"error": f"{type(error).__name__}: {error}"})
