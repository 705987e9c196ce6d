"""For operators and their tools: is the process alive, is it ready, and how does it fare."""

import asyncio

from serving.inference import Inference
from serving.responses import Response, json_response
from serving.routes import READING, Request, Route, Routes


def routes(inference: Inference) -> Routes:
    """`/livez`, `/healthz`, `/readyz` and `/metrics`."""

    async def alive(request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(request: Request) -> Response:
        return json_response({"status": "ready", "model_version": inference.require_ready().version})

    async def metrics(request: Request) -> Response:
        body = await asyncio.to_thread(inference.exposition)
        return Response(200, body, inference.monitoring.content_type)

    return {
        "/livez": Route(READING, alive, "open"),
        "/healthz": Route(READING, alive, "open"),
        "/readyz": Route(READING, ready, "open"),
        "/metrics": Route(READING, metrics, "operator"),
    }
