"""`GET /status`: how the service fares."""

from collections.abc import Collection

from serving.api_docs.schemas import ANYTHING
from serving.http.responses import Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.status import Status
from serving.worker import ModelWorker

_STATUS = Operation(
    "How the service fares: model, traffic, drift, feedback, rollout, GPUs.",
    answers={"application/json": ANYTHING},
)


def routes(worker: ModelWorker, asking: Collection[str]) -> Routes:
    """`/status`; `asking` are the routes whose requests count as traffic."""
    status = Status(worker, asking)

    async def read(request: Request) -> Response:
        return json_response(await status.read())

    return {"/status": Route(READING, read, "caller", always(_STATUS))}
