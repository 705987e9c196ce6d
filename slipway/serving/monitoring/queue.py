"""Queues answered requests: the event loop adds them, and the monitoring thread takes them."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipway.artifacts.bundle import LoadedBundle
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import Answered, Noted, id_of, model_of, rows_of
from slipway.serving.monitoring.sampling import RequestSampler, RowCounts, RunningCounts, counted
from slipway.traffic.request_log import REPLAYED

MAX_WAITING = 8192  # most requests between two rounds
MAX_WAITING_BYTES = 64 << 20  # most bytes of their payloads and inputs
RECENT_S = 3.0  # after this time, a gathered request is stored or never will be


@dataclass
class TrafficGroup:
    """Answered requests of one model, from one call of `TrafficQueue.gather`."""

    counts: RowCounts  # counts of all requests, sampled or not
    opened: float  # no request was answered before; seconds since 1970
    answered: list[Answered] = field(default_factory=list)  # the sampled requests
    moments: list[float] = field(default_factory=list)  # time of each sampled request


class TrafficQueue:
    """A bounded queue. Unsampled requests are only counted; requests beyond the bounds are dropped.

    No lock: each attribute is written by one thread only.
    """

    def __init__(self) -> None:
        self.sampler = RequestSampler()
        self._waiting: deque[tuple[float, Answered]] = deque()
        self._running: dict[tuple[str, str], RunningCounts] = {}  # by bundle digest and variant
        self._retired: list[RunningCounts] = []
        self._bytes_offered = self._bytes_gathered = 0
        self._dropped = self._dropped_gathered = 0  # numbers of dropped rows
        self._gathered_at = time.time()
        # For each recent round: its monotonic time, and numbers of items by request id.
        self._rounds: deque[tuple[float, dict[str, int]]] = deque()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Queue requests of one model, or drop them. Never waits, never raises."""
        # One search in all ids takes a fraction of the time of checking each id.
        if REPLAYED in " ".join(map(id_of, answered)):
            answered = [one for one in answered if not id_of(one).startswith(REPLAYED)]
        sampled, others = self.sampler.divide(answered)
        for one in sampled:
            self._offer_sampled(moment, Answered._make(one))
        if others:
            running = self._running_counts(model_of(others[0]))
            if len(running.totals.inputs) < MAX_WAITING:
                running.add(others)
            else:
                self._dropped += sum(len(rows_of(one)) for one in others)

    def gather(self) -> tuple[list[TrafficGroup], int]:
        """Return the requests since the last call, by model, and the number of dropped rows."""
        opened, self._gathered_at = self._gathered_at, time.time()
        num_dropped = self._dropped - self._dropped_gathered
        self._dropped_gathered += num_dropped
        groups: dict[tuple[str, str], TrafficGroup] = {}

        def group_of(bundle: LoadedBundle, variant: str) -> TrafficGroup:
            key = (bundle.digest, variant)
            if key not in groups:
                groups[key] = TrafficGroup(RowCounts(bundle, variant), opened)
            return groups[key]

        now, items = time.monotonic(), dict[str, int]()
        self._rounds.append((now, items))
        while self._rounds[0][0] < now - RECENT_S:
            self._rounds.popleft()
        for _ in range(len(self._waiting)):
            moment, answered = self._waiting[0]
            items[answered.request_id] = len(answered.answers)
            self._waiting.popleft()
            self._bytes_gathered += _num_bytes(answered)
            group = group_of(answered.bundle, answered.execution.variant)
            group.answered.append(answered)
            group.moments.append(moment)
        for group in groups.values():
            group.counts.add(list(counted(group.answered)))
            group.counts.add_inputs(group.answered)
        for running in [*self._running.values(), *self._retired]:
            if running.is_new:
                running.move_to(group_of(running.totals.bundle, running.totals.variant).counts)
        self._retired.clear()
        return list(groups.values()), num_dropped

    def recent_items(self) -> dict[str, int]:
        """Return the number of items of each sampled request that may be unstored, by request id.

        Any thread may call it, because each copy is a single operation of the interpreter.
        """
        recent: dict[str, int] = {}
        for _, items in list(self._rounds):
            recent.update(items)
        return recent | {one.request_id: len(one.answers) for _, one in list(self._waiting)}

    def retire_counts(self, served: ServedModel | None) -> None:
        """Release the counts of models that are no longer served and have no new rows."""
        current = served and (served.bundle.digest, served.selection.actual.variant)
        for key, running in list(self._running.items()):
            if key != current and not running.was_added_to():
                # Gathered once more: the event loop may have added a row just now.
                self._retired.append(self._running.pop(key))

    def _offer_sampled(self, moment: float, answered: Answered) -> None:
        num_bytes = _num_bytes(answered)
        waiting_bytes = self._bytes_offered - self._bytes_gathered + num_bytes
        if len(self._waiting) >= MAX_WAITING or waiting_bytes > MAX_WAITING_BYTES:
            self._dropped += len(answered.answers)
            return
        self._bytes_offered += num_bytes
        self._waiting.append((moment, answered))

    def _running_counts(self, model: ServedModel) -> RunningCounts:
        variant = model.selection.actual.variant
        key = (model.bundle.digest, variant)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = RunningCounts(model.bundle, variant)
        return running


def _num_bytes(answered: Answered) -> int:
    return answered.payload.num_bytes + answered.inputs.nbytes
