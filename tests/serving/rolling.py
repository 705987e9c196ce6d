"""Candidates on disk that answer otherwise than the stable model, what each of them answers, and orders to one worker in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from numpy.typing import NDArray

from serving.app import Application
from serving.rollout import commands
from serving.rollout.state import RolloutPlan, read_rollout
from serving.settings import Settings
from serving.worker import ModelWorker
from slipway.artifacts.bundle import Metric
from slipway.inputs.images import array_from_bytes
from tests.serving.bundles import CONTRACT, WEIGHTS, certify, classifier, picture, write_bundle
from tests.serving.in_process import behind, full_worker, reconciler_of

PNG = {"content-type": "image/png"}
PICTURES = [picture(number) for number in range(8)]


def scaled_classifier(factor: float) -> onnx.ModelProto:
    """`classifier` with its weights times `factor`: the labels stay while it is above 0, the probabilities do not."""
    graph = classifier()
    graph.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array((WEIGHTS * factor).astype(np.float32), "weights")
    )
    return graph


def scaled_probabilities(factor: float) -> NDArray[np.float32]:
    """(PICTURES, labels): what `scaled_classifier` answers."""
    pixels = np.stack([array_from_bytes(payload, CONTRACT) for payload in PICTURES])
    logits = pixels.reshape(len(pixels), -1).astype(np.float32) @ (WEIGHTS * np.float32(factor))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    answer: NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return answer


def failing_classifier(threshold: float) -> onnx.ModelProto:
    """`classifier` that answers NaN for pictures whose first value is `threshold` (0 to 255) or more; not in warm-up's first rows."""
    helper = onnx.helper
    graph = classifier()
    nodes = [
        helper.make_node("Gather", ["flat", "first"], ["corner"], axis=1),
        helper.make_node("Sub", ["limit", "corner"], ["distance"]),
        helper.make_node("Sqrt", ["distance"], ["root"]),  # NaN below 0
        helper.make_node("Sub", ["root", "root"], ["nothing"]),  # 0, or NaN
        helper.make_node("Add", ["logits", "nothing"], ["spoilt"]),
    ]
    graph.graph.node[-1].input[0] = "spoilt"
    softmax = graph.graph.node.pop()
    graph.graph.node.extend([*nodes, softmax])
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "first"))
    graph.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array(threshold, np.float32), "limit")
    )
    return graph


def write_candidate(folder: Path, graph: onnx.ModelProto | None = None, **changes: Any) -> Path:
    """A certified bundle in `folder`/bundle, beside its certificate; `changes` replace fields of its manifest."""
    certify(folder / "certificate.json", write_bundle(folder / "bundle", graph, **changes))
    return folder / "bundle"


@asynccontextmanager
async def following(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ModelWorker]]:
    """a model worker in this process that follows the state, and a client."""
    worker = full_worker(settings)
    worker.start()
    await worker.loaded()
    transport = httpx.ASGITransport(Application(behind, worker), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=PNG
        ) as client:
            await settle(worker, lambda: reconciler_of(worker).num_reports > 0)
            yield client, worker
    finally:
        await worker.stop()


async def settle(worker: ModelWorker, is_done: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until it is so; the state goes into the message."""
    async with asyncio.timeout(seconds):
        while not is_done():
            await asyncio.sleep(0.02)


class Callers:
    """They ask all the time; every answer is compared with what the model that it names answers."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        expected: dict[str, NDArray[np.float32]],
        num_callers: int = 2,
        pause: float = 0.005,
    ) -> None:
        self._client, self._expected, self._pause = client, expected, pause
        self._going = True
        self.statuses: list[int] = []
        self.versions: list[str] = []
        self.wrong = 0
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(num_callers)]

    async def _ask(self, number: int) -> None:
        while self._going:
            row = (number + len(self.statuses)) % len(PICTURES)
            response = await self._post(row)
            self.statuses.append(response.status_code)
            answer = response.json()
            version = answer.get("model_version", "none")
            self.versions.append(version)
            found = list(answer.get("probabilities", {}).values())
            self.wrong += not (
                version in self._expected
                and np.allclose(found, self._expected[version][row], atol=1e-5)
            )
            await asyncio.sleep(self._pause)

    async def _post(self, row: int) -> httpx.Response:
        return await self._client.post("/predict", content=PICTURES[row], headers=PNG)

    async def end(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)


Work = Callable[[Any, ModelWorker], Coroutine[Any, Any, None]]
QUICK = RolloutPlan(steps=(0.2, 1.0), hold_s=0.0, hold_requests=20)


def run(settings: Settings, work: Work, seconds: float = 60) -> None:
    async def main() -> None:
        async with following(settings) as (client, worker):
            await work(client, worker)

    asyncio.run(asyncio.wait_for(main(), seconds))


async def propose(worker: ModelWorker, *arguments: Any, **options: Any) -> None:
    await asyncio.to_thread(commands.propose, worker.settings, *arguments, **options)


async def serves(worker: ModelWorker, version: str) -> None:
    """Wait until it is the stable model, and nothing is on its way."""
    await settle(worker, lambda: worker.model is not None and worker.model.version == version)
    await settle(worker, lambda: read_rollout(worker.settings.state).candidate is None)


def salt_of(settings: Settings) -> str:
    """What the requests of the candidate are drawn with."""
    candidate = read_rollout(settings.state).candidate
    assert candidate
    return candidate.salt


def last_event(worker: ModelWorker) -> tuple[str, str]:
    event = read_rollout(worker.settings.state).events[-1]
    return event.what, event.reason


def low_accuracy(value: float) -> dict[str, Any]:
    return {
        "metrics": {
            "accuracy": Metric(value=value, low=value, high=value, confidence=0.95, rows=100)
        }
    }
