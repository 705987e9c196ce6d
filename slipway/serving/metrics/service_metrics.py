"""The metrics of the service itself. Label values are fixed, so no request can add a series.

Workers write to files in a folder of their server, so any of them can serve `/metrics` for all. The
counts of a worker that died remain, except for its last FLUSH_S. A worker flushes its own counts
before it answers a scrape, so they are exact. docs/reference/serving.md lists every metric.
"""

import asyncio
import atexit
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from slipway.serving.http.responses import ERRORS
from slipway.serving.http.routes import STAGES
from slipway.serving.metrics.tallies import CounterTally, GaugeTally, HistogramTally, Tally
from slipway.serving.metrics.worker_files import WorkersCollector, claim_metric_files, merged
from slipway.serving.models.model import ServedModel
from slipway.system.files import is_alive

PREDICTION_ROUTES = ("/predict", "/infer")  # routes that count as predictions end so
FLUSH_S = 0.05  # maximum age of an unwritten count
# Each bound is a series per label and worker: few for the stages, more for the whole prediction,
# whose percentiles are shown.
_STAGE_SECONDS = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.25, 1.0)
_OK = HTTPStatus.OK.value  # looking up the member takes 0.2 µs
_DURATION = "slipway_prediction_duration_seconds"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_QUEUE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)
_FILL = (0.125, 0.25, 0.5, 0.75, 1.0)
_MODEL_LABELS = (
    "model_version",
    "task",
    "backend",
    "provider",
    "precision",
    "variant",
    "requested_provider",
    "requested_variant",
)
# BentoML sets it in every worker, before prometheus_client is imported.
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# Variables that the server process sets for its workers. Not settings, hence the underscore.
_SERVER_DIRECTORY = "_SLIPWAY_SERVER_DIRECTORY"
_SERVER_STARTED = "_SLIPWAY_SERVER_STARTED"

AnyTally = TypeVar("AnyTally", bound=Tally)


class ServiceMetrics:
    """Metrics of one worker. Call its methods on the event loop unless they say otherwise."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4
    open_metrics_type = exposition.CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        if _SERVER_DIRECTORY in os.environ:
            # prometheus_client reads it whenever a metric is created.
            os.environ[_MULTIPROCESS] = os.environ[_SERVER_DIRECTORY]
        claim_metric_files()
        self.registry = CollectorRegistry()  # extensions register their metrics here
        self._shared = CollectorRegistry()
        self._tallies: list[Tally] = []
        self._flush_lock = threading.Lock()
        self._flushing: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._requests = self._counter(
            "slipway_requests_total", "Answered requests.", ["route", "code"]
        )
        self._answered: dict[tuple[str, int], CounterTally] = {}
        errors = self._counter("slipway_errors_total", "Error responses, by code.", ["error"])
        self._errors = {code: self.count(errors.labels(code)) for code in ERRORS}
        stages = Histogram(
            "slipway_stage_seconds",
            "Duration of a prediction, by stage.",
            ["stage"],
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self._stages = {
            stage: self._add(HistogramTally(stages.labels(stage), _STAGE_SECONDS))
            for stage in STAGES
        }
        self._read, self._encoded = self.stage("read"), self.stage("encode")
        self._seconds = self._histogram(_DURATION, "Duration of a prediction.", _SECONDS)
        self._exemplars: dict[float, Exemplar] = {}  # by the upper bound of the bucket
        self.waited = self._histogram(
            "slipway_queue_wait_seconds",
            "Time in the queue before the first batch, or before an overload or deadline ended it.",
            _QUEUE_SECONDS,
        ).observe
        self._batch_size = self._histogram("slipway_batch_size", "Rows in a batch.", _ROWS)
        self._batch_fill = self._histogram(
            "slipway_batch_fill", "Rows in a batch, as a fraction of the largest batch.", _FILL
        )
        self._failed_seconds = self.count(
            self._counter(
                "slipway_failed_prediction_seconds_total",
                "Total duration of the predictions that were answered with an error.",
            )
        )
        self._disconnects = self.count(
            self._counter(
                "slipway_client_disconnects_total",
                "Clients that disconnected before their request ended.",
            )
        )
        self._expired = self.count(
            self._counter(
                "slipway_expired_total",
                "Requests dropped before the model because of their deadline.",
            )
        )
        self._queue = self._gauge(
            "slipway_queue_depth", "Requests in decoding, waiting or running.", "livesum"
        )
        self._predictions = self._counter(
            "slipway_predictions_total",
            "Answered predictions, by rollout slot of the model.",
            ["slot"],
        )
        self._answers: dict[str, CounterTally] = {}
        self.add_slots("stable")
        self._faults = self._counter(
            "slipway_monitoring_errors_total",
            "Failures beside the request path. They cost no response.",
            ["part"],
        )
        self._faults_by_part: dict[str, Counter] = {}
        self.add_fault_parts("sampling")
        self._ready = self._gauge("slipway_ready", "Workers that are ready.", "livesum")
        self._info = self._gauge(
            "slipway_model_info",
            "1 for the model that is ready, with its execution.",
            "livemax",
            _MODEL_LABELS,
        )
        self._shown_info: Gauge | None = None

    def answered(self, route: str, status: int, seconds: float = 0.0) -> None:
        """Count a response. `route` is a key of the routes, never the path that a caller sent."""
        if status != _OK and route.endswith(PREDICTION_ROUTES):
            self._failed_seconds.total += seconds
        count = self._answered.get((route, status))
        if count is None:
            count = self.count(self._requests.labels(route, str(status)))
            self._answered[route, status] = count
        count.total += 1
        if self._flushing is None:
            self._flush_soon()

    def refused(self, code: str) -> None:
        self._errors[code].total += 1

    def client_disconnected(self) -> None:
        self._disconnects.total += 1
        if self._flushing is None:
            self._flush_soon()

    def expired(self) -> None:
        """Count a request whose deadline passed before the model took any of its rows."""
        self._expired.total += 1

    def add_slots(self, *slots: str) -> None:
        """Create the counters that `answer` increments for these rollout slots."""
        for slot in slots:
            self._answers[slot] = self.count(self._predictions.labels(slot))

    def answer(self, slot: str) -> None:
        """Count a prediction by the model in a rollout slot.

        Each slot is counted by one thread only.
        """
        self._answers[slot].total += 1

    def add_fault_parts(self, *parts: str) -> None:
        """Create the counters that `fault` increments for these parts of the service."""
        for part in parts:
            self._faults_by_part[part] = self._faults.labels(part)

    def fault(self, part: str) -> None:
        """Count a failure of a background part. Any thread may call it."""
        self._faults_by_part[part].inc()

    def register_shared(self, collector: Collector) -> None:
        """Register a collector whose values are equal in every worker and must not be summed."""
        self._shared.register(collector)

    def stage(self, stage: str) -> Callable[[float], None]:
        """Return the function that records a duration of `stage`, one of STAGES, in seconds."""
        return self._stages[stage].observe

    @property
    def has_exemplars(self) -> bool:
        return bool(self._exemplars)

    def add_exemplar(self, seconds: float, trace_id: str) -> None:
        """Store the trace of a prediction as its bucket's exemplar in `open_metrics`."""
        bound = next((bound for bound in _SECONDS if seconds <= bound), math.inf)
        self._exemplars[bound] = Exemplar({"trace_id": trace_id}, seconds, time.time())

    def predicted(self, seconds: float, *, read_s: float, encode_s: float) -> None:
        """Record the seconds of a whole prediction, and of its stages `read` and `encode`."""
        self._seconds.observe(seconds)
        self._read(read_s)
        self._encoded(encode_s)

    def batch(self, num_rows: int, fill: float) -> None:
        """Record the rows of a batch. `fill` is its fraction of the largest batch, in (0, 1]."""
        self._batch_size.observe(num_rows)
        self._batch_fill.observe(fill)

    def queue_depth(self, read: Callable[[], int]) -> None:
        """Expose the queue depth. `read` returns the queued requests; any thread may call it."""
        self._add(GaugeTally(self._queue, read))

    def not_ready(self) -> None:
        """Mark this worker as not ready."""
        self._ready.set(0)

    def model(self, model: ServedModel | None) -> None:
        """Expose the model that is ready, with its backend and variant; None if there is none."""
        self._ready.set(1 if model else 0)
        if self._shown_info:
            self._shown_info.set(0)
        if model:
            actual, requested = model.selection.actual, model.selection.requested
            self._shown_info = self._info.labels(
                model.version,
                model.bundle.manifest.task,
                actual.backend,
                actual.provider,
                actual.precision,
                actual.variant,
                requested["provider"],
                requested["variant"],
            )
            self._shown_info.set(1)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, over all workers. Thread-safe."""
        with self._summed() as registry:
            text = generate_latest(registry)
        return _without_former_models(text) + generate_latest(self._shared)

    def open_metrics(self) -> bytes:
        """Return all metrics in OpenMetrics' text format, with this worker's exemplars.

        Any thread may call it.
        """
        metrics = [*self.collect(), *self._shared.collect()]
        for metric in metrics:
            if metric.name == _DURATION:
                metric.samples = [
                    sample._replace(exemplar=self._exemplars.get(float(sample.labels["le"])))
                    if sample.name.endswith("_bucket")
                    else sample
                    for sample in metric.samples
                ]
        collected = CollectedMetrics(metrics)
        text: bytes = exposition.generate_latest(collected)  # type: ignore[no-untyped-call]
        return _without_former_models(text)

    def collect(self) -> list[Metric]:
        """Return the metrics of the service over all workers. Any thread may call it."""
        with self._summed() as registry:
            return list(registry.collect())

    def flush(self) -> None:
        """Copy all fast counters to prometheus_client's metrics. Any thread may call it."""
        with self._flush_lock:
            for tally in list(self._tallies):
                tally.flush()

    def close(self) -> None:
        """Flush all counters now; each later change is flushed at once.

        Flushes on a timer end here, because the event loop may end soon.
        """
        self._is_closed = True
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self.flush()

    def count(self, counter: Counter) -> CounterTally:
        """Return a fast counter for the event loop; each flush writes it to `counter`."""
        return self._add(CounterTally(counter))

    def _flush_soon(self) -> None:
        if self._is_closed:
            self.flush()
        else:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = None
        self.flush()

    def _add(self, tally: AnyTally) -> AnyTally:
        self._tallies.append(tally)
        return tally

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, mode: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(
            name,
            documentation,
            labels,
            multiprocess_mode=mode,  # type: ignore[arg-type]
            registry=self.registry,
        )

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> HistogramTally:
        histogram = Histogram(name, documentation, buckets=bounds, registry=self.registry)
        return self._add(HistogramTally(histogram, bounds))

    @contextmanager
    def _summed(self) -> Iterator[CollectorRegistry]:
        """Yield a registry that sums the metrics of all workers.

        Collect the registry within the block, because collecting reads the workers' files.
        """
        self.flush()
        if _MULTIPROCESS not in os.environ:
            yield self.registry
            return
        directory = Path(os.environ[_MULTIPROCESS])
        with merged(directory):
            _remove_gauges_of_dead_workers(directory)
            registry = CollectorRegistry()
            registry.register(WorkersCollector(directory))
            yield registry


class CollectedMetrics(Collector):
    """A collector that returns metrics which were collected before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def open_server_directory(parent: Path) -> None:
    """Create the metrics folder of this server below `parent`, before any worker starts.

    BentoML has one folder for all servers of a BENTOML_HOME, and empties it when another starts.
    """
    for leftover in parent.glob("*"):
        if leftover.name.isdigit() and not is_alive(int(leftover.name)):
            shutil.rmtree(leftover, ignore_errors=True)
    own = parent / str(os.getpid())
    shutil.rmtree(own, ignore_errors=True)  # left by an earlier process with this id
    own.mkdir(parents=True)
    os.environ[_SERVER_DIRECTORY] = str(own)
    os.environ[_SERVER_STARTED] = str(time.time())
    atexit.register(shutil.rmtree, own, ignore_errors=True)


def server_started() -> float:
    """Return the start of this worker's server in seconds since 1970.

    Without a server, the time now.
    """
    return float(os.environ.get(_SERVER_STARTED, time.time()))


def server_process() -> int | None:
    """Return the process id of this worker's server, if there is one."""
    directory = os.environ.get(_SERVER_DIRECTORY)
    return int(Path(directory).name) if directory else None


def _without_former_models(exposition: bytes) -> bytes:
    """Remove the series of replaced models, which multiprocess mode cannot remove."""
    lines = exposition.splitlines(keepends=True)
    return b"".join(
        line
        for line in lines
        if not (line.startswith(b"slipway_model_info{") and line.endswith(b" 0.0\n"))
    )


def _remove_gauges_of_dead_workers(directory: Path) -> None:
    for worker in {int(file.stem.rpartition("_")[2]) for file in directory.glob("gauge_live*.db")}:
        if not is_alive(worker):
            multiprocess.mark_process_dead(worker, str(directory))  # type: ignore[no-untyped-call]
