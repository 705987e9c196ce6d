"""The application and a model worker in this process, without a socket."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from serving.app import Application
from serving.engine_rebuild.extension import EngineRebuild
from serving.extensions import EXTENSIONS, SECTIONS
from serving.http.responses import ERRORS
from serving.models.live_model import LiveModel
from serving.rollout.canary import Canary
from serving.rollout.reconciler import RolloutReconciler
from serving.settings import Settings, read_settings
from serving.worker import ModelWorker

Work = Callable[[httpx.AsyncClient, ModelWorker], Coroutine[Any, Any, None]]


def read_all_settings(environment: Mapping[str, str]) -> Settings:
    """The settings of the service and of every extension."""
    return read_settings(SECTIONS, environment)


def full_worker(settings: Settings, **options: Any) -> ModelWorker:
    """A worker with every extension."""
    return ModelWorker(settings, EXTENSIONS, **options)


def reconciler_of(worker: ModelWorker) -> RolloutReconciler:
    """The part of a worker that follows the rollout state."""
    start: Any = worker.hooks["rollout"].start
    reconciler: RolloutReconciler = start.__self__
    return reconciler


def rebuild_of(worker: ModelWorker) -> EngineRebuild:
    """The part of a worker that rebuilds the engine."""
    start: Any = worker.hooks["engine_rebuild"].start
    rebuild: EngineRebuild = start.__self__
    return rebuild


def canary_of(worker: ModelWorker) -> Any:
    """The canary that gets a share of the requests; None if there is none."""
    assert worker.router is None or isinstance(worker.router, Canary)
    return worker.router


def status_part(worker: ModelWorker, name: str) -> Any:
    """One part of `GET /status`; None if it is switched off."""
    (read,) = (hooks.status[name] for hooks in worker.hooks.values() if name in hooks.status)
    return read()


def set_status_part(
    worker: ModelWorker, extension: str, name: str, read: Callable[[], dict[str, Any]]
) -> None:
    """Put `read` in place of what an extension shows in `GET /status`."""
    hooks = worker.hooks[extension]
    worker.hooks[extension] = replace(hooks, status={**hooks.status, name: read})


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for BentoML's application."""
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"behind"})


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ModelWorker]]:
    worker = full_worker(settings)
    worker.start()
    await worker.loaded()
    transport = httpx.ASGITransport(Application(behind, worker), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, worker
    await worker.stop()


def run(settings: Settings, work: Work) -> None:
    async def main() -> None:
        async with serving(settings) as (client, worker):
            await work(client, worker)

    asyncio.run(asyncio.wait_for(main(), 30))


async def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for it; AssertionError where it takes longer."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.01)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that the answer has the one shape."""
    content = response.json()
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert list(error) == ["code", "message", "field", "request_id"]
    assert response.status_code == ERRORS[error["code"]]
    assert response.headers["x-request-id"] == error["request_id"]
    assert len(error["message"]) > 20
    return error


def metric(worker: ModelWorker, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", worker.exposition().decode(), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def put_in_place_of(live: LiveModel, run: Callable[[NDArray[Any]], Any]) -> None:
    """Have `run` answer the batches of a live model, all of them on its thread: how long `run` takes was not measured."""
    live.batcher._run, live.batcher.quick_rows = run, 0
