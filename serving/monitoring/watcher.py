"""One worker's watching: what was answered is counted, looked at for drift, and remembered for a truth to come, on a thread of its own.

It never costs a request its answer. Where the queue is full rows are dropped; where the processor has no time to spare they are thinned
out; where the disk, the database or the code fails it is counted, said once in the log, and tried again. Each worker hands what it
has to the database that all of them share every few seconds: so much is lost at most with a killed worker.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.models.model import ServedModel
from serving.models.observers import Answered, Noted, id_of, model_of, rows_of
from serving.monitoring.budget import Allowance
from serving.monitoring.metrics import FeatureFigure, MonitoringFigures, WatchingMetrics
from serving.monitoring.models import WatchedModel, watched_key
from serving.monitoring.proposals import proposal_path, write_proposal
from serving.monitoring.quality import NUM_JUDGED, compare, measure_joined
from serving.monitoring.sampling import RunningCounts, SampledCounts, Thinning, counted
from serving.monitoring.settings import MonitoringSettings
from serving.monitoring.store import Closed, Part, Prediction, Store
from serving.settings import Settings
from slipway.artifacts.bundle import LoadedBundle
from slipway.system.disk_faults import disk_fault
from slipway.traffic.request_log import REPLAYED

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 8192  # requests between two rounds
MAX_WAITING_BYTES = 64 << 20  # of their payloads and inputs
MAX_REMEMBERED = 20_000  # predictions that wait for a database that cannot be used
GATHER_S = 0.2  # between two rounds
MERGE_S = (
    2.0  # between two parts: what a killed worker loses at most, with the round that was under way
)
REFRESH_S = 2.0  # the gauges and the status
TIDY_S = 60.0
CLOSE_S = 5.0  # most that the end of a worker waits
FEATURES_SHARE, RECORDS_SHARE = (
    0.005,
    0.0025,
)  # of one core, for features and for predictions to remember
_BURST_S = 0.1  # of processor time
_CHUNK_ROWS = 64  # whose features are computed at once: the event loop waits for no longer
_CHUNK_BYTES = 2 << 20
_CHUNK_REQUESTS = 256
_MAX_MODELS = 8  # whose references stay in memory
_WINDOW_SHARE = 4  # a part has at most this share of a window, so that windows are not much larger than they should be
_PARTS = {  # under which label a fault of what is counted; those of the database are all "state"
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


@dataclass
class _Group:
    """What was answered by one model in one round."""

    model: WatchedModel
    counts: SampledCounts  # of the rows of all requests
    answered: list[Answered] = field(default_factory=list)  # the requests that were taken in whole
    moments: list[float] = field(default_factory=list)  # when each was


class Watcher:
    """One worker's queue and thread. `current` says which model new requests go to; `wrong` is told the version of a model that a truth,
    told before its prediction was written down, proved wrong.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: WatchingMetrics,
        current: Callable[[], ServedModel | None],
        wrong: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._current, self._wrong = current, wrong
        self._section = settings.section(MonitoringSettings)
        self._limits = self._section.limits
        self._part_rows = max(1, self._limits.window_rows // (_WINDOW_SHARE * settings.workers))
        self._store = Store(settings.state, self._limits)
        self._models: dict[str, WatchedModel] = {}  # by key
        self._thinning = Thinning()
        self._waiting: deque[tuple[float, Answered]] = deque()  # with the time, seconds since 1970
        self._counted: dict[
            tuple[str, str], RunningCounts
        ] = {}  # of requests that are not taken in whole, by digest and variant
        self._idle: list[RunningCounts] = []  # nobody adds to them any more
        self._bytes_offered, self._bytes_taken = 0, 0  # each is written by one thread alone
        self._dropped_offered, self._dropped_counted = 0, 0
        self._part = Part(sequence=1)
        self._gathered, self._gathered_before = (
            time.time(),
            0.0,
        )  # when what is at hand was gathered, and what came before it
        self._frozen: Part | None = None  # handed over, but whether it was merged is not known
        self._features_allowance = Allowance(FEATURES_SHARE, _BURST_S)
        self._records_allowance = Allowance(RECORDS_SHARE, _BURST_S)
        self._random = np.random.default_rng()
        self._failing: dict[str, str] = {}  # by what failed, why; it was said in the log
        self._due = {"merge": 0.0, "refresh": 0.0, "tidy": time.monotonic() + TIDY_S}
        self._status: dict[str, Any] = {
            "drift": {"state": "starting"},
            "feedback": {"state": "starting"},
        }
        self._closing = threading.Event()
        self._request_log: Path | None = None  # named in proposals
        self._thread = threading.Thread(target=self._work, name="slipway-watch", daemon=True)

    def start(self, request_log: Path | None = None) -> None:
        """Start the thread. `request_log` is the folder that requests are logged to, if they are."""
        self._request_log = request_log
        self._thread.start()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Take note of them, or leave them: one or more, all of one model. Never waits, never raises."""
        if REPLAYED in " ".join(map(id_of, answered)):  # a fraction of what a look at each takes
            answered = [one for one in answered if not id_of(one).startswith(REPLAYED)]
        whole, others = self._thinning.divide(answered)
        for one in whole:
            self._take(moment, Answered._make(one))
        if others:
            running = self._running(model_of(others[0]))
            if len(running.totals.inputs) < MAX_WAITING:
                running.add(others)
            else:
                self._dropped_offered += sum(len(rows_of(one)) for one in others)

    def _take(self, moment: float, answered: Answered) -> None:
        """In whole, as far as there is room."""
        num_bytes = _num_bytes(answered)
        if (
            len(self._waiting) >= MAX_WAITING
            or self._bytes_offered - self._bytes_taken + num_bytes > MAX_WAITING_BYTES
        ):
            self._dropped_offered += len(answered.answers)
            return
        self._bytes_offered += num_bytes
        self._waiting.append((moment, answered))

    def _running(self, model: ServedModel) -> RunningCounts:
        variant = model.selection.actual.variant
        key = (model.bundle.digest, variant)
        running = self._counted.get(key)
        if running is None:
            running = self._counted[key] = RunningCounts(model.bundle, variant)
        return running

    def close(self) -> None:
        """Hand over what there is, and end the thread; a disk that hangs is left behind."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def drift_status(self) -> dict[str, Any]:
        """The open window, the last ones, and what they say. Of seconds ago at most."""
        status: dict[str, Any] = self._status["drift"]
        return status | {"faults": dict(self._failing)}

    def feedback_status(self) -> dict[str, Any]:
        """How good the model has proved to be. Of seconds ago at most."""
        status: dict[str, Any] = self._status["feedback"]
        return status

    def _work(self) -> None:
        # Not a lower priority: a thread that the kernel sets aside while it holds the interpreter would hold up the event loop.
        is_last = False
        while not is_last:
            is_last = self._closing.wait(GATHER_S)
            self._round(is_last)
        self._store.close()

    def _round(self, is_last: bool) -> None:
        num_offered = num_used = 0
        for group in self._attempt("gathering", self._gather) or []:
            self._attempt("counting", partial(self._count, group))
            num_looked_at = self._attempt("features", partial(self._look, group)) or 0
            num_recorded = self._attempt("recording", partial(self._record, group)) or 0
            num_offered += group.counts.num_rows
            num_used += max(num_looked_at, num_recorded)
        self._thinning.adapt(num_offered, num_used)
        if is_last or self._is_due("merge", MERGE_S):
            self._attempt("merging", self._merge)
        if is_last:
            return
        if self._is_due("tidy", TIDY_S):
            self._attempt("tidying", self._tidy)
        if self._is_due("refresh", REFRESH_S):
            self._attempt("proposals", self._propose)
            self._attempt("quality", self._measure)
            self._attempt("refreshing", self._refresh)

    def _attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns; None where it fails, which is counted, and said in the log once until it works again."""
        try:
            found = work()
        except Exception as error:
            self._failed(what, error)
            return None
        if self._failing.pop(what, None):
            logger.info("watching: %s works again", what)
        return found

    def _failed(self, what: str, error: Exception) -> None:
        with suppress(
            Exception
        ):  # counting itself may need the disk that is full; nothing is left to tell it to
            self._metrics.fault("state" if isinstance(error, sqlite3.Error) else _PARTS[what])
        reason = disk_fault(error) or f"{type(error).__name__}: {error}"
        if what not in self._failing:
            logger.error(
                "watching: %s failed, requests are answered all the same: %s", what, reason
            )
        self._failing[what] = reason

    def _is_due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + seconds
        return True

    def _gather(self) -> list[_Group]:
        """What has arrived since the last round, by model."""
        dropped = self._dropped_offered - self._dropped_counted
        if dropped:
            self._dropped_counted += dropped
            self._metrics.rows("dropped", dropped)
        groups: dict[tuple[str, str], _Group] = {}
        self._gathered_before, self._gathered = self._gathered, time.time()

        def group_of(bundle: LoadedBundle, variant: str) -> _Group:
            key = (bundle.digest, variant)
            if key not in groups:
                groups[key] = _Group(self._model(bundle, variant), SampledCounts(bundle, variant))
            return groups[key]

        for _ in range(len(self._waiting)):
            moment, answered = self._waiting.popleft()
            self._bytes_taken += _num_bytes(answered)
            group = group_of(answered.bundle, answered.execution.variant)
            group.answered.append(answered)
            group.moments.append(moment)
        for group in groups.values():
            group.counts.add(list(counted(group.answered)))
            group.counts.add_inputs(group.answered)
        for running in [*self._counted.values(), *self._idle]:
            if running.is_new:
                running.move_to(group_of(running.totals.bundle, running.totals.variant).counts)
        self._idle.clear()
        return list(groups.values())

    def _model(self, bundle: LoadedBundle, variant: str) -> WatchedModel:
        key = watched_key(bundle, variant)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = WatchedModel(bundle, variant)
            self._attempt("reference", model.read_reference)
        return model

    def _count(self, group: _Group) -> None:
        """What is counted of every row."""
        counts, model = group.counts, group.model
        if model.has_classes:
            self._metrics.classes(counts.labels)
            self._metrics.confidences(counts.confidences, counts.confidence_sum)
        self._metrics.outliers(counts.num_outliers)
        if model.has_missing_signs:
            self._metrics.missing_cells(
                sum(model.num_missing_cells(inputs) for inputs in counts.inputs)
            )

    def _look(self, group: _Group) -> int:
        """Features of the rows, in random order as long as there is time for it, into this worker's part of the window. How many rows."""
        if group.model.reference is None:
            return 0
        ends = np.cumsum([0, *(len(one.answers) for one in group.answered)])[1:]
        order = self._random.permutation(int(ends[-1]) if len(ends) else 0)
        num_done = 0
        for chosen in self._chunks(group, order):
            if not self._features_allowance.is_left():
                break
            with self._features_allowance.spending():
                num_rows = self._add(group, chosen, ends)
            num_done += len(chosen)
            if num_rows >= self._part_rows and "merging" not in self._failing:
                self._attempt("merging", self._merge)
        self._metrics.rows("thinned", group.counts.num_rows - num_done)
        return num_done

    def _chunks(self, group: _Group, order: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Rows in pieces whose features may be computed at once."""
        if len(order):
            size = min(
                _CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, group.answered[0].inputs[0].nbytes))
            )
            yield from np.split(order, range(size, len(order), size))

    def _add(self, group: _Group, chosen: NDArray[np.intp], ends: NDArray[np.intp]) -> int:
        """Count these rows in this worker's part of the window, which then has so many; `ends` are where the requests' rows end."""
        requests = np.searchsorted(ends, chosen, side="right")
        places = [
            (group.answered[request], row - ends[request])
            for request, row in zip(requests.tolist(), chosen, strict=True)
        ]
        inputs = np.stack([one.inputs[item] for one, item in places])
        outputs, scores = (
            np.array([one.rows[item][place] for one, item in places], np.float32)
            for place in (0, 1)
        )
        features = group.model.features(inputs, outputs, scores)
        window = self._part.windows.get(group.model.key) or group.model.window()
        window.add(features)
        self._part.windows[group.model.key] = window
        self._part.begun.setdefault(group.model.key, self._gathered_before)
        self._metrics.rows("watched", len(chosen))
        return window.num_rows

    def _record(self, group: _Group) -> int:
        """Predictions to remember, of requests in random order as long as there is time for it. How many rows."""
        version = group.model.version
        order = self._random.permutation(len(group.answered))
        num_before = len(self._part.predictions)
        for begin in range(0, len(order), _CHUNK_REQUESTS):
            if (
                not self._records_allowance.is_left()
                or len(self._part.predictions) >= MAX_REMEMBERED
            ):
                break
            with self._records_allowance.spending():
                for place in order[begin : begin + _CHUNK_REQUESTS].tolist():
                    one, moment = group.answered[place], group.moments[place]
                    self._part.predictions += [
                        Prediction(
                            one.request_id,
                            item,
                            len(one.answers),
                            moment,
                            version,
                            answer.get("label"),
                            answer.get("value"),
                        )
                        for item, answer in enumerate(one.answers)
                    ]
        return len(self._part.predictions) - num_before

    def _merge(self) -> None:
        """Hand this worker's part to the database; what was handed over without an end that was seen goes first, under its own number."""
        models = {key: model for key, model in self._models.items() if model.reference is not None}
        while self._frozen is not None or not self._part.is_empty or models:
            part = self._frozen or self._part
            if self._frozen is None:
                self._frozen, self._part = self._part, Part(self._part.sequence + 1)
            merged = self._store.merge(part, models)
            self._features_allowance.take(merged.windows_s)
            self._records_allowance.take(merged.seconds - merged.windows_s)
            self._frozen = None
            self._metrics.feedback("joined", merged.num_joined)
            self._metrics.feedback("invalid", merged.num_ambiguous)
            for model in merged.wrong:
                self._wrong(model)
            for error in merged.errors:
                self._failed("judging", error)
            for closed in merged.closed:
                self._tell(closed)
            if self._part.is_empty:
                return

    def _tell(self, closed: Closed) -> None:
        if closed.is_too_small:
            self._metrics.window("too_small")
        elif closed.drifted is not None:
            self._failing.pop("judging", None)
            self._metrics.window("drifted" if closed.drifted else "clean")
            self._due["refresh"] = 0.0
        if closed.drifted:
            strongest = [
                feature["name"] for feature in closed.judgement["features"] if feature["drifted"]
            ]
            logger.warning(
                "the traffic of model %s has drifted in %d rows: %s",
                closed.model,
                closed.num_rows,
                ", ".join(strongest[:5]),
            )

    def _tidy(self) -> None:
        self._metrics.feedback("unknown_request", self._store.tidy())
        if self._frozen is None and self._part.is_empty:  # a model that answers again is read again
            for key in list(self._models)[:-_MAX_MODELS]:
                del self._models[key]
        self._forget_counts()
        for model in self._models.values():
            if model.lacks_reference:
                self._attempt("reference", model.read_reference)

    def _forget_counts(self) -> None:
        """Of models that are not served any more, which they would keep in memory."""
        served = self._current()
        for key, running in list(self._counted.items()):
            is_served = served is not None and key == (
                served.bundle.digest,
                served.selection.actual.variant,
            )
            if not is_served and not running.was_added_to():
                self._idle.append(
                    self._counted.pop(key)
                )  # read once more: a row may have been added just now

    def _propose(self) -> None:
        for window, model, opened, closed, num_rows, judgement in self._store.proposals_due():
            path = write_proposal(
                self._settings.state,
                self._request_log,
                model,
                opened,
                closed,
                num_rows,
                judgement,
            )
            self._store.proposal_written(window)
            logger.warning(
                "what may be done about the drift of model %s, by a person: %s", model, path
            )

    def _measure(self) -> None:
        """True quality anew, where truths came since it was measured last; by whichever worker is first."""
        served = self._current()
        if served is None:
            return
        bundle = served.bundle
        _, latest = self._store.quality(bundle.version)
        if latest is not None:
            measured = measure_joined(
                bundle.manifest, self._store.joined(bundle.version, NUM_JUDGED)
            )
            self._store.write_quality(bundle.version, compare(bundle.manifest, measured), latest)

    def _refresh(self) -> None:
        """The gauges and the status, from what all workers share."""
        served = self._current()
        if served is None:
            return
        model = self._model(served.bundle, served.selection.actual.variant)
        history, quality = self._store.history(model.key), self._store.quality(model.version)[0]
        self._status = {
            "drift": self._describe_drift(model, history),
            "feedback": _describe_feedback(model, history, quality),
        }
        self._metrics.figures = _figures(history, quality)

    def _describe_drift(self, model: WatchedModel, history: list[dict[str, Any]]) -> dict[str, Any]:
        opened = self._store.open_rows(model.key)
        judged = _judged(history)
        return {
            "state": _state(model),
            "model_version": model.version,
            "open_window": {"since": opened[0], "rows": opened[1]} if opened else None,
            "window_rows": self._limits.window_rows,
            "window_minutes": self._section.window_minutes,
            **_describe_last(judged[0] if judged else None),
            "windows": [_brief(window) for window in judged],
            "proposal": self._describe_proposal(model, judged),
        }

    def _describe_proposal(
        self, model: WatchedModel, judged: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """The last one that is still there, whichever worker wrote it."""
        for closed in (window["closed"] for window in judged if window["has_proposal"]):
            path = proposal_path(self._settings.state, closed, model.key)
            if path.exists():
                return {"path": str(path), "closed": closed}
        return None


def _num_bytes(answered: Answered) -> int:
    return answered.payload.num_bytes + answered.inputs.nbytes


def _judged(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [window for window in history if window["drifted"] is not None]


def _figures(history: list[dict[str, Any]], quality: dict[str, Any] | None) -> MonitoringFigures:
    known = {
        name: (metric["value"], metric["low"], metric["high"])
        for name, metric in (quality or {}).items()
    }
    num_joined = next((metric["rows"] for metric in (quality or {}).values()), 0)
    judged = _judged(history)
    if not judged:
        return MonitoringFigures(quality=known, num_joined=num_joined)
    judgement = judged[0]["judgement"]
    estimate = judgement["estimate"]
    is_valid = bool(estimate["valid"])
    return MonitoringFigures(
        alarm=bool(judged[0]["drifted"]),
        features=[
            FeatureFigure(one["name"], abs(one["value"]), one["threshold"])
            for one in judgement["features"]
        ],
        estimate=(estimate["value"], estimate["low"], estimate["high"]) if is_valid else None,
        is_estimate_valid=is_valid,
        quality=known,
        num_joined=num_joined,
    )


def _describe_last(window: dict[str, Any] | None) -> dict[str, Any]:
    """The last window that was judged."""
    if window is None:
        return {"verdict": None, "features": [], "estimate": None}
    features = window["judgement"]["features"]
    return {
        "verdict": "drifted" if window["drifted"] else "clean",
        "opened": window["opened"],
        "closed": window["closed"],
        "rows": window["rows"],
        "features": [
            one | {"test": one["statistic"], "statistic": abs(one["value"])} for one in features
        ],  # of `test`
        "estimate": window["judgement"]["estimate"],
    }


def _brief(window: dict[str, Any]) -> dict[str, Any]:
    """One window for a chart."""
    judgement = window["judgement"]
    strongest = judgement["features"][0] if judgement["features"] else None
    return {name: window[name] for name in ("opened", "closed", "rows")} | {
        "drifted": bool(window["drifted"]),
        "strongest": strongest
        and {
            "name": strongest["name"],
            "strength": abs(strongest["value"]) / strongest["threshold"],
        },
        "estimate": judgement["estimate"],
    }


def _state(model: WatchedModel) -> str:
    if model.lacks_reference:
        return "the reference for drift could not be read; it is tried again every minute"
    return "watching" if model.reference is not None else "the bundle has no reference for drift"


def _describe_feedback(
    model: WatchedModel, history: list[dict[str, Any]], quality: dict[str, Any] | None
) -> dict[str, Any]:
    judged = _judged(history)
    return {
        "state": "measured" if quality else "no truths yet",
        "model_version": model.version,
        "joined": next((metric["rows"] for metric in (quality or {}).values()), 0),
        "of_the_last": NUM_JUDGED,
        "quality": quality or {},
        "estimate": judged[0]["judgement"]["estimate"] if judged else None,
    }
