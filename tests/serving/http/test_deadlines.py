"""Requests whose deadline has passed never reach the model, and are counted."""

import asyncio
import json
import threading

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.serving.requests import decoding
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import SlowModel, error_of, metric, occupied, run

PNG = {"content-type": "image/png"}
ROWS = {"content-type": "application/json"}


def table_body(num_rows: int) -> bytes:
    return json.dumps({"rows": [table_row(number) for number in range(num_rows)]}).encode()


@pytest.mark.parametrize(
    ("kind", "num_rows"), [("an image", 1), ("rows", 3), ("rows that are parsed on a thread", 60)]
)
def test_a_request_whose_deadline_passes_in_the_queue_never_reaches_the_model(
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
        assert metric(worker, "slipway_queue_wait_seconds_count") == 3 + 1
        assert metric(worker, "slipway_queue_wait_seconds_sum") > 3 * 0.2

    run(make_settings(request_timeout_s=0.4), work)


def test_images_whose_deadline_passes_before_decoding_are_never_decoded(
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
def test_an_overloaded_service_predicts_only_requests_within_their_deadline(
    make_settings: MakeSettings,
) -> None:
    """Requests of two moments wait; when the earlier ones expire, only the later ones are run."""
    timeout_s, num_early, num_late = 4.0, 95, 5

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        model = SlowModel(worker)

        def ask(number: int) -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(
                client.post("/predict", content=picture(number), headers=PNG)
            )

        early = [await occupied(client, model, picture(), PNG), *map(ask, range(num_early))]
        await asyncio.sleep(timeout_s / 2)
        late = [ask(number) for number in range(num_late)]
        expired = await asyncio.gather(*early)
        model.gate.set()
        answered = await asyncio.gather(*late)
        assert {error_of(answer)["code"] for answer in expired} == {"deadline_exceeded"}
        assert {answer.status_code for answer in answered} == {200}
        assert model.sizes == [1] * (1 + num_late)  # the first was in the model already
        assert metric(worker, "slipway_expired_total") == num_early

    run(make_settings(request_timeout_s=timeout_s, max_batch_size=1), work)
