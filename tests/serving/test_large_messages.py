"""Large requests and responses under `/v2` are converted on a thread, and block nothing else."""

import asyncio
import base64
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from slipway.serving.http.responses import Refusal
from slipway.serving.open_inference import extension as v2
from slipway.serving.open_inference.extension import WorkerThread
from slipway.serving.open_inference.messages import InferRequest, response
from slipway.serving.open_inference.tensors import Tensor
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run
from tests.serving.open_inference.infer_requests import HEAD_LENGTH, INFER, error_of

PIXELS = {"name": "image", "shape": [1, 64, 64, 3], "datatype": "UINT8"}
LARGE = json.dumps({"inputs": [PIXELS | {"data": [7] * (64 * 64 * 3)}]}).encode()
OWN = "slipway-translate"


def with_bytes(tensor: dict[str, Any], tail: bytes) -> tuple[bytes, dict[str, str]]:
    """Build a request whose tensor follows its JSON, with the header that declares it."""
    head = json.dumps(
        {"inputs": [tensor | {"parameters": {"binary_data_size": len(tail)}}]}
    ).encode()
    return head + tail, {HEAD_LENGTH: str(len(head))}


def table_tensors(num_rows: int) -> bytes:
    rows = [table_row(number) for number in range(num_rows)]
    datatypes = {
        "age": "FP64",
        "income": "FP64",
        "colour": "BYTES",
        "city": "BYTES",
        "member": "BOOL",
        "since": "BYTES",
    }
    tensors = [
        {
            "name": name,
            "shape": [num_rows],
            "datatype": datatype,
            "data": [row.get(name, "") for row in rows],
        }
        for name, datatype in datatypes.items()
    ]
    return json.dumps({"inputs": tensors}).encode()


def noting_threads(
    monkeypatch: pytest.MonkeyPatch, name: str, gate: threading.Event | None = None
) -> list[str]:
    """Return the thread name of each call of the function `name`; calls wait for the `gate`."""
    threads, called = list[str](), getattr(v2, name)

    def note(*arguments: Any) -> Any:
        threads.append(
            threading.current_thread().name.rpartition("_")[0] or threading.current_thread().name
        )
        assert gate is None or gate.wait(10)
        return called(*arguments)

    monkeypatch.setattr(v2, name, note)
    return threads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


async def begun(threads: list[str]) -> None:
    while not threads:
        await asyncio.sleep(0.001)


ENCODED = base64.b64encode(picture()).decode()
SMALL_IMAGE = json.dumps(
    {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [ENCODED]}]}
).encode()


@pytest.mark.parametrize(
    ("content", "headers", "thread"),
    [
        (SMALL_IMAGE, {}, "MainThread"),
        (*with_bytes(PIXELS, b"\7" * (64 * 64 * 3)), "MainThread"),
        (LARGE, {}, OWN),
        (*with_bytes(PIXELS | {"shape": [1, 600, 1000, 3]}, b"\7" * 1_800_000), OWN),
    ],
    ids=[
        "a small image in JSON",
        "12 KiB of pixels as bytes",
        "as many in JSON",
        "many pixels as bytes",
    ],
)
def test_large_infer_body_is_converted_on_the_thread_and_a_small_one_on_the_event_loop(
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    headers: dict[str, str],
    thread: str,
) -> None:
    read, written = (
        noting_threads(monkeypatch, "parse_request"),
        noting_threads(monkeypatch, "response"),
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.post(INFER, content=content, headers=headers)).status_code == 200
        assert read == [thread]
        assert written == ["MainThread"]

    run(make_settings(), work)


@pytest.mark.usefixtures("certified_table")
@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(3, ("MainThread", "MainThread")), (120, (OWN, "MainThread")), (600, (OWN, OWN))],
)
def test_large_infer_response_is_encoded_on_the_thread_and_equals_that_of_predict(
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    expected: tuple[str, str],
) -> None:
    read, written = (
        noting_threads(monkeypatch, "parse_request"),
        noting_threads(monkeypatch, "response"),
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        rows = [table_row(number) for number in range(num_rows)]
        answers = (await client.post("/predict", json={"rows": rows})).json()["predictions"]
        found = (await client.post(INFER, content=table_tensors(num_rows))).json()["outputs"]
        outputs = {output["name"]: output["data"] for output in found}
        assert outputs["label"] == [answer["label"] for answer in answers]
        assert outputs["probabilities"] == [
            value for answer in answers for value in answer["probabilities"].values()
        ]
        labels = list(answers[0]["probabilities"])
        assert outputs["prediction_set"] == [
            label in answer["prediction_set"] for answer in answers for label in labels
        ]
        assert (*read, *written) == expected

    run(make_settings(), work)


def test_probes_metrics_and_small_requests_are_served_while_large_bodies_wait(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """There are more large bodies than asyncio threads, which answer `/metrics`."""
    threads = noting_threads(monkeypatch, "as_payload", gate)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        waiting = [asyncio.create_task(client.post(INFER, content=LARGE)) for _ in range(40)]
        await begun(threads)
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200
        answer = await client.post(
            "/predict", content=picture(), headers={"content-type": "image/png"}
        )
        assert answer.status_code == 200
        assert not any(task.done() for task in waiting)
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert threads == [OWN] * 40

    run(make_settings(), work)


def test_large_body_that_expires_before_the_thread_is_free_is_never_parsed(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    threads = noting_threads(monkeypatch, "parse_request", gate)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answers = await asyncio.gather(*(client.post(INFER, content=LARGE) for _ in range(4)))
        assert {error_of(answer)["code"] for answer in answers} == {"deadline_exceeded"}
        assert metric(worker, "slipway_expired_total") == 4
        gate.set()
        assert (await client.post(INFER, content=LARGE)).status_code == 200
        assert len(threads) == 2  # what the thread had begun, and the last one

    run(make_settings(request_timeout_s=0.4), work)


@pytest.mark.process
def test_infer_response_that_is_not_encoded_in_time_becomes_a_deadline_error(
    certified_table: object,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
) -> None:
    noting_threads(monkeypatch, "response", gate)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (
            error_of(await client.post(INFER, content=table_tensors(600)))["code"]
            == "deadline_exceeded"
        )
        assert (await client.get("/livez")).status_code == 200

    run(make_settings(request_timeout_s=1), work)


def test_large_bodies_beyond_the_threads_queue_are_refused(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    threads = noting_threads(monkeypatch, "parse_request", gate)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        waiting = [asyncio.create_task(client.post(INFER, content=LARGE)) for _ in range(3)]
        await begun(threads)
        refused = await client.post(INFER, content=LARGE)
        assert error_of(refused)["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert (await client.post(INFER, content=LARGE)).status_code == 200

    run(make_settings(max_queue=3), work)


def test_service_ends_without_waiting_for_large_bodies(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    threads = noting_threads(monkeypatch, "parse_request", gate)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert error_of(await client.post(INFER, content=LARGE))["code"] == "deadline_exceeded"

    run(make_settings(request_timeout_s=0.4), work)
    assert threads == [OWN]
    assert not gate.is_set()


def test_list_encoded_in_pieces_equals_the_list_encoded_at_once() -> None:
    for count in (0, 1, 4095, 4096, 4097, 10_000):
        values = (np.arange(count) / 7).astype(np.float32)
        output = {"name": "value", "datatype": "FP32", "shape": [count], "data": values.tolist()}
        expected = {
            "model_name": "é",
            "model_version": "1",
            "id": "\u2028",
            "outputs": [output] * 2,
        }
        tensor = Tensor("value", "FP32", (count,), values)
        written = response("é", "1", InferRequest("\u2028", [], None, False), [(tensor, False)] * 2)
        assert (
            written.body == json.dumps(expected, ensure_ascii=False, separators=(",", ":")).encode()
        )


# The thread itself ----------------------------------------------------------------------


class Work:
    """An object that tests can watch being freed."""

    def __init__(self, done: Callable[[], int]) -> None:
        self._done = done

    def __call__(self) -> int:
        return self._done()


def test_memory_of_abandoned_work_is_freed_while_the_thread_is_busy(
    gate: threading.Event,
) -> None:
    async def work() -> None:
        thread = WorkerThread("busy", 2)
        busy = asyncio.create_task(thread.run(lambda: gate.wait(10)))
        late = Work(lambda: 1)
        seen = weakref.ref(late)
        waiting = asyncio.create_task(thread.run(late))
        del late
        await asyncio.sleep(0.01)
        with pytest.raises(Refusal, match="2 large requests are waiting"):
            await thread.run(lambda: 1)
        assert seen() is not None
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        gc.collect()
        assert seen() is None
        again = asyncio.create_task(thread.run(lambda: 2))  # its place is free
        gate.set()
        assert (await busy, await again) == (True, 2)
        await thread.close()

    asyncio.run(work())


def test_worker_thread_raises_errors_of_the_work_in_the_waiting_caller() -> None:
    def fail() -> None:
        raise Refusal("empty", "there is nothing in it at all", field="image")

    async def work() -> None:
        thread = WorkerThread("failing", 1)
        for _ in range(3):
            with pytest.raises(Refusal, match="nothing in it"):
                await thread.run(fail)
        await thread.close()

    asyncio.run(work())
