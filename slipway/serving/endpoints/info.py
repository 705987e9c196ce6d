"""Read-only endpoints about the service: probes, metrics, model info and status.

`GET /status` is one JSON object, which the page at `/` shows. Each extension adds its parts; a
part that is switched off is null.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable
from time import monotonic
from typing import Any

from prometheus_client.metrics_core import Metric

from slipway.serving.extension import StatusPart
from slipway.serving.http.responses import Response, json_response
from slipway.serving.http.routes import READING, Operation, Request, Route, Routes, always
from slipway.serving.schemas import ANYTHING, TEXT
from slipway.serving.settings import redact_paths
from slipway.serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")

PROBES = ("/livez", "/healthz", "/readyz")
# Parts of the model info that may contain server paths. Other parts are the model's own: its
# labels, columns and categories may look like paths.
_REDACTED = (
    "execution",
    "choice",
    "left_out",
    "certificate",
    "target_certificate",
    "lineage",
    "rebuild",
    "rolled_out",
)
_STATUS_SCHEMA = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": TEXT, "model_version": TEXT},
}
_ALIVE = Operation("Liveness: the process answers.", answers={"application/json": _STATUS_SCHEMA})
_READY = Operation(
    "Readiness: a model is ready; if not, the reason.",
    answers={"application/json": _STATUS_SCHEMA},
    errors=("not_ready",),
)
_METRICS = Operation(
    "Metrics of all workers, in Prometheus' text format, or with traces in that of OpenMetrics.",
    answers={"text/plain": TEXT, "application/openmetrics-text": TEXT},
)
_MODEL = Operation(
    "Model info, with the certificate.",
    answers={"application/json": ANYTHING},
    errors=("not_ready",),
)
_STATUS = Operation(
    "Status: model, traffic, drift, feedback, rollout, GPUs.",
    answers={"application/json": ANYTHING},
)
_MAX_AGE_S = 1.0
_PERCENTILES = (50, 95, 99)
_TOTALS = {
    "predictions": "slipway_batch_size_sum",
    "queue_depth": "slipway_queue_depth",
    "expired": "slipway_expired_total",
    "workers_ready": "slipway_ready",
}


def routes(worker: ModelWorker) -> Routes:
    """Return the routes of the probes, `/metrics` and `/model`."""

    async def alive(request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(request: Request) -> Response:
        return json_response({"status": "ready", "model_version": worker.require_ready().version})

    async def metrics(request: Request) -> Response:
        own, accepted = worker.metrics, request.headers.get(b"accept", b"")
        if own.has_exemplars and b"application/openmetrics-text" in accepted:
            return Response(200, await asyncio.to_thread(own.open_metrics), own.open_metrics_type)
        return Response(200, await asyncio.to_thread(own.exposition), own.content_type)

    async def model(request: Request) -> Response:
        info = worker.model_info()
        for part in _REDACTED:
            if part in info:
                info[part] = redact_paths(info[part], worker.settings)
        return json_response(info)

    return {
        "/livez": Route(READING, alive, "open", always(_ALIVE)),
        "/healthz": Route(READING, alive, "open", always(_ALIVE)),
        "/readyz": Route(READING, ready, "open", always(_READY), is_probe=True),
        "/metrics": Route(READING, metrics, "operator", always(_METRICS)),
        "/model": Route(READING, model, "caller", always(_MODEL)),
    }


def status_routes(worker: ModelWorker, counted_routes: Collection[str]) -> Routes:
    """Return the route `/status`. Only requests to `counted_routes` count as traffic."""
    status = Status(worker, counted_routes)

    async def read(request: Request) -> Response:
        return json_response(await status.read())

    return {"/status": Route(READING, read, "caller", always(_STATUS))}


class Status:
    """The status of the service, cached for a second and computed outside the event loop."""

    def __init__(self, worker: ModelWorker, counted_routes: Collection[str]) -> None:
        self._worker = worker
        self._counted_routes = counted_routes
        self._content: dict[str, Any] = {}
        self._read_at = -_MAX_AGE_S
        self._lock = asyncio.Lock()

    async def read(self) -> dict[str, Any]:
        """Return the status, at most a second old. Concurrent callers share one computation."""
        async with self._lock:
            if monotonic() - self._read_at >= _MAX_AGE_S:
                self._content = await asyncio.to_thread(self._compose)
                self._read_at = monotonic()
            return self._content

    def _compose(self) -> dict[str, Any]:
        model = self._worker.model
        content: dict[str, Any] = {
            "model": {
                "ready": model is not None,
                "reason": None if model else self._worker.reason,
                "version": model.version if model else None,
                "task": model.bundle.manifest.task if model else None,
            },
            "traffic": summarize_traffic(self._worker.metrics.collect(), self._counted_routes),
        }
        for hooks in self._worker.hooks.values():
            for name, read in hooks.status.items():
                content[name] = self._read_part(name, read)
        return content

    def _read_part(self, name: str, read: StatusPart) -> dict[str, Any] | None:
        try:
            return redact_paths(read(), self._worker.settings)  # type: ignore[no-any-return]
        except Exception:  # the other parts must still be shown
            logger.exception("cannot read the status of %s; /status marks it as failed", name)
            return {"failed": True}


def summarize_traffic(
    metrics: Iterable[Metric], counted_routes: Collection[str] | None = None
) -> dict[str, Any]:
    """Summarize the traffic since the service started, over all workers.

    `requests_by_code` covers only `counted_routes`; None counts all. `predictions` are rows that a
    model answered, explanations included. `latency_ms` holds percentiles of predictions, None
    before the first. `latency_buckets` is their cumulative histogram: [upper bound in seconds,
    count], the last bound None. The difference of two readings gives percentiles in between.
    """
    requests: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    buckets: list[tuple[float, float]] = []
    totals = dict.fromkeys(_TOTALS.values(), 0)
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name == "slipway_requests_total":
            if counted_routes is None or sample.labels["route"] in counted_routes:
                requests[sample.labels["code"]] += int(sample.value)
        elif sample.name == "slipway_errors_total" and sample.value:
            errors[sample.labels["error"]] += int(sample.value)
        elif sample.name == "slipway_prediction_duration_seconds_bucket":
            buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name in totals:
            totals[sample.name] = int(sample.value)
    buckets.sort()
    return {
        "requests_by_code": dict(sorted(requests.items())),
        "errors_by_code": dict(errors.most_common()),
        **{name: totals[sample] for name, sample in _TOTALS.items()},
        "latency_ms": {f"p{percent}": percentile_ms(buckets, percent) for percent in _PERCENTILES},
        "latency_buckets": [
            [bound if math.isfinite(bound) else None, int(count)] for bound, count in buckets
        ],
    }


def percentile_ms(buckets: list[tuple[float, float]], percent: int) -> float | None:
    """Interpolate a percentile within its bucket, as Prometheus' histogram_quantile does.

    `buckets` are (upper bound in seconds, cumulative count) in order. A percentile above the last
    finite bound is reported as that bound. Returns None without values.
    """
    if not buckets or not buckets[-1][1]:
        return None
    rank = percent / 100 * buckets[-1][1]
    lower_bound, below = 0.0, 0.0
    for bound, count in buckets:
        if math.isinf(bound):
            break
        if count >= rank:
            fraction = (rank - below) / (count - below)
            return 1000 * (lower_bound + (bound - lower_bound) * fraction)
        lower_bound, below = bound, count
    return 1000 * lower_bound
