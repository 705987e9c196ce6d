"""The access log: the content of its lines, its sampling, and the data that it omits."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.access_log import extension
from slipway.serving.auth.keys import add_key
from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Exchange, RequestTrace, sample_number
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import SegmentWriter, segments
from tests.serving.bundles import picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import SlowModel, metric, occupied, put_in_place_of, run

PNG = {"content-type": "image/png"}
EVERY = {"access_log_sampling_rate": 1.0}


def lines(folder: Path) -> list[dict[str, Any]]:
    written = b"".join(segment.read_bytes() for segment in segments(folder))
    return [json.loads(line) for line in written.splitlines()]


def test_access_log_line_has_request_id_key_model_version_and_stage_latencies(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    key = add_key(tmp_path / "keys", "alice", "caller", None)
    versions: list[str] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        headers = PNG | {"x-request-id": "mine", "x-api-key": key}
        answer = await client.post("/predict", content=picture(), headers=headers)
        versions.append(answer.json()["model_version"])

    run(
        make_settings(access_log_directory=tmp_path / "access", keys=tmp_path / "keys", **EVERY),
        work,
    )
    (line,) = lines(tmp_path / "access")
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    parts, total = line.pop("stages_us"), line.pop("total_us")
    assert parts.keys() == {"read", "decode", "queue", "infer", "encode"}
    # A small image is decoded while its batch is assembled, so decoding is in the queue's time.
    assert 0 < parts["read"] + parts["queue"] + parts["infer"] + parts["encode"] <= total
    assert line == {
        "request_id": "mine",
        "trace_id": None,
        "method": "POST",
        "route": "/predict",
        "status": 200,
        "error": None,
        "key": "alice",
        "model_version": versions[0],
        "rows": 1,
    }
    written = b"".join(one.read_bytes() for one in segments(tmp_path / "access"))
    assert key.encode() not in written


def test_access_log_line_of_a_request_that_was_given_up_has_no_status(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        model = SlowModel(worker)
        task = await occupied(client, model, picture(), PNG)
        task.cancel()
        await asyncio.wait([task])
        model.gate.set()
        assert metric(worker, "slipway_client_disconnects_total") == 1

    run(make_settings(access_log_directory=tmp_path / "access", **EVERY), work)
    (line,) = lines(tmp_path / "access")
    assert (line["route"], line["status"], line["error"]) == ("/predict", None, None)


def test_access_log_line_of_a_failed_request_has_its_error_code_but_not_the_callers_path(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", content=b"no image", headers=PNG)
        await client.get("/secret/of/the/caller")
        assert worker._live is not None
        put_in_place_of(worker._live, lambda inputs: 1 / 0)
        await client.post("/predict", content=picture(), headers=PNG)
        worker.refused_unread(Refusal("too_many_connections", "too many"), "unread")

    run(make_settings(access_log_directory=tmp_path / "access", **EVERY), work)
    found = lines(tmp_path / "access")
    assert [(one["route"], one["status"], one["error"]) for one in found] == [
        ("/predict", 422, "undecodable"),
        ("other", 404, "not_found"),
        ("/predict", 500, "model_failed"),
        ("other", 503, "too_many_connections"),
    ]
    assert "secret" not in json.dumps(found)
    assert found[2]["stages_us"].keys() >= {"read"}
    assert found[2]["model_version"]
    assert (found[3]["request_id"], found[3]["method"]) == ("unread", "")


def test_access_log_counts_rows_of_predict_and_infer(
    certified_table: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", json={"rows": [table_row(1), table_row(2)]})
        row = {name: value for name, value in table_row(1).items() if isinstance(value, float)}
        inputs = [
            {"name": name, "datatype": "FP64", "shape": [1], "data": [value]}
            for name, value in row.items()
        ]
        await client.post("/v2/models/slipway/infer", json={"inputs": inputs})

    run(make_settings(access_log_directory=tmp_path / "access", **EVERY), work)
    first, second = lines(tmp_path / "access")
    assert (first["rows"], second["route"]) == (2, "/v2/models/slipway/infer")


def test_access_log_samples_by_request_id_and_always_logs_faults(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    ids = [f"id-{number}" for number in range(120)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name in ids:
            await client.get("/livez", headers={"x-request-id": name})
        worker.refused_unread(Refusal("too_many_connections", "too many"), "fault")

    for rate, settings in ((0.1, {}), (0.3, {"access_log_sampling_rate": 0.3})):
        run(make_settings(access_log_directory=tmp_path / f"{rate}", **settings), work)
        found = [one["request_id"] for one in lines(tmp_path / f"{rate}")]
        assert sample_number("fault") >= rate
        assert found == [*(name for name in ids if sample_number(name) < rate), "fault"]


def test_a_fault_outside_the_sample_is_logged_without_stages_model_and_rows(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    ids = [f"id-{number}" for number in range(100)]
    sampled = next(name for name in ids if sample_number(name) < 0.5)
    unsampled, another = [name for name in ids if sample_number(name) >= 0.5][:2]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async def predict(request_id: str) -> None:
            headers = PNG | {"x-request-id": request_id}
            await client.post("/predict", content=picture(), headers=headers)

        assert worker._live is not None
        await predict(another)
        put_in_place_of(worker._live, lambda inputs: 1 / 0)
        await predict(sampled)
        await predict(unsampled)
        assert worker.new_trace(sampled, {}) is not None
        assert worker.new_trace(unsampled, {}) is None
        assert worker.new_trace(unsampled, {b"traceparent": b"any"}) is None  # for tracing only

    rate = {"access_log_sampling_rate": 0.5}
    run(make_settings(access_log_directory=tmp_path / "access", **rate), work)
    inside, outside = lines(tmp_path / "access")
    assert (inside["request_id"], outside["request_id"]) == (sampled, unsampled)
    assert inside["stages_us"].keys() >= {"read"}
    assert inside["model_version"]
    assert outside["stages_us"] is outside["model_version"] is outside["rows"] is None
    names = ("method", "route", "status", "error")
    assert [outside[name] for name in names] == ["POST", "/predict", 500, "model_failed"]
    assert outside["total_us"] > 0


def test_access_log_line_is_valid_json_for_any_texts() -> None:
    trace = RequestTrace((1.0, 1.5, 1.25, 1.5), None, None, "0af7")
    exchange = Exchange("id", 'GE"T', "/100%s", None, "e\\", "k\n", 1.0, 3.0, trace)
    line = json.loads(extension.encode_line(exchange, 0.25))
    texts = [line[name] for name in ("method", "route", "status", "error", "key", "trace_id")]
    assert line["time"] == "1970-01-01T00:00:03.250000+00:00"
    assert texts == ['GE"T', "/100%s", None, "e\\", "k\n", "0af7"]
    assert (line["total_us"], line["stages_us"]) == (2e6, {"read": 5e5, "decode": 250000})


def test_access_log_is_off_by_default_and_requests_then_record_no_trace(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.new_trace("", {}) is None
        assert worker.hooks["access_log"].on_response is None

    run(make_settings(), work)


def test_the_access_log_refuses_the_folder_of_the_request_log(
    make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.hooks["access_log"].on_response is None

    folder = tmp_path / "both"
    run(make_settings(access_log_directory=folder, request_log_directory=folder, **EVERY), work)
    assert "give it a folder of its own" in caplog.text


def test_access_log_on_a_failing_disk_affects_no_response_and_is_counted(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(writer: SegmentWriter, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        monkeypatch.setattr(SegmentWriter, "append", refuse)
        for _ in range(3):
            assert (await client.get("/livez")).status_code == 200
        name = 'slipway_access_log_lines_total{outcome="failed"}'
        async with asyncio.timeout(20):
            while metric(worker, name) < 3:
                await asyncio.sleep(0.01)

    run(make_settings(access_log_directory=tmp_path / "access", **EVERY), work)


def test_access_log_drops_and_counts_lines_if_its_queue_is_full(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "MAX_WAITING_BYTES", 30_000)  # of one group, not of two

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number in range(130):  # in one turn of the event loop, before the thread can take them
            worker.refused_unread(Refusal("not_ready", "not ready"), f"{number:064}")
        assert metric(worker, 'slipway_access_log_lines_total{outcome="dropped"}') == 64

    run(make_settings(access_log_directory=tmp_path / "access", **EVERY), work)
    found = [int(one["request_id"]) for one in lines(tmp_path / "access")]
    assert found == [*range(64), 128, 129]
