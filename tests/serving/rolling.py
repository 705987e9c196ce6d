"""Candidates whose predictions differ from the stable model's, and rollout commands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.inputs.images import array_from_bytes
from slipway.serving.app import Application
from slipway.serving.rollout import commands
from slipway.serving.rollout.state import RolloutPlan, read_rollout
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import CONTRACT, WEIGHTS, certify, classifier, picture, write_bundle
from tests.serving.in_process import behind, canary_of, full_worker, reconciler_of

PNG = {"content-type": "image/png"}
PICTURES = [picture(number) for number in range(8)]


def scaled_classifier(factor: float) -> onnx.ModelProto:
    """Return `classifier` with scaled weights; a positive `factor` keeps its labels."""
    graph = classifier()
    graph.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array((WEIGHTS * factor).astype(np.float32), "weights")
    )
    return graph


def scaled_probabilities(factor: float) -> NDArray[np.float32]:
    """Compute the predictions of `scaled_classifier`, (PICTURES, labels)."""
    pixels = np.stack([array_from_bytes(payload, CONTRACT) for payload in PICTURES])
    logits = pixels.reshape(len(pixels), -1).astype(np.float32) @ (WEIGHTS * np.float32(factor))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    answer: NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return answer


def failing_classifier(threshold: float) -> onnx.ModelProto:
    """Return a `classifier` that predicts NaN if the first value of a picture is high.

    High is a value (0 to 255) of at least `threshold`. The first rows of the warm-up are exempt.
    """
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
    """Write a certified bundle to `folder`/bundle; `changes` replace fields of its manifest."""
    certify(folder / "certificate.json", write_bundle(folder / "bundle", graph, **changes))
    return folder / "bundle"


@asynccontextmanager
async def following(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ModelWorker]]:
    """Start a model worker in this process that reconciles the state, and a client."""
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
    """Wait until the condition holds. A failure shows the state of the rollout."""
    async with asyncio.timeout(seconds):
        while not is_done():
            await asyncio.sleep(0.02)


async def settle_evidence(worker: ModelWorker) -> None:
    """Wait until this worker has reported its present counts, and then decided on its report."""
    reconciler = reconciler_of(worker)
    assert reconciler._trial
    counts = reconciler._trial.evidence.counts()
    await settle(
        worker, lambda: reconciler._reported is not None and reconciler._reported.counts == counts
    )
    reconcile, num_rounds = reconciler.reconcile, 0

    async def counted() -> None:
        nonlocal num_rounds
        await reconcile()
        num_rounds += 1

    reconciler.reconcile = counted  # type: ignore[method-assign]
    await settle(worker, lambda: num_rounds > 0)


class Callers:
    """Callers that send continuously, and compare each response with the model that it names."""

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
HALF = RolloutPlan(steps=(0.5,), hold_s=100)
QUICK = RolloutPlan(steps=(0.2, 1.0), hold_s=0.0, hold_requests=20)


def run(settings: Settings, work: Work, seconds: float = 60) -> None:
    async def main() -> None:
        async with following(settings) as (client, worker):
            await work(client, worker)

    asyncio.run(asyncio.wait_for(main(), seconds))


async def propose(worker: ModelWorker, *arguments: Any, **options: Any) -> None:
    await asyncio.to_thread(commands.propose, worker.settings, *arguments, **options)


async def begin_canary(
    worker: ModelWorker, bundle: Path, plan: RolloutPlan = HALF, **options: Any
) -> None:
    """Propose a canary, and wait until it receives requests."""
    await propose(worker, "canary", bundle, plan=plan, **options)
    await settle(worker, lambda: canary_of(worker) is not None)


async def serves(worker: ModelWorker, version: str) -> None:
    """Wait until the version is stable and there is no candidate."""
    await settle(worker, lambda: worker.model is not None and worker.model.version == version)
    await settle(worker, lambda: read_rollout(worker.settings.state).candidate is None)


def salt_of(settings: Settings) -> str:
    """Return the salt that selects the candidate's requests."""
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
