"""An expired request never reaches the model, wherever it is when its deadline passes; and it is counted."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from serving.requests import decoding
from serving.worker import ModelWorker
from slipway.inputs.images import ImageContract, array_from_bytes
from tests.serving.bundles import picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, put_in_place_of, run

PNG = {"content-type": "image/png"}
ROWS = {"content-type": "application/json"}


class SlowModel:
    """In place of a live model's own; notes every batch and waits until it is let go."""

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
    """A request that is in the model."""
    task = asyncio.create_task(client.post("/predict", content=content, headers=headers))
    while not model.sizes:
        await asyncio.sleep(0.001)
    return task


def table_body(num_rows: int) -> bytes:
    return json.dumps({"rows": [table_row(number) for number in range(num_rows)]}).encode()


@pytest.mark.parametrize(
    ("kind", "num_rows"), [("an image", 1), ("rows", 3), ("rows that are parsed on a thread", 60)]
)
def test_a_request_that_expires_in_the_queue_never_reaches_the_model(
    make_settings: MakeSettings, request: pytest.FixtureRequest, kind: str, num_rows: int
) -> None:
    if kind != "an image":
        request.getfixturevalue("certified_table")
    content, headers = (picture(), PNG) if kind == "an image" else (table_body(num_rows), ROWS)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        model = SlowModel(worker)
        first = await occupied(
            client, model, content if kind == "an image" else table_body(1), headers
        )
        late = await asyncio.gather(
            *(client.post("/predict", content=content, headers=headers) for _ in range(3))
        )
        assert {error_of(answer)["code"] for answer in (*late, await first)} == {
            "deadline_exceeded"
        }
        model.gate.set()
        after = await client.post("/predict", content=content, headers=headers)
        assert after.status_code == 200
        assert sum(model.sizes) == 1 + num_rows  # the first one's and the last one's rows
        assert metric(worker, "slipway_expired_total") == 3  # the first was in the model already
        assert metric(worker, 'slipway_errors_total{error="deadline_exceeded"}') == 4

    run(make_settings(request_timeout_s=0.4), work)


def test_images_that_expire_while_they_wait_to_be_decoded_are_never_decoded(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), list[int]()

    def decode_when_let(image: bytes, contract: ImageContract) -> NDArray[np.uint8]:
        begun.append(len(image))
        assert gate.wait(10)
        return array_from_bytes(image, contract)

    monkeypatch.setattr(decoding, "array_from_bytes", decode_when_let)
    large = picture(1, (200, 200), "BMP")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        num_threads = vars(worker._live.decoder)["_threads"]._max_workers
        answers = await asyncio.gather(
            *(client.post("/predict", content=large, headers=PNG) for _ in range(num_threads + 4)),
            client.post("/predict", files=[("image", ("x.bmp", large, "image/bmp"))] * 5),
        )
        assert {error_of(answer)["code"] for answer in answers} == {"deadline_exceeded"}
        assert metric(worker, "slipway_expired_total") == len(answers)
        gate.set()
        assert (await client.post("/predict", content=large, headers=PNG)).status_code == 200
        assert (
            len(begun) == num_threads + 1
        )  # what the threads had begun, and the last one: nothing that waited for a thread
        assert metric(worker, "slipway_batch_size_sum") == 1

    run(make_settings(request_timeout_s=0.3), work)


@pytest.mark.nightly
def test_an_overloaded_service_spends_its_model_on_requests_that_are_still_waited_for(
    certified: Path, make_settings: MakeSettings
) -> None:
    """Ten times what the model can do, within a deadline of ten batches: it is answered, and nothing is run for nobody."""

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        fast, run_rows = worker._live.batcher._run, list[int]()

        def slowly(batch: NDArray[Any]) -> Any:
            run_rows.append(len(batch))
            time.sleep(0.05)
            return fast(batch)

        put_in_place_of(worker._live, slowly)
        answers = await asyncio.gather(
            *(client.post("/predict", content=picture(n), headers=PNG) for n in range(100))
        )
        num_answered = sum(answer.status_code == 200 for answer in answers)
        assert {answer.status_code for answer in answers} == {200, 504}
        assert (
            num_answered <= sum(run_rows) <= num_answered + 5
        )  # the one in the model, and those whose answer came with the deadline
        assert metric(worker, "slipway_expired_total") == 100 - sum(run_rows)

    run(make_settings(request_timeout_s=0.5, max_batch_size=1), work)
