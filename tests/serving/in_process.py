"""The application and a model worker in this process, without a socket."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from serving.app import Application
from serving.http.responses import ERRORS
from serving.models.live_model import LiveModel
from serving.settings import Settings
from serving.worker import ModelWorker

Work = Callable[[httpx.AsyncClient, ModelWorker], Coroutine[Any, Any, None]]


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for BentoML's application."""
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"behind"})


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ModelWorker]]:
    worker = ModelWorker(settings)
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
