"""Runs the application and a model worker in this process, without a socket."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from slipway.serving.api_docs.openapi import openapi
from slipway.serving.app import Application, all_routes
from slipway.serving.engine_rebuild.extension import EngineRebuild
from slipway.serving.extensions import EXTENSIONS, SECTIONS
from slipway.serving.http.responses import ERRORS
from slipway.serving.http.routes import find_route
from slipway.serving.models.live_model import LiveModel
from slipway.serving.rollout.candidate.canary import Canary
from slipway.serving.rollout.reconciler import RolloutReconciler
from slipway.serving.settings import Settings, read_settings
from slipway.serving.worker import ModelWorker

Work = Callable[[httpx.AsyncClient, ModelWorker], Coroutine[Any, Any, None]]


def read_all_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings of the service and of every extension."""
    return read_settings(SECTIONS, environment)


def full_worker(settings: Settings, **options: Any) -> ModelWorker:
    """Return a worker with every extension."""
    return ModelWorker(settings, EXTENSIONS, **options)


def reconciler_of(worker: ModelWorker) -> RolloutReconciler:
    """Return the part of a worker that reconciles the rollout state."""
    start: Any = worker.hooks["rollout"].start
    reconciler: RolloutReconciler = start.__self__
    return reconciler


def is_shadowing(worker: ModelWorker) -> bool:
    """Return True if a candidate predicts copies of the worker's requests."""
    trial = reconciler_of(worker)._trial
    return trial is not None and trial.shadow is not None


def rebuild_of(worker: ModelWorker) -> EngineRebuild:
    """Return the part of a worker that rebuilds the engine."""
    start: Any = worker.hooks["engine_rebuild"].start
    rebuild: EngineRebuild = start.__self__
    return rebuild


def canary_of(worker: ModelWorker) -> Any:
    """Return the canary that receives a share of the requests, or None."""
    assert worker.router is None or isinstance(worker.router, Canary)
    return worker.router


def status_part(worker: ModelWorker, name: str) -> Any:
    """Return one part of `GET /status`; None if it is switched off."""
    (read,) = (hooks.status[name] for hooks in worker.hooks.values() if name in hooks.status)
    return read()


def set_status_part(
    worker: ModelWorker, extension: str, name: str, read: Callable[[], dict[str, Any]]
) -> None:
    """Replace a part of `GET /status` by the result of `read`."""
    hooks = worker.hooks[extension]
    worker.hooks[extension] = replace(hooks, status={**hooks.status, name: read})


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing, in place of BentoML's application."""
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"behind"})


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ModelWorker]]:
    worker = full_worker(settings)
    worker.start()
    await worker.loaded()
    transport = httpx.ASGITransport(Application(behind, worker), raise_app_exceptions=True)

    async def check(response: httpx.Response) -> None:
        require_documented(worker, response)

    hooks = {"response": [check]}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", event_hooks=hooks
    ) as client:
        yield client, worker
    await worker.stop()


def require_documented(worker: ModelWorker, response: httpx.Response) -> None:
    """Raise AssertionError if `/docs.json` does not list the response's status for its path."""
    routes = all_routes(worker)
    method, found = response.request.method, find_route(routes, response.request.url.path)
    if found is None or routes[found].handler is None or method not in routes[found].methods:
        return
    bundle = worker.model.bundle.manifest if worker.model else None
    paths = openapi({found: routes[found]}, bundle, None, worker.caller_check)["paths"]
    (item,) = paths.values()
    documented = item["get" if method == "HEAD" else method.lower()]["responses"]
    assert str(response.status_code) in documented, f"{method} {found}: {response.status_code}"


def run(settings: Settings, work: Work) -> None:
    async def main() -> None:
        async with serving(settings) as (client, worker):
            await work(client, worker)

    asyncio.run(asyncio.wait_for(main(), 30))


async def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until `is_so()` is true. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.01)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response, after checking its common shape."""
    content = response.json()
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert list(error) == ["code", "message", "field", "request_id"]
    assert response.status_code == ERRORS[error["code"]]
    assert response.headers["x-request-id"] == error["request_id"]
    assert len(error["message"]) > 20
    return error


def metric(worker: ModelWorker, line: str) -> float:
    found = re.search(
        rf"^{re.escape(line)} (\S+)$", worker.metrics.exposition().decode(), re.MULTILINE
    )
    return float(found.group(1)) if found else 0.0


def put_in_place_of(live: LiveModel, run: Callable[[NDArray[Any]], Any]) -> None:
    """Make `run` compute all batches of a live model, on its thread."""
    live.batcher._run, live.batcher.quick_rows = run, 0


class SlowModel:
    """Replaces the batcher of a live model: records each batch and waits until it is released."""

    def __init__(self, worker: ModelWorker) -> None:
        assert worker._live
        self._fast, self.sizes, self.gate = (
            worker._live.batcher._run,
            list[int](),
            threading.Event(),
        )
        put_in_place_of(worker._live, self.run)

    def run(self, batch: NDArray[Any]) -> Any:
        self.sizes.append(len(batch))
        assert self.gate.wait(10)
        return self._fast(batch)


async def occupied(
    client: httpx.AsyncClient, model: SlowModel, content: bytes, headers: dict[str, str]
) -> "asyncio.Task[httpx.Response]":
    """Start a request, and return its task once the request is in the model."""
    task = asyncio.create_task(client.post("/predict", content=content, headers=headers))
    while not model.sizes:
        await asyncio.sleep(0.001)
    return task
