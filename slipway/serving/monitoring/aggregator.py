"""Aggregates the traffic of one worker for the shared drift windows, within a CPU budget.

The monitoring thread shares the interpreter with the event loop, so each microsecond it takes is
lost there. A budget in processor time holds for any model, input size and load; a budget in rows
would not. Rows beyond the budget are skipped at random and counted.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.label_sets import named_label
from slipway.serving.monitoring.labels import Prediction
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.models import MonitoredModel
from slipway.serving.monitoring.queue import TrafficGroup
from slipway.serving.monitoring.store import MergeResult, Part

MAX_PREDICTIONS = 20_000  # most predictions that are held while the database is unusable
# Fractions of one core, for drift features and for predictions.
FEATURES_BUDGET, RECORDS_BUDGET = 0.005, 0.0025
BURST_S = 0.1  # processor time that may be spent at once
# Rows whose features are computed at once: the event loop waits for no longer.
_CHUNK_ROWS = 64
_CHUNK_BYTES = 2 << 20
_CHUNK_REQUESTS = 256


class ProcessorBudget:
    """Budget of one thread: `fraction` of a core over time, and at most `burst_s` seconds at once.

    Work is divided into small pieces. A piece may start while any budget is left, so the budget is
    overdrawn by one piece at most, which later time repays.
    """

    def __init__(
        self,
        fraction: float,
        burst_s: float,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._fraction = fraction
        self._burst_s = burst_s
        self._clock, self._thread_clock = clock, thread_clock
        self._balance_s = burst_s
        self._updated = clock()

    def is_left(self) -> bool:
        """Return True if another piece of work may start."""
        now = self._clock()
        earned_s = (now - self._updated) * self._fraction
        self._balance_s = min(self._burst_s, self._balance_s + earned_s)
        self._updated = now
        return self._balance_s > 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Subtract the processor time of the block."""
        started = self._thread_clock()
        try:
            yield
        finally:
            self.charge(self._thread_clock() - started)

    def charge(self, seconds: float) -> None:
        """Subtract processor time that was spent elsewhere."""
        self._balance_s -= seconds


class TrafficAggregator:
    """Rows and predictions of this worker that are not yet merged into the database."""

    def __init__(self, metrics: MonitoringMetrics, part_rows: int) -> None:
        self._metrics = metrics
        self._part_rows = part_rows  # a window with more rows is merged at once
        self._part = Part(sequence=1)
        self._frozen: Part | None = None  # part handed to the database, result unknown
        self._features_budget = ProcessorBudget(FEATURES_BUDGET, BURST_S)
        self._records_budget = ProcessorBudget(RECORDS_BUDGET, BURST_S)
        self._random = np.random.default_rng()

    @property
    def is_empty(self) -> bool:
        """True if the current part has no rows; a frozen part may be left."""
        return self._part.is_empty

    @property
    def is_merged(self) -> bool:
        """True if every row is in the database."""
        return self._frozen is None and self._part.is_empty

    def add_features(
        self, model: MonitoredModel, group: TrafficGroup, merge: Callable[[], None]
    ) -> int:
        """Add drift features of the group's rows, in random order, until the budget is spent.

        Calls `merge` when the window has grown to its limit. Returns the number of added rows.
        """
        if model.reference is None:
            return 0
        ends = np.cumsum([0, *(len(one.answers) for one in group.answered)])[1:]
        order = self._random.permutation(int(ends[-1]) if len(ends) else 0)
        num_added = 0
        for rows in _chunks(group, order):
            if not self._features_budget.is_left():
                break
            with self._features_budget.spending():
                num_rows = self._add(model, group, rows, ends)
            num_added += len(rows)
            if num_rows >= self._part_rows:
                merge()
        self._metrics.rows["skipped"].inc(group.counts.num_rows - num_added)
        return num_added

    def add_predictions(self, model: MonitoredModel, group: TrafficGroup) -> int:
        """Add the group's predictions, by request in random order, until the budget is spent.

        Returns the number of added rows.
        """
        order = self._random.permutation(len(group.answered))
        predictions = self._part.predictions
        num_before = len(predictions)
        for start in range(0, len(order), _CHUNK_REQUESTS):
            if not self._records_budget.is_left() or len(predictions) >= MAX_PREDICTIONS:
                break
            with self._records_budget.spending():
                for place in order[start : start + _CHUNK_REQUESTS].tolist():
                    predictions += _predictions(model, group, place)
        return len(predictions) - num_before

    def freeze(self) -> Part:
        """Return the part to merge: an earlier one that may not be merged, else the current."""
        if self._frozen is None:
            self._frozen, self._part = self._part, Part(self._part.sequence + 1)
        return self._frozen

    def release(self, result: MergeResult) -> None:
        """Drop the frozen part after its merge, and subtract the processor time of the merge."""
        self._features_budget.charge(result.windows_s)
        self._records_budget.charge(result.seconds - result.windows_s)
        self._frozen = None

    def _add(
        self,
        model: MonitoredModel,
        group: TrafficGroup,
        rows: NDArray[np.intp],
        ends: NDArray[np.intp],
    ) -> int:
        """Add rows to the window and return its size; `ends` are the end positions of requests."""
        requests = np.searchsorted(ends, rows, side="right")
        places = [
            (group.answered[request], row - ends[request])
            for request, row in zip(requests.tolist(), rows, strict=True)
        ]
        inputs = np.stack([one.inputs[item] for one, item in places])
        outputs = np.array([one.rows[item][0] for one, item in places], np.float32)
        scores = np.array([one.rows[item][1] for one, item in places], np.float32)
        window = self._part.windows.get(model.key) or model.window()
        window.add(model.features(inputs, outputs, scores))
        self._part.windows[model.key] = window
        self._part.opened.setdefault(model.key, group.opened)
        self._metrics.rows["monitored"].inc(len(rows))
        return window.num_rows


def _chunks(group: TrafficGroup, order: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    if len(order):
        row_bytes = max(1, group.answered[0].inputs[0].nbytes)
        size = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // row_bytes))
        yield from np.split(order, range(size, len(order), size))


def _predictions(model: MonitoredModel, group: TrafficGroup, place: int) -> list[Prediction]:
    answered, moment = group.answered[place], group.moments[place]
    return [
        Prediction(
            answered.request_id,
            item,
            len(answered.answers),
            moment,
            model.version,
            named_label(answer),
            answer.get("value"),
        )
        for item, answer in enumerate(answered.answers)
    ]
