"""Delivers predictions and labels from this service to the database at SLIPWAY_DATABASE_URL.

They are written to the outbox, a table of the local database, and a thread delivers them. So
PostgreSQL never delays a response, and accepted labels survive its faults. A row is deleted here
after the commit there. If that result is lost, the row is delivered again, and its key shows that
it was there: it counts once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipway.serving.models.model import ServedModel
from slipway.serving.monitoring.database import Database
from slipway.serving.monitoring.labels import (
    FeedbackItem,
    ItemNeededError,
    Prediction,
    delete_old_labels,
    insert_label,
    insert_predictions,
    join_labels,
    joined_labels,
    read_outbox,
)
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.quality import NUM_JUDGED, compare, measure_joined
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Store
from slipway.serving.process.rounds import Rounds
from slipway.serving.settings import Settings
from slipway.system import files
from slipway.traffic.monitoring_records import FEEDBACK_SCHEMA
from slipway.traffic.postgres import SharedDatabase, SqlConnection

TIDY_S = 60.0
_LOCK = "outbox.lock"
_BATCH_ROWS = 5000
_WRITES = "a delivery to SLIPWAY_DATABASE_URL"


@dataclass
class Delivered:
    """The effects of one delivery on the labels in the database."""

    num_joined: int = 0
    num_duplicates: int = 0
    num_ambiguous: int = 0
    wrong_models: list[str] = field(default_factory=list)  # versions, once per wrong label


def deliver(
    connection: SqlConnection,
    predictions: Sequence[Prediction],
    labels: Sequence[tuple[FeedbackItem, float]],
    now: float,
) -> Delivered:
    """Store what the database lacks, and join labels and predictions.

    Args:
        labels: labels with the times when they arrived; the latest label of an item counts.
    """
    done = Delivered()
    if predictions:
        unique = {(one.request_id, one.time, one.item): one for one in predictions}
        insert_predictions(connection, list(unique.values()))
        joins = join_labels(connection, min(one.time for one in predictions), now)
        done.num_joined, done.num_ambiguous = joins.num_joined, joins.num_ambiguous
        done.wrong_models += joins.wrong_models
    for item, received in labels:
        stored = connection.execute(
            "SELECT received FROM labels WHERE request_id = ? AND item = ?",
            (item.request_id, item.item or 0),
        ).fetchone()
        if stored is not None and stored[0] >= received:
            continue  # the label was delivered before, or another service sent a later one
        try:
            result = insert_label(connection, 0, item, received, joined=now)
        except ItemNeededError:
            done.num_ambiguous += 1
            continue
        done.num_duplicates += result.duplicate
        done.num_joined += result.joined and not result.duplicate
        if result.is_wrong and result.model:
            done.wrong_models.append(result.model)
    return done


class Forwarder:
    """Delivers the outbox of this service to the database; only one worker does so at a time.

    `current` returns the model for new requests. `report_wrong` is called with the version of each
    model whose prediction a label proved wrong.
    """

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        metrics: MonitoringMetrics,
        current: Callable[[], ServedModel | None],
        report_wrong: Callable[[str], None],
    ) -> None:
        assert limits.database_url is not None
        self._limits, self._metrics = limits, metrics
        self._current, self._report_wrong = current, report_wrong
        self._state = settings.state
        self._outbox = Database(settings.state)
        self._store = Store(settings.state, limits)
        self._shared = SharedDatabase(limits.database_url, FEEDBACK_SCHEMA)
        self._measured: dict[str, float] = {}  # time of the latest measured label, by model
        self._tidied = time.monotonic()
        self.rounds = Rounds(  # the last one delivers the rest
            "slipway-outbox",
            self.work_once,
            lambda: metrics.fault("database"),
            self._end,
            failing="cannot deliver feedback to SLIPWAY_DATABASE_URL; it waits in "
            "SLIPWAY_STATE and predictions continue",
            working="feedback is delivered to SLIPWAY_DATABASE_URL again",
        )

    def _end(self) -> None:
        self._shared.close()
        self._store.close()
        self._outbox.close()

    def work_once(self) -> None:
        """Deliver the outbox, delete old rows and measure quality.

        Raises LockedError if another does.
        """
        with files.lock(self._state / _LOCK, _WRITES):
            while self._deliver_batch():
                pass
            if time.monotonic() - self._tidied > TIDY_S:
                self._tidy()
                self._tidied = time.monotonic()
            self._measure()

    def _deliver_batch(self) -> bool:
        """Deliver the oldest entries. Returns True if there were any."""
        with self._outbox.transaction() as connection:
            entries = read_outbox(connection, _BATCH_ROWS)
        if not entries:
            return False
        predictions = [
            Prediction(*row) for _, kind, rows in entries if kind == "predictions" for row in rows
        ]
        labels = [
            (FeedbackItem(*row), received)
            for _, kind, rows in entries
            if kind == "labels"
            for *row, received in rows
        ]
        with self._shared.transaction() as shared:
            done = deliver(shared, predictions, labels, time.time())
        with self._outbox.transaction() as connection:
            connection.execute("DELETE FROM outbox WHERE id <= ?", (entries[-1][0],))
        self._metrics.feedback["joined"].inc(done.num_joined)
        self._metrics.feedback["duplicate"].inc(done.num_duplicates)
        self._metrics.feedback["invalid"].inc(done.num_ambiguous)
        for version in done.wrong_models:
            self._report_wrong(version)
        return True

    def _tidy(self) -> None:
        """Delete old rows. Labels are stored as long as predictions, which may arrive late."""
        limits = self._limits
        with self._shared.transaction() as shared:
            num_unknown = delete_old_labels(
                shared, limits.feedback_s, limits.feedback_s, limits.feedback_rows, time.time()
            )
        self._metrics.feedback["unknown_request"].inc(num_unknown)

    def _measure(self) -> None:
        """Measure quality on the labels of all services, for the gauges of this service."""
        served = self._current()
        if served is None:
            return
        version, manifest = served.bundle.version, served.bundle.manifest
        with self._shared.transaction() as shared:
            (latest,) = shared.execute(
                "SELECT max(joined) FROM labels WHERE model = ?", (version,)
            ).fetchone()
            if latest is None or latest == self._measured.get(version):
                return
            joined = joined_labels(shared, version, NUM_JUDGED)
        content = compare(manifest, measure_joined(manifest, joined))
        self._store.write_quality(version, content, latest)
        self._measured = {version: latest}
