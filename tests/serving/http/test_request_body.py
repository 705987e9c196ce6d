"""Overload with image forms: refused before parsing, and every caller can read its refusal."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
import uvicorn

from bench.form_overload import FEW, MANY, TURNS, measure
from slipway.inputs.multipart import encode_images
from slipway.serving.app import Application
from slipway.serving.http.request_body import (
    DRAIN_BYTES_S,
    REFUSAL_BYTES,
    DrainQueue,
    DrainSlot,
    RequestBody,
)
from slipway.serving.http.routes import Request
from slipway.serving.models.admission import Admission, Place
from slipway.serving.open_inference import extension as v2
from slipway.serving.open_inference import messages
from slipway.serving.requests import bodies
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import (
    COLUMNS,
    ROW,
    certify,
    picture,
    row_classifier,
    slow_classifier,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, error_of, full_worker, run
from tests.serving.server import free_port, running

CONTENT_TYPE, FORM = encode_images([picture(number) for number in range(3)])
FORM_TYPE = {"content-type": CONTENT_TYPE}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each call of a body parser is added."""
    calls: list[str] = []

    class Counted(bodies.FormReader):
        def __init__(self, *arguments: Any) -> None:
            calls.append("form")
            super().__init__(*arguments)

    parse = messages.parse_request

    def counted(*arguments: Any) -> Any:
        calls.append("v2")
        return parse(*arguments)

    monkeypatch.setattr(bodies, "FormReader", Counted)
    monkeypatch.setattr(v2, "parse_request", counted)
    return calls


async def in_pieces(body: bytes, received: list[int]) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        received.append(start)
        yield body[start : start + 100]


@pytest.mark.parametrize("path", ["/predict", "/v2/models/slipway/infer"])
def test_a_full_queue_refuses_a_request_without_parsing_its_body(
    make_settings: MakeSettings, parsed: list[str], path: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        application, headers = (
            Application(behind, worker),
            {b"content-type": CONTENT_TYPE.encode(), b"content-length": b"%d" % len(FORM)},
        )
        messages = [{"type": "http.request", "body": FORM, "more_body": False}]

        async def receive() -> Any:
            return messages.pop()

        def request() -> Request:
            return Request("a.1", "POST", path, b"", headers, RequestBody(receive), 0.0)

        async def pass_on(label: str) -> None:
            raise AssertionError

        with worker.admit():
            response = await application.respond(request(), pass_on)
            assert response
            assert (response.status, parsed) == (429, [])
        messages = messages or [{"type": "http.request", "body": FORM, "more_body": False}]
        response = await application.respond(request(), pass_on)
        assert response
        assert (response.status == 200, len(parsed)) == (path == "/predict", 1)

    run(make_settings(max_queue=1), work)


def test_a_slow_sender_holds_no_place_in_the_queue(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        go_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield FORM[:100]
            await go_on.wait()
            yield FORM[100:]

        slow = [
            asyncio.create_task(client.post("/predict", content=slowly(), headers=FORM_TYPE))
            for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        assert worker.admission.num_requests == 0
        assert (await client.post("/predict", content=FORM, headers=FORM_TYPE)).status_code == 200
        go_on.set()
        assert {(await one).status_code for one in slow} <= {200, 429}

    run(make_settings(max_queue=1), work)


def test_admission_place_counts_the_items_of_its_request_and_releases_all() -> None:
    admission = Admission(10, 1.0, 2, lambda num_kept: None)
    with Place(admission) as place:
        assert admission.num_items == 1
        place.set_num_items(32)
        assert (admission.num_requests, admission.num_items) == (1, 32)
        place.set_num_items(20)
        assert admission.num_items == 20
    assert (admission.num_requests, admission.num_items) == (0, 0)


def test_admission_place_counts_the_average_number_of_items_until_the_real_one_is_known() -> None:
    admission = Admission(200, 1.0, 2, lambda num_kept: None)
    for _ in range(100):
        with Place(admission) as place:
            place.set_num_items(32)
    with Place(admission), Place(admission) as small:
        assert admission.num_items == 2 * 32
        small.set_num_items(1)
        assert admission.num_items == 33
    assert (admission.num_requests, admission.num_items) == (0, 0)


def test_admission_counts_json_rows_after_they_are_decoded(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), input=COLUMNS),
    )
    rows = json.dumps({"rows": [ROW] * 20})

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for _ in range(100):
            assert (
                await client.post(
                    "/predict", content=rows, headers={"content-type": "application/json"}
                )
            ).status_code == 200
        held: list[int] = []
        live = worker._live
        assert live
        decode = live.decoder.decode

        async def noted(*items: bytes) -> Any:
            held.append(worker.admission.num_items)
            return await decode(*items)

        live.decoder.decode = noted  # type: ignore[method-assign]
        assert (
            await client.post(
                "/predict", content=rows, headers={"content-type": "application/json"}
            )
        ).status_code == 200
        assert held == [20]

    run(make_settings(), work)


def measured_admission(shed: list[int]) -> Admission:
    """Return an admission that has measured a speed of 320 items per second."""
    now = [0.0]
    admission = Admission(256, 1.0, 2, shed.append, lambda: now[0])
    admission.max_batch_size = 32
    for _ in range(20):
        now[0] += 0.1
        admission.ran(32, 0.1)
    return admission


def test_requests_that_grow_beyond_the_capacity_start_an_overload() -> None:
    shed: list[int] = []
    admission = measured_admission(shed)
    with Place(admission) as place:
        place.set_num_items(300)
        before = admission.is_overloaded
        place.set_num_items(999)
        assert (before, admission.is_overloaded) == (False, True)
        assert shed == [admission.most_items]


def test_an_overload_admits_several_large_requests_so_that_the_model_never_idles() -> None:
    admission = measured_admission([])
    of_single_images = admission.most_items
    for _ in range(100):
        with Place(admission) as place:
            place.set_num_items(32)
    assert of_single_images < 8 * 31 <= admission.most_items <= 8 * 32


def test_body_of_a_refused_request_is_drained_before_the_response(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        received: list[int] = []
        with worker.admit():
            refused = await client.post(
                "/predict", content=in_pieces(FORM, received), headers=FORM_TYPE
            )
        assert error_of(refused)["code"] == "queue_full"
        assert received[-1] + 100 >= len(FORM)

    run(make_settings(max_queue=1), work)


def test_draining_a_refused_body_is_limited_in_bytes_and_time(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async def never_ends() -> AsyncIterator[bytes]:
            while True:
                received.append(1)
                yield b"x" * 100

        async def stays_silent() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.sleep(60)

        received: list[int] = []
        with worker.admit():
            assert (
                await client.post("/predict", content=never_ends(), headers=FORM_TYPE)
            ).status_code == 429
            assert 9 <= len(received) <= 13
            assert (
                await client.post("/predict", content=stays_silent(), headers=FORM_TYPE)
            ).status_code == 429

    run(make_settings(max_queue=1, max_body_bytes=1000, request_timeout_s=0.4), work)


def test_refused_bodies_are_drained_in_turn_and_none_waits_longer_than_the_limit() -> None:
    turns, body = (
        DrainQueue(max_waiting=5, max_wait_s=2.5),
        int(DRAIN_BYTES_S) - REFUSAL_BYTES,
    )  # of a second
    waiting = [turns.take(10.0, body) for _ in range(6)]
    assert [turn and (turn.wait_s, turn.is_read) for turn in waiting] == [
        (0.0, True),
        (1.0, True),
        (2.0, True),
        (2.5, False),
        (2.5, False),
        None,
    ]
    for turn in waiting[3:5]:
        assert turn
        turns.end(turn, 0)
    assert turns.take(12.0, body) == DrainSlot(1.0, True, body)
    assert turns.take(100.0, body) == DrainSlot(0.0, True, body)


def test_a_drain_slot_is_charged_for_bytes_read_not_for_bytes_declared() -> None:
    turns, body = DrainQueue(max_waiting=5, max_wait_s=9.0), int(DRAIN_BYTES_S)
    for said, read in [(2 * body, 0), (0, body)]:
        turn = turns.take(10.0, said)
        assert turn
        turns.end(turn, read)
        following = turns.take(10.0, 0)
        assert following
        assert following.wait_s == pytest.approx(
            turn.wait_s + (read + REFUSAL_BYTES) / DRAIN_BYTES_S
        )


def test_caller_without_a_drain_slot_is_refused_at_once_and_disconnected(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        received: list[int] = []
        with worker.admit():
            refused = await client.post(
                "/predict", content=in_pieces(FORM, received), headers=FORM_TYPE
            )
            waiting = asyncio.create_task(
                client.post("/predict", content=stays_silent(), headers=FORM_TYPE)
            )
            await asyncio.sleep(0.05)
            received.clear()
            at_once = await client.post(
                "/predict", content=in_pieces(FORM, received), headers=FORM_TYPE
            )
        assert [error_of(one)["code"] for one in (refused, at_once, await waiting)] == [
            "queue_full"
        ] * 3
        assert [one.headers.get("connection") for one in (refused, at_once)] == [None, "close"]
        assert received == []

    async def stays_silent() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(60)

    run(make_settings(max_queue=1, max_connections=1, request_timeout_s=2.0), work)


def refused_after(port: int, num_bytes: int, seconds: float, headers: str = "") -> bytes:
    """Return the response to a caller that sends its body over `seconds` before it reads."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = (
            "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
            f"content-length: {num_bytes}\r\n{headers}\r\n"
        )
        connection.sendall(head.encode())
        for _ in range(16):
            connection.sendall(b"x" * (num_bytes // 16))
            time.sleep(seconds / 16)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    return received


@contextmanager
def plain_uvicorn(settings: Settings) -> Iterator[int]:
    """Run the application in plain uvicorn, without our protocol."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(
            Application(behind, full_worker(settings)),
            port=port,
            lifespan="off",
            http="httptools",
            log_level="error",
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.process
@pytest.mark.parametrize(("num_bytes", "status"), [(8 << 20, b" 503 "), (24 << 20, b" 413 ")])
def test_caller_that_sends_before_reading_receives_the_refusal_from_plain_uvicorn(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, num_bytes: int, status: bytes
) -> None:
    settings = make_settings()
    if status == b" 413 ":
        monkeypatch.setattr(
            ModelWorker, "require_model", lambda self: type("Model", (), {"input_kind": "images"})
        )
        settings = make_settings(max_body_bytes=16 << 20)
    with plain_uvicorn(settings) as port:
        assert (
            status in refused_after(port, num_bytes, 0.3, "connection: close\r\n").split(b"\r\n")[0]
        )


@pytest.mark.process
def test_slow_caller_that_sends_before_reading_receives_the_refusal(
    certified: Path,
) -> None:
    (certified / "certificate.json").unlink()
    with running(certified) as server:
        server.wait("/livez")
        port = int(server.url.rpartition(":")[2])
        assert (
            b" 503 " in refused_after(port, 8 << 20, 1.8, "connection: close\r\n").split(b"\r\n")[0]
        )


@pytest.mark.nightly(seconds=140)
@pytest.mark.timeout(600)
def test_goodput_of_multipart_forms_is_the_same_with_300_callers_as_with_8(tmp_path: Path) -> None:
    """Compares medians of interleaved turns, because single turns vary with other load.

    Ten more rounds decide if five are not enough.
    """

    def shares(rounds: list[dict[str, list[float]]]) -> list[float]:
        few, *many = ([figure for one in rounds for figure in one[name]] for name in TURNS)
        return [median(one / of for one, of in zip(figures, few, strict=True)) for figures in many]

    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", slow_classifier(1)))
    with running(tmp_path) as server:
        server.wait()
        rounds = list[dict[str, list[float]]]()
        for num_rounds in (5, 10):
            goodput, statuses = measure(server.url, num_rounds)
            assert all(set(found) <= {200, 429} for found in statuses.values())
            rounds.append(goodput)
            if min(shares(rounds)) >= 0.9:
                return
    pytest.fail(f"at {MANY} callers {shares(rounds)} of the goodput at {FEW}")
