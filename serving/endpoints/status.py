"""`GET /status`: how the service fares."""

from collections.abc import Collection

from serving.inference import Inference
from serving.responses import Response, json_response
from serving.routes import READING, Operation, Request, Route, Routes, always
from serving.schemas import ANYTHING
from serving.status import Status

_STATUS = Operation("How the service fares: model, traffic, drift, feedback, rollout, GPUs.", answers={"application/json": ANYTHING})


def routes(inference: Inference, asking: Collection[str]) -> Routes:
    """`/status`; `asking` are the routes whose requests count as traffic."""
    status = Status(inference, asking)

    async def read(request: Request) -> Response:
        return json_response(await status.read())

    return {"/status": Route(READING, read, "caller", always(_STATUS))}
