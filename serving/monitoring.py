"""The service's own metrics, with labels from fixed lists only: no request can add a series.

Workers write to files in their server's folder, so that any of them answers `/metrics` for all of
them, and the counts of a worker that died stay. docs/serving.md lists every metric.
"""

import atexit
import os
import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from serving.keeping import OUTCOMES
from serving.model import ServedModel
from serving.responses import ERRORS
from serving.rollout.evidence import SHADOWED
from serving.rollout.state import OUTCOMES as SWAPPED
from slipway.files import is_alive
from slipway.tether import tether_to

SLOTS = ("stable", "candidate", "shadow")  # of the model that answered; a shadow answers copies
STAGES = ("read", "decode", "queue", "infer", "encode")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = tuple(2.0**power for power in range(11))
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # BentoML sets it in every worker, before prometheus_client is imported
_SERVER_DIRECTORY = "_SLIPWAY_SERVER_DIRECTORY"  # from the server process to its workers; not a setting


class Monitoring:
    """Counters, histograms and gauges of one worker."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        _enter_server_directory()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("slipway_requests", "Answered requests.", ["route", "code"], registry=registry)
        errors = Counter("slipway_errors", "Requests answered with an error, by its code.", ["error"], registry=registry)
        stages = Histogram("slipway_stage_seconds", "Time of a prediction, by stage.", ["stage"], buckets=_SECONDS, registry=registry)
        self._errors = {code: errors.labels(code) for code in ERRORS}
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._seconds = Histogram("slipway_predict_seconds", "Time of a prediction.", buckets=_SECONDS, registry=registry)
        self._batch_size = Histogram("slipway_batch_size", "Rows in a batch.", buckets=_ROWS, registry=registry)
        self._gone = Counter("slipway_clients_gone", "Requests whose caller hung up before they were complete.", registry=registry)
        kept = Counter("slipway_kept_requests", "Sampled requests, by whether they were kept.", ["outcome"], registry=registry)
        self._kept = {outcome: kept.labels(outcome) for outcome in OUTCOMES}
        answers = Counter("slipway_predictions", "Requests that a model answered, by its place in a rollout.", ["slot"], registry=registry)
        self._answers = {slot: answers.labels(slot) for slot in SLOTS}
        swaps = Counter("slipway_swaps", "What became of models that were rolled out.", ["outcome"], registry=registry)
        self._swaps = {outcome: swaps.labels(outcome) for outcome in SWAPPED}
        shadowed = Counter("slipway_shadow", "Copies of requests, by how the candidate answered them.", ["outcome"], registry=registry)
        self._shadowed = {outcome: shadowed.labels(outcome) for outcome in SHADOWED}
        self._share = Gauge(
            "slipway_candidate_share", "Share of the requests that a canary answers.", multiprocess_mode="livemax", registry=registry
        )
        self._queue = Gauge("slipway_queue_depth", "Requests decoding, waiting or running.", multiprocess_mode="livesum", registry=registry)
        self._ready = Gauge("slipway_ready", "Workers that are ready.", multiprocess_mode="livesum", registry=registry)
        labels = ["model_version", "task", "backend", "provider", "precision", "variant", "requested_provider", "requested_variant"]
        self._info = Gauge(
            "slipway_model_info", "1 for the model that is ready, and how it runs.", labels, multiprocess_mode="livemax", registry=registry
        )
        self._shown: Gauge | None = None

    def answered(self, route: str, status: int) -> None:
        """Count an answer; `route` is one of the front's own, never a path that a caller made up."""
        self._requests.labels(route, str(status)).inc()

    def refused(self, code: str) -> None:
        """Count an error by its code."""
        self._errors[code].inc()

    def client_gone(self) -> None:
        """Count a caller that hung up."""
        self._gone.inc()

    def kept(self, outcome: str, num_requests: int) -> None:
        """Count what became of requests that were to be kept; `outcome` is one of OUTCOMES. Any thread may call it."""
        self._kept[outcome].inc(num_requests)

    def answer(self, slot: str) -> None:
        """Count a request that the model in that slot answered; one of SLOTS."""
        self._answers[slot].inc()

    def swap(self, outcome: str) -> None:
        """Count what became of a candidate. One worker does, whoever sees it first."""
        self._swaps[outcome].inc()

    def shadowed(self, outcome: str) -> None:
        """Count a copy of a request. Any thread may call it."""
        self._shadowed[outcome].inc()
        if outcome in ("agrees", "differs"):
            self._answers["shadow"].inc()

    def candidate_share(self, share: float) -> None:
        """Set the share of the requests that a canary answers, 0 where there is none."""
        self._share.set(share)

    def stage(self, stage: str, seconds: float) -> None:
        """Note how long a stage of one prediction took."""
        self._stages[stage].observe(seconds)

    def predicted(self, seconds: float) -> None:
        """Note how long a whole prediction took."""
        self._seconds.observe(seconds)

    def batch(self, num_rows: int) -> None:
        """Note the size of a batch that ran."""
        self._batch_size.observe(num_rows)

    def queue_depth(self, num_requests: int) -> None:
        """Set the number of requests between decoding and answer."""
        self._queue.set(num_requests)

    def model(self, model: ServedModel | None) -> None:
        """Show which model is ready, or that none is."""
        self._ready.set(1 if model else 0)
        if self._shown:
            self._shown.set(0)
        if model:
            actual, requested = model.selection.actual, model.selection.requested
            execution = (actual.backend, actual.provider, actual.precision, actual.variant, requested["provider"], requested["variant"])
            self._shown = self._info.labels(model.version, model.bundle.manifest.task, *execution)
            self._shown.set(1)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, summed over the workers of this server."""
        if _MULTIPROCESS not in os.environ:
            return _without_former_models(generate_latest(self._registry))
        _forget_dead_workers(Path(os.environ[_MULTIPROCESS]))
        summed = CollectorRegistry()
        multiprocess.MultiProcessCollector(summed)  # type: ignore[no-untyped-call]
        return _without_former_models(generate_latest(summed))


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
    atexit.register(shutil.rmtree, own, ignore_errors=True)


def tether_to_server() -> None:
    """Called by a worker: it ends with the server that started it, which otherwise leaves it on the port when killed."""
    if _SERVER_DIRECTORY in os.environ:
        tether_to(int(Path(os.environ[_SERVER_DIRECTORY]).name))


def _enter_server_directory() -> None:
    if _SERVER_DIRECTORY in os.environ:
        os.environ[_MULTIPROCESS] = os.environ[_SERVER_DIRECTORY]  # read again whenever a metric is made


def _without_former_models(exposition: bytes) -> bytes:
    """Without the models that were swapped out, whose series cannot be removed while several processes count: each swap would leave one."""
    lines = exposition.splitlines(keepends=True)
    return b"".join(line for line in lines if not (line.startswith(b"slipway_model_info{") and line.endswith(b" 0.0\n")))


def _forget_dead_workers(directory: Path) -> None:
    """Their gauges, that is: what they counted stays."""
    for worker in {int(file.stem.rpartition("_")[2]) for file in directory.glob("gauge_live*.db")}:
        if not is_alive(worker):
            multiprocess.mark_process_dead(worker, str(directory))  # type: ignore[no-untyped-call]
