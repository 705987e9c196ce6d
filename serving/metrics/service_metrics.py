"""The service's own metrics, with labels from fixed lists only: no request can add a series.

Workers write to files in their server's folder, so that any of them answers `/metrics` for all of
them, and the counts of a worker that died stay, but for what it counted since it last wrote: at most FLUSH_S. A worker's own
counts are written before it answers, so they are exact at every scrape. docs/serving.md lists every metric.
"""

import asyncio
import atexit
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from serving.http.responses import ERRORS
from serving.metrics.claimed_files import claim_metric_files
from serving.metrics.dead_workers import WorkersCollector, settled
from serving.metrics.tallies import Count, Distribution, Level, Tally
from serving.metrics.traffic import traffic
from serving.models.model import ServedModel
from slipway.system.files import is_alive
from slipway.system.parent_death import end_with

STAGES = ("read", "decode", "queue", "infer", "encode")
FLUSH_S = 0.05  # at most so long a count waits to be written
# A series for each bound, label and worker: few for the stages, finer for the whole, whose percentiles are shown.
_STAGE_SECONDS = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.25, 1.0)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)
_FILL = (0.125, 0.25, 0.5, 0.75, 1.0)
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # BentoML sets it in every worker, before prometheus_client is imported
_SERVER_DIRECTORY = (
    "_SLIPWAY_SERVER_DIRECTORY"  # from the server process to its workers; not a setting
)
_SERVER_STARTED = "_SLIPWAY_SERVER_STARTED"  # likewise


AnyTally = TypeVar("AnyTally", bound=Tally)


class ServiceMetrics:
    """Counters, histograms and gauges of one worker. Where nothing else is said only the event loop may call a method."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        _enter_server_directory()
        claim_metric_files()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "slipway_requests", "Answered requests.", ["route", "code"], registry=registry
        )
        self._tallies: list[Tally] = []
        self._answered: dict[tuple[str, int], Count] = {}
        self._flushing: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._one_at_a_time = threading.Lock()
        errors = Counter(
            "slipway_errors",
            "Requests answered with an error, by its code.",
            ["error"],
            registry=registry,
        )
        self._errors = {code: self._tally(Count(errors.labels(code))) for code in ERRORS}
        stages = Histogram(
            "slipway_stage_seconds",
            "Time of a prediction, by stage.",
            ["stage"],
            buckets=_STAGE_SECONDS,
            registry=registry,
        )
        self._stages = {
            stage: self._tally(Distribution(stages.labels(stage), _STAGE_SECONDS))
            for stage in STAGES
        }
        self._read, self._encode = self._stages["read"], self._stages["encode"]
        self._seconds = self._histogram(
            "slipway_predict_seconds", "Time of a prediction.", _SECONDS
        )
        self._batch_size = self._histogram("slipway_batch_size", "Rows in a batch.", _ROWS)
        self._batch_fill = self._histogram(
            "slipway_batch_fill", "Rows in a batch, as a share of the largest one.", _FILL
        )
        gone = Counter(
            "slipway_clients_gone",
            "Requests whose caller hung up before they were complete.",
            registry=registry,
        )
        self._gone = self._tally(Count(gone))
        expired = Counter(
            "slipway_expired",
            "Requests dropped before the model, because their deadline had passed.",
            registry=registry,
        )
        self._expired = self._tally(Count(expired))
        self._queue = Gauge(
            "slipway_queue_depth",
            "Requests decoding, waiting or running.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        answers = Counter(
            "slipway_predictions",
            "Requests that a model answered, by its place in a rollout.",
            ["slot"],
            registry=registry,
        )
        self._predictions = answers
        self._answers: dict[str, Count] = {}
        self.add_slots("stable")
        self._faults = Counter(
            "slipway_monitoring_errors",
            "Faults of work beside the request path, none of which costs an answer.",
            ["part"],
            registry=registry,
        )
        self._faults_of: dict[str, Counter] = {}
        self.add_fault_parts("sampling")
        self._ready = Gauge(
            "slipway_ready",
            "Workers that are ready.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        labels = [
            "model_version",
            "task",
            "backend",
            "provider",
            "precision",
            "variant",
            "requested_provider",
            "requested_variant",
        ]
        self._info = Gauge(
            "slipway_model_info",
            "1 for the model that is ready, and how it runs.",
            labels,
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._shown: Gauge | None = None
        self._shared = CollectorRegistry()

    @property
    def registry(self) -> CollectorRegistry:
        """Where a part of the service with gauges of its own registers them."""
        return self._registry

    def answered(self, route: str, status: int) -> None:
        """Count an answer; `route` is one of the application's own, never a path that a caller made up."""
        count = self._answered.get((route, status))
        if count is None:
            count = self._answered[route, status] = self._tally(
                Count(self._requests.labels(route, str(status)))
            )
        count.total += 1
        if self._flushing is None:
            self._flush_soon()

    def refused(self, code: str) -> None:
        """Count an error by its code."""
        self._errors[code].total += 1

    def client_gone(self) -> None:
        """Count a caller that hung up."""
        self._gone.total += 1
        if self._flushing is None:
            self._flush_soon()

    def expired(self) -> None:
        """Count a request whose deadline passed before the model took any of it."""
        self._expired.total += 1

    def add_slots(self, *slots: str) -> None:
        """Have `answer` count these places of a model in a rollout."""
        for slot in slots:
            self._answers[slot] = self.count(self._predictions.labels(slot))

    def answer(self, slot: str) -> None:
        """Count a request that the model in that slot answered. Any thread that alone counts a slot may call it."""
        self._answers[slot].total += 1

    def add_fault_parts(self, *parts: str) -> None:
        """Have `fault` count these parts."""
        for part in parts:
            self._faults_of[part] = self._faults.labels(part)

    def fault(self, part: str) -> None:
        """Count a fault of work beside the request path. Any thread may call it."""
        self._faults_of[part].inc()

    def register_shared(self, collector: Collector) -> None:
        """Expose metrics that every worker knows alike, and that are therefore not summed."""
        self._shared.register(collector)

    def stage(self, stage: str) -> Callable[[float], None]:
        """What is told how many seconds that stage of one prediction took; one of STAGES."""
        return self._stages[stage].observe

    def predicted(self, seconds: float, *, read_s: float, encode_s: float) -> None:
        """Note how long a whole prediction took, and its first and its last stage."""
        self._seconds.observe(seconds)
        self._read.observe(read_s)
        self._encode.observe(encode_s)

    def batch(self, num_rows: int, fill: float) -> None:
        """Note the size of a batch that ran, and its share of the largest one, in (0, 1]."""
        self._batch_size.observe(num_rows)
        self._batch_fill.observe(fill)

    def queue_depth(self, num_requests: Callable[[], int]) -> None:
        """From now on ask for the number of requests between decoding and answer, on any thread."""
        self._tally(Level(self._queue, num_requests))

    def not_ready(self) -> None:
        """Show that this worker wants no more requests, whether it answers them or not."""
        self._ready.set(0)

    def model(self, model: ServedModel | None) -> None:
        """Show which model is ready, or that none is."""
        self._ready.set(1 if model else 0)
        if self._shown:
            self._shown.set(0)
        if model:
            actual, requested = model.selection.actual, model.selection.requested
            execution = (
                actual.backend,
                actual.provider,
                actual.precision,
                actual.variant,
                requested["provider"],
                requested["variant"],
            )
            self._shown = self._info.labels(model.version, model.bundle.manifest.task, *execution)
            self._shown.set(1)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, summed over the workers of this server. Any thread may call it."""
        with self._summed() as summed:
            return _without_former_models(generate_latest(summed)) + generate_latest(self._shared)

    def summary(self, asking: Collection[str] | None = None) -> dict[str, Any]:
        """The traffic so far, over all workers, for people; `asking` are the routes that count, None: all. Any thread may call it."""
        with self._summed() as summed:
            return traffic(list(summed.collect()), asking)

    def flush(self) -> None:
        """Write all counts. Any thread may call it."""
        with self._one_at_a_time:
            for tally in list(self._tallies):
                tally.flush()

    def close(self) -> None:
        """Write all counts, and from now on each at once: the event loop may end at any time."""
        self._is_closed = True
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self.flush()

    def _flush_soon(self) -> None:
        if self._is_closed:
            self.flush()
        else:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = None
        self.flush()

    def count(self, counter: Counter) -> Count:
        """A count that only the event loop adds to, written to `counter` at each flush."""
        return self._tally(Count(counter))

    def _tally(self, tally: AnyTally) -> AnyTally:
        self._tallies.append(tally)
        return tally

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Distribution:
        return self._tally(
            Distribution(
                Histogram(name, documentation, buckets=bounds, registry=self._registry), bounds
            )
        )

    @contextmanager
    def _summed(self) -> Iterator[CollectorRegistry]:
        """All workers' metrics, to be collected inside: files are read then."""
        self.flush()
        if _MULTIPROCESS not in os.environ:
            yield self._registry
            return
        directory = Path(os.environ[_MULTIPROCESS])
        with settled(directory):
            _forget_dead_workers(directory)
            summed = CollectorRegistry()
            summed.register(WorkersCollector(directory))
            yield summed


def open_server_directory(parent: Path) -> None:
    """Called once by a server before its workers start: gives them a folder of their own below `parent`.

    BentoML has one folder for all servers of a BENTOML_HOME, and empties it whenever another starts.
    """
    for leftover in parent.glob("*"):
        if leftover.name.isdigit() and not is_alive(int(leftover.name)):
            shutil.rmtree(leftover, ignore_errors=True)
    own = parent / str(os.getpid())
    shutil.rmtree(own, ignore_errors=True)  # of an earlier process of the same number
    own.mkdir(parents=True)
    os.environ[_SERVER_DIRECTORY] = str(own)
    os.environ[_SERVER_STARTED] = str(time.time())
    atexit.register(shutil.rmtree, own, ignore_errors=True)


def server_started() -> float:
    """Seconds since 1970 when this worker's server began; of a process without a server, now."""
    return float(os.environ.get(_SERVER_STARTED, time.time()))


def end_with_server() -> None:
    """Called by a worker: it ends with the server that started it, which otherwise leaves it on the port when killed."""
    if _SERVER_DIRECTORY in os.environ:
        end_with(int(Path(os.environ[_SERVER_DIRECTORY]).name))


def _enter_server_directory() -> None:
    if _SERVER_DIRECTORY in os.environ:
        os.environ[_MULTIPROCESS] = os.environ[
            _SERVER_DIRECTORY
        ]  # read again whenever a metric is made


def _without_former_models(exposition: bytes) -> bytes:
    """Without the models that were swapped out, whose series cannot be removed while several processes count: each swap would leave one."""
    lines = exposition.splitlines(keepends=True)
    return b"".join(
        line
        for line in lines
        if not (line.startswith(b"slipway_model_info{") and line.endswith(b" 0.0\n"))
    )


def _forget_dead_workers(directory: Path) -> None:
    """Their gauges, that is: what they counted stays."""
    for worker in {int(file.stem.rpartition("_")[2]) for file in directory.glob("gauge_live*.db")}:
        if not is_alive(worker):
            multiprocess.mark_process_dead(worker, str(directory))  # type: ignore[no-untyped-call]
