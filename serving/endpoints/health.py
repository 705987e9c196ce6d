"""For operators and their tools: is the process alive, is it ready, and how does it fare."""

import asyncio

from serving.api_docs.schemas import TEXT
from serving.http.responses import Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.worker import ModelWorker

PROBES = ("/livez", "/healthz", "/readyz")
_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": TEXT, "model_version": TEXT},
}
_ALIVE = Operation("Whether the process can answer at all.", answers={"application/json": _STATUS})
_READY = Operation(
    "Whether a model is ready; if not, why.",
    answers={"application/json": _STATUS},
    errors=("not_ready",),
)
_METRICS = Operation(
    "The metrics of all workers, in Prometheus' text format.", answers={"text/plain": TEXT}
)


def routes(worker: ModelWorker) -> Routes:
    """`/livez`, `/healthz`, `/readyz` and `/metrics`."""

    async def alive(request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(request: Request) -> Response:
        return json_response({"status": "ready", "model_version": worker.require_ready().version})

    async def metrics(request: Request) -> Response:
        body = await asyncio.to_thread(worker.exposition)
        return Response(200, body, worker.metrics.content_type)

    return {
        "/livez": Route(READING, alive, "open", always(_ALIVE)),
        "/healthz": Route(READING, alive, "open", always(_ALIVE)),
        "/readyz": Route(READING, ready, "open", always(_READY)),
        "/metrics": Route(READING, metrics, "operator", always(_METRICS)),
    }
