"""Refused requests are logged, at a rate that cannot fill the disk."""

import asyncio
import logging
import socket
from pathlib import Path

import httpx
import pytest

from slipway.serving.http.refusal_log import MAX_LINES_PER_S, RefusalLog
from slipway.serving.http.responses import Refusal
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.http.test_connection_close import listening
from tests.serving.in_process import run
from tests.serving.ready_service import ready_service

NUM_REFUSED = 300


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("bentoml"), "propagate", True)
    caplog.set_level(logging.WARNING, "bentoml.slipway")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for _, _, text in caplog.record_tuples if text.startswith("refused ")]


def test_lines_above_the_limit_are_only_counted_and_the_next_second_logs_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        log, refusal = RefusalLog(), Refusal("queue_full", "full")
        for number in range(NUM_REFUSED):
            log.add(refusal, f"id{number}", ("10.1.2.3", 4000), "POST /predict")
        assert len(lines(caplog)) == MAX_LINES_PER_S
        assert lines(caplog)[0] == (
            "refused 10.1.2.3:4000, request id0: queue_full (429), POST /predict"
        )
        log._end_second()
        log.add(refusal, "next", None, "POST /predict")
        more = NUM_REFUSED - MAX_LINES_PER_S
        assert lines(caplog)[MAX_LINES_PER_S].startswith(f"refused {more} more requests")
        assert lines(caplog)[-1].startswith("refused unknown caller, request next: ")

    asyncio.run(work())


def test_a_caller_cannot_write_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        RefusalLog().add(Refusal("internal", "x"), "id", ("::1", 1), "a\nb\x1b[2J" + "x" * 10_000)

    asyncio.run(work())
    (line,) = lines(caplog)
    assert line.isprintable()
    assert len(line) < 500


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GARBAGE\r\n\r\n", "malformed_request (400)"),
        (b"GET /livez HTTP/1.1\r\nx: " + b"a" * 70_000, "headers_too_large (431)"),
        (b"GET /livez HTTP/1.1\r\nhost: a:b@c\r\n\r\n", "malformed_request (400)"),
        (
            b"POST /livez HTTP/1.1\r\nexpect: secret\r\ncontent-length: 1\r\n\r\nx",
            "expectation_failed (417), expect",
        ),
        (b"GET /nope HTTP/1.1\r\nconnection: close\r\n\r\n", "not_found (404), GET unknown path"),
    ],
)
def test_every_refusal_is_logged_with_its_caller_and_the_id_of_its_response(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture, sent: bytes, code: str
) -> None:
    async def work() -> None:
        async with listening(make_settings, pause_s=0.0) as service:
            reader, writer = await service.connect()
            writer.write(sent)
            head = (await reader.read()).decode().partition("\r\n\r\n")[0]
            request_id = head.partition("x-request-id: ")[2].partition("\r\n")[0]
            host, port = writer.get_extra_info("sockname")
            (line,) = lines(caplog)
            assert line.startswith(f"refused {host}:{port}, request {request_id}: {code}")
            assert "secret" not in line
            writer.close()

    asyncio.run(work())


def test_a_refused_prediction_is_logged_without_what_its_caller_sent(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        headers = {"content-type": "secret/type", "x-request-id": "mine"}
        answer = await client.post("/predict", content=b"x", headers=headers)
        assert "secret/type" in answer.json()["error"]["message"]
        (line,) = lines(caplog)
        assert line.endswith("request mine: unsupported_media_type (415), POST /predict")

    run(make_settings(), work)


def test_probes_of_a_service_that_is_not_ready_are_not_logged_as_refused(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture, certified: Path
) -> None:
    (certified / "certificate.json").unlink()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for path in ("/readyz", "/v2/health/ready", "/v2/models/slipway/ready"):
            assert (await client.get(path)).status_code == 503
        assert lines(caplog) == []
        assert (await client.put("/readyz")).status_code == 405
        assert (await client.get("/model")).status_code == 503
        assert [line.rpartition(": ")[2] for line in lines(caplog)] == [
            "method_not_allowed (405), PUT /readyz",
            "not_ready (503), GET /model",
        ]

    run(make_settings(), work)


@pytest.mark.process
def test_a_flood_of_bad_requests_leaves_a_few_lines_in_the_log_of_the_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """uvicorn itself would warn of each request, and twice of each upgrade."""
    with ready_service(tmp_path_factory.mktemp("flood")) as server:
        url, before = httpx.URL(server.url), server.log.stat().st_size
        upgrade = b"GET /livez HTTP/1.1\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
        for number in range(NUM_REFUSED):
            with socket.create_connection((url.host, url.port or 80)) as caller:
                caller.sendall(upgrade if number % 2 else b"GARBAGE\r\n\r\n")
                caller.shutdown(socket.SHUT_WR)
                while caller.recv(65536):
                    pass
        written = server.log.read_bytes()[before:].decode()
    assert "malformed_request (400)" in written
    assert "Unsupported upgrade" not in written
    assert len(written.splitlines()) < NUM_REFUSED / 5
