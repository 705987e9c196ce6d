"""The monitoring thread of a worker: counts traffic, detects drift, and stores predictions.

It never delays or fails a request. If the queue is full, rows are dropped. If processor time is
short, rows are sampled. If the disk, the database or the code fails, the failure is counted and
logged once, and the step retried. Every few seconds the worker merges its traffic into the database
that all workers share, so a killed worker loses a few seconds at most.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import LoadedBundle
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import Noted
from slipway.serving.monitoring.aggregator import TrafficAggregator
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.models import MonitoredModel, model_key
from slipway.serving.monitoring.proposals import write_proposal
from slipway.serving.monitoring.quality import NUM_JUDGED, compare, measure_joined
from slipway.serving.monitoring.queue import TrafficGroup, TrafficQueue
from slipway.serving.monitoring.sampling import RowCounts
from slipway.serving.monitoring.settings import MonitoringSettings
from slipway.serving.monitoring.status import describe_drift, describe_feedback, gauge_values
from slipway.serving.monitoring.store import ClosedWindow, Store
from slipway.serving.settings import Settings
from slipway.system.disk_faults import disk_fault

logger = logging.getLogger("bentoml.slipway")

GATHER_S = 0.2  # pause between two rounds
MERGE_S = 2.0  # time between two merges; a killed worker loses at most this time and one round
REFRESH_S = 2.0  # time between two updates of gauges and status
TIDY_S = 60.0
CLOSE_S = 5.0  # longest time that the end of a worker waits for the thread
_MAX_MODELS = 8  # models whose references stay in memory
_PARTS_OF_A_WINDOW = 4  # at least, so that windows end on time
# Label of slipway_monitoring_errors_total for each step. Database errors are always "state".
_FAULT_LABELS = {
    "gathering": "collect",
    "counting": "collect",
    "recording": "collect",
    "reference": "features",
    "features": "features",
    "merging": "state",
    "tidying": "state",
    "refreshing": "state",
    "judging": "judge",
    "quality": "quality",
    "proposals": "proposal",
}


class TrafficMonitor:
    """Observes answered requests.

    `current` returns the model that answers new requests. `report_wrong` is called with the version
    of a model whose prediction a label proved wrong, if the label arrived before the prediction was
    stored.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: MonitoringMetrics,
        current: Callable[[], ServedModel | None],
        report_wrong: Callable[[str], None],
    ) -> None:
        self._state = settings.state
        self._metrics = metrics
        self._current, self._report_wrong = current, report_wrong
        self._section = settings.section(MonitoringSettings)
        window_rows = self._section.window_rows
        part_rows = max(1, window_rows // (_PARTS_OF_A_WINDOW * settings.workers))
        self.queue = TrafficQueue()
        self._aggregator = TrafficAggregator(metrics, part_rows)
        self._store = Store(settings.state, self._section.limits)
        self._models: dict[str, MonitoredModel] = {}  # monitored models by key
        self._failing: dict[str, str] = {}  # reason by step; each was logged
        self._due = {"merge": 0.0, "refresh": 0.0, "tidy": time.monotonic() + TIDY_S}
        self._status: dict[str, dict[str, Any]] = {
            "drift": {"state": "starting"},
            "feedback": {"state": "starting"},
        }
        self._closing = threading.Event()
        self._request_log: Path | None = None  # folder that proposals name
        self._thread = threading.Thread(target=self._work, name="slipway-monitoring", daemon=True)

    def start(self, request_log: Path | None = None) -> None:
        """Start the thread. `request_log` is the folder of the request log; None without one."""
        self._request_log = request_log
        self._thread.start()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        self.queue.offer(answered, moment)

    def close(self) -> None:
        """Merge remaining rows and end the thread, without waiting for a disk that hangs."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def drift_status(self) -> dict[str, Any]:
        """Return the open window and the last closed windows, at most seconds old."""
        return self._status["drift"] | {"faults": dict(self._failing)}

    def feedback_status(self) -> dict[str, Any]:
        """Return the quality measured by feedback, at most seconds old."""
        return self._status["feedback"]

    def _work(self) -> None:
        # Normal priority: a thread that the kernel suspends while it holds the interpreter lock
        # would stop the event loop.
        is_last = False
        while not is_last:
            is_last = self._closing.wait(GATHER_S)
            self._round(is_last)
        self._store.close()

    def _round(self, is_last: bool) -> None:
        num_offered = num_used = 0
        for model, group in self._attempt("gathering", self._gather) or []:
            self._attempt("counting", partial(self._count, model, group.counts))
            add_features = partial(
                self._aggregator.add_features, model, group, self._merge_unless_failing
            )
            num_features = self._attempt("features", add_features) or 0
            add_predictions = partial(self._aggregator.add_predictions, model, group)
            num_predictions = self._attempt("recording", add_predictions) or 0
            num_offered += group.counts.num_rows
            num_used += max(num_features, num_predictions)
        self.queue.sampler.adapt(num_offered, num_used)
        if is_last or self._is_due("merge", MERGE_S):
            self._attempt("merging", self._merge)
        if is_last:
            return
        if self._is_due("tidy", TIDY_S):
            self._attempt("tidying", self._tidy)
        if self._is_due("refresh", REFRESH_S):
            self._attempt("proposals", self._write_proposals)
            self._attempt("quality", self._measure)
            self._attempt("refreshing", self._refresh)

    def _attempt(self, step: str, work: Callable[[], Any]) -> Any:
        """Run `work` and return its result; None if it fails. A failing step is logged once."""
        try:
            result = work()
        except Exception as error:
            self._report_failure(step, error)
            return None
        if self._failing.pop(step, None):
            logger.info("monitoring: %s works again", step)
        return result

    def _report_failure(self, step: str, error: Exception) -> None:
        with suppress(Exception):  # the counter itself may need the disk that is full
            self._metrics.fault(
                "state" if isinstance(error, sqlite3.Error) else _FAULT_LABELS[step]
            )
        reason = disk_fault(error) or f"{type(error).__name__}: {error}"
        if step not in self._failing:
            logger.error("monitoring: %s failed, predictions continue: %s", step, reason)
        self._failing[step] = reason

    def _is_due(self, task: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due[task]:
            return False
        self._due[task] = now + seconds
        return True

    def _gather(self) -> list[tuple[MonitoredModel, TrafficGroup]]:
        groups, num_dropped = self.queue.gather()
        if num_dropped:
            self._metrics.rows["dropped"].inc(num_dropped)
        return [(self._model(one.counts.bundle, one.counts.variant), one) for one in groups]

    def _model(self, bundle: LoadedBundle, variant: str) -> MonitoredModel:
        key = model_key(bundle, variant)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = MonitoredModel(bundle, variant)
            self._attempt("reference", model.read_reference)
        return model

    def _count(self, model: MonitoredModel, counts: RowCounts) -> None:
        if model.has_classes:
            self._metrics.count_classes(counts.labels)
            self._metrics.count_confidences(counts.confidences, counts.confidence_sum)
        self._metrics.ood_rows.inc(counts.num_ood)
        if model.has_missing_indicators:
            num_missing = sum(model.num_missing_values(inputs) for inputs in counts.inputs)
            self._metrics.missing_values.inc(num_missing)

    def _merge_unless_failing(self) -> None:
        if "merging" not in self._failing:
            self._attempt("merging", self._merge)

    def _merge(self) -> None:
        """Merge this worker's traffic into the database, starting with a part left from earlier."""
        models = {key: model for key, model in self._models.items() if model.reference is not None}
        while models or not self._aggregator.is_merged:
            result = self._store.merge(self._aggregator.freeze(), models)
            self._aggregator.release(result)
            self._metrics.rows["dropped"].inc(result.num_dropped)
            self._metrics.feedback["joined"].inc(result.joins.num_joined)
            self._metrics.feedback["invalid"].inc(result.joins.num_ambiguous)
            for version in result.joins.wrong_models:
                self._report_wrong(version)
            for error in result.errors:
                self._report_failure("judging", error)
            for window in result.closed:
                self._report_window(window)
            if self._aggregator.is_empty:
                return

    def _report_window(self, window: ClosedWindow) -> None:
        if window.drifted is None:
            self._metrics.windows["too_small"].inc()
            return
        self._failing.pop("judging", None)
        self._metrics.windows["drifted" if window.drifted else "clean"].inc()
        self._due["refresh"] = 0.0
        if window.drifted:
            features = window.judgement["features"]
            names = [feature["name"] for feature in features if feature["drifted"]]
            logger.warning(
                "drift detected for model %s in %d rows: %s",
                window.model,
                window.num_rows,
                ", ".join(names[:5]),
            )

    def _tidy(self) -> None:
        self._metrics.feedback["unknown_request"].inc(self._store.tidy())
        if self._aggregator.is_merged:  # a model that answers again is read again
            for key in list(self._models)[:-_MAX_MODELS]:
                del self._models[key]
        self.queue.retire_counts(self._current())
        for model in self._models.values():
            if model.lacks_reference:
                self._attempt("reference", model.read_reference)

    def _write_proposals(self) -> None:
        for window_id, model, opened, closed, num_rows, judgement in self._store.proposals_due():
            path = write_proposal(
                self._state, self._request_log, model, opened, closed, num_rows, judgement
            )
            self._store.mark_proposal_written(window_id)
            logger.warning(
                "drift detected for model %s; remediation proposal written to %s", model, path
            )

    def _measure(self) -> None:
        """Measure quality after new labels. The first worker to do so stores the result for all."""
        served = self._current()
        if served is None:
            return
        version, manifest = served.bundle.version, served.bundle.manifest
        _, latest = self._store.quality(version)
        if latest is not None:
            measured = measure_joined(manifest, self._store.joined(version, NUM_JUDGED))
            self._store.write_quality(version, compare(manifest, measured), latest)

    def _refresh(self) -> None:
        served = self._current()
        if served is None:
            return
        model = self._model(served.bundle, served.selection.actual.variant)
        history = self._store.history(model.key)
        judged = [window for window in history if window["drifted"] is not None]
        quality, _ = self._store.quality(model.version)
        opened = self._store.open_window(model.key)
        num_waiting = self._store.num_waiting()
        waiting = {} if num_waiting is None else {"waiting_rows": num_waiting}
        self._status = {
            "drift": describe_drift(model, judged, opened, self._section, self._state),
            "feedback": describe_feedback(model, judged, quality) | waiting,
        }
        self._metrics.values = gauge_values(judged, quality, num_waiting or 0)
