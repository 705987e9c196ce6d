import asyncio
import io
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from slipway.inputs.images import array_from_bytes
from slipway.serving.app import Application
from slipway.serving.gpu.extension import GAUGES
from slipway.serving.http.responses import ERRORS
from slipway.serving.worker import ModelWorker
from tests.calibrations import CALIBRATION
from tests.serving.bundles import (
    CLASS_FIELDS,
    CONTRACT,
    LABELS,
    VALUE_FIELDS,
    certify,
    log_of_mean,
    picture,
    probabilities,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, error_of, full_worker, metric, put_in_place_of, run

PNG = {"content-type": "image/png"}
CPU_FP32 = {"backend": "onnxruntime", "provider": "cpu", "precision": "fp32", "variant": "fp32"}


def test_raw_body_and_form_get_the_predictions_of_the_graph(
    make_settings: MakeSettings,
) -> None:
    payload = picture(3, (20, 12))
    expected = probabilities(array_from_bytes(payload, CONTRACT)[None])[0]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        raw = await client.post(
            "/predict", content=payload, headers=PNG | {"x-request-id": "mine-1"}
        )
        form = await client.post("/predict", files={"image": ("x.png", payload, "image/png")})
        assert raw.status_code == form.status_code == 200
        assert list(raw.json()) == [*CLASS_FIELDS, "model_version", "request_id"]
        assert raw.json()["label"] == LABELS[int(expected.argmax())]
        assert np.allclose(
            [raw.json()["probabilities"][label] for label in LABELS], expected, atol=1e-6
        )
        assert raw.json()["request_id"] == raw.headers["x-request-id"] == "mine-1"
        assert form.json() | {"request_id": "mine-1"} == raw.json()

    run(make_settings(), work)


def test_errors_below_v2_have_the_protocols_shape_on_both_ports(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        transport = httpx.ASGITransport(Application(behind, worker).for_operators())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as operators:
            for headers, status in ({}, 404), ({"expect": "x"}, 417):
                for path in ("/v2/nowhere", "/v2/models/slipway"):
                    answer = await operators.get(path, headers=headers)
                    assert (answer.status_code, type(answer.json()["error"])) == (status, str)
                error_of(await operators.get("/nowhere", headers=headers))

    run(make_settings(admin_port=3999), work)


def test_failed_predictions_add_to_the_metric_of_their_seconds(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        name = "slipway_failed_prediction_seconds_total"
        for path in ("/nowhere", "/feedback"):
            await client.post(path, content=b"x", headers=PNG)
        await client.post("/predict", content=picture(), headers=PNG)
        assert metric(worker, name) == 0.0
        for path in ("/predict", "/v2/models/slipway/infer"):
            before, started = metric(worker, name), time.perf_counter()
            assert (await client.post(path, content=b"x", headers=PNG)).is_client_error
            assert before < metric(worker, name) < before + time.perf_counter() - started

    run(make_settings(), work)


def test_predict_returns_a_regression_value_and_500_for_a_non_finite_one(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "black").save(stream, "PNG")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        good, bad = await asyncio.gather(
            client.post("/predict", content=picture(), headers=PNG),
            client.post("/predict", content=stream.getvalue(), headers=PNG),
        )
        assert list(good.json()) == [*VALUE_FIELDS, "model_version", "request_id"]
        assert error_of(bad)["code"] == "invalid_answer"
        assert metric(worker, 'slipway_errors_total{error="invalid_answer"}') == 1

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "empty"),
        (b"hello, this is text", "undecodable"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "undecodable"),
        (picture(1, (64, 64))[:-400], "truncated"),
        (picture(1, (300, 300), "JPEG")[:-5000], "truncated"),
    ],
)
def test_an_unreadable_image_is_refused_with_its_rule(
    make_settings: MakeSettings, payload: bytes, code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(
            await client.post(
                "/predict", content=payload, headers=PNG | {"content-length": str(len(payload))}
            )
        )
        assert (error["code"], error["field"]) == (code, "image")
        assert metric(worker, f'slipway_errors_total{{error="{code}"}}') == 1

    run(make_settings(), work)


def test_unknown_paths_get_404_and_add_a_single_metric_series(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number in range(50):
            error = error_of(await client.get(f"/scan/{number}"))
            assert error["code"] == "not_found"
        lines = worker.metrics.exposition().decode().splitlines()
        assert [line for line in lines if 'code="404"' in line and "_created" not in line] == [
            'slipway_requests_total{code="404",route="other"} 50.0'
        ]

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/predict", "POST"), ("POST", "/model", "GET, HEAD"), ("PUT", "/predict", "POST")],
)
def test_wrong_methods_get_405_with_the_allowed_methods(
    make_settings: MakeSettings, method: str, path: str, allowed: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        response = await client.request(method, path)
        assert error_of(response)["code"] == "method_not_allowed"
        assert response.headers["allow"] == allowed

    run(make_settings(), work)


def test_only_requests_for_schema_json_reach_bentoml(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        own = ("/", "/livez", "/healthz", "/readyz", "/metrics", "/model", "/docs", "/docs.json")
        answers = {path: (await client.get(path)).status_code for path in (*own, "/schema.json")}
        assert answers == dict.fromkeys(own, 200) | {"/schema.json": 299}
        assert metric(worker, 'slipway_requests_total{code="299",route="/schema.json"}') == 1

    run(make_settings(), work)


def test_response_of_bentoml_closes_the_connection_because_it_reads_no_body(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for method in ("GET", "HEAD"):
            with_body = await client.request(method, "/schema.json", content=b"{}")
            assert with_body.headers["connection"] == "close"
            without = await client.request(method, "/schema.json")
            assert "connection" not in without.headers

    run(make_settings(), work)


def test_the_response_to_head_has_no_body(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        response = await client.head("/readyz")
        assert (response.status_code, response.content) == (200, b"")

    run(make_settings(), work)


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "<script>", "ä"])
def test_the_response_replaces_an_invalid_request_id(
    make_settings: MakeSettings, given: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        response = await client.get("/livez", headers=[(b"x-request-id", given.encode())])
        assert re.fullmatch(r"[0-9a-f]{16}", response.headers["x-request-id"])

    run(make_settings(), work)


def test_a_refused_model_leaves_the_service_alive_and_not_ready_with_the_reason(
    certified: Path, make_settings: MakeSettings
) -> None:
    (certified / "certificate.json").unlink()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.get("/livez")).status_code == 200
        for response in (
            await client.get("/readyz"),
            await client.get("/model"),
            await client.post("/predict", content=picture(), headers=PNG),
        ):
            error = error_of(response)
            assert error["code"] == "not_ready"
            assert "nothing proves this bundle" in error["message"]
        assert metric(worker, "slipway_ready") == 0

    run(make_settings(), work)


def test_while_the_model_loads_the_service_is_alive_and_not_ready(
    make_settings: MakeSettings,
) -> None:
    async def main() -> None:
        worker = full_worker(make_settings())
        transport = httpx.ASGITransport(Application(behind, worker))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/livez")).status_code == 200
            assert "being loaded" in error_of(await client.get("/readyz"))["message"]

    asyncio.run(main())


async def slow_down(worker: ModelWorker, seconds: float) -> list[int]:
    """Make the model slow. Returns a list to which the size of every batch is added."""
    assert worker._live
    fast, sizes = worker._live.batcher._run, []

    def run_slowly(batch: Any) -> Any:
        sizes.append(len(batch))
        time.sleep(seconds)
        return fast(batch)

    put_in_place_of(worker._live, run_slowly)
    return sizes


def test_request_to_a_full_queue_gets_429_with_retry_after_while_others_are_served(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await slow_down(worker, 0.2)
        answers = await asyncio.gather(
            *(client.post("/predict", content=picture(n), headers=PNG) for n in range(7))
        )
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 3
        for answer in refused:
            assert error_of(answer)["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200

    run(make_settings(max_queue=4), work)


def test_request_that_expires_in_the_queue_gets_504_without_reaching_the_model(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.5)
        first = asyncio.create_task(client.post("/predict", content=picture(1), headers=PNG))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(client.post("/predict", content=picture(2), headers=PNG))
        assert {error_of(await first)["code"], error_of(await second)["code"]} == {
            "deadline_exceeded"
        }
        await asyncio.sleep(0.4)
        assert sizes == [1]

    run(make_settings(request_timeout_s=0.3), work)


def test_request_whose_body_never_arrives_gets_408(make_settings: MakeSettings) -> None:
    async def drip() -> AsyncIterator[bytes]:
        yield b"\x89PNG"
        await asyncio.sleep(5)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (
            error_of(await client.post("/predict", content=drip(), headers=PNG))["code"]
            == "body_timeout"
        )

    run(make_settings(request_timeout_s=0.1), work)


def test_one_bad_image_among_concurrent_requests_fails_alone(make_settings: MakeSettings) -> None:
    payloads = [picture(n) for n in range(31)]
    expected = probabilities(
        np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for _ in range(3):
            answers = await asyncio.gather(
                *(
                    client.post("/predict", content=payload, headers=PNG)
                    for payload in [*payloads, b"bad"]
                )
            )
            assert error_of(answers[-1])["code"] == "undecodable"
            found = [list(answer.json()["probabilities"].values()) for answer in answers[:-1]]
            assert np.allclose(found, expected, atol=1e-6)

    run(make_settings(), work)


def fail(batch: Any) -> Any:
    raise RuntimeError("planted")


def test_model_failure_gets_500_in_the_common_error_shape(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        put_in_place_of(worker._live, fail)
        assert (
            error_of(await client.post("/predict", content=picture(), headers=PNG))["code"]
            == "model_failed"
        )

    run(make_settings(), work)


@pytest.mark.parametrize("path", ["/predict", "/explain"])
def test_log_contains_the_id_of_a_request_whose_batch_failed(
    make_settings: MakeSettings, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        put_in_place_of(worker._live, fail)
        answer = await client.post(
            path, content=picture(), headers=PNG | {"x-request-id": "mine-7"}
        )
        assert error_of(answer)["code"] == "model_failed"

    run(make_settings(), work)
    assert [
        record.message
        for record in caplog.records
        if record.levelname == "ERROR" and "request mine-7" in record.message
    ]


@pytest.mark.parametrize("path", ["/predict", "/explain"])
def test_log_contains_the_id_of_a_request_with_an_invalid_prediction(
    certified: Path, make_settings: MakeSettings, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "black").save(stream, "PNG")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.post(
            path, content=stream.getvalue(), headers=PNG | {"x-request-id": "mine-8"}
        )
        assert error_of(answer)["code"] == "invalid_answer"
        refused = await client.post(
            path, content=b"no picture", headers=PNG | {"x-request-id": "mine-9"}
        )
        assert refused.status_code == 422

    run(make_settings(), work)
    assert [
        record.message
        for record in caplog.records
        if record.levelname == "ERROR" and "request mine-8" in record.message
    ]
    levels = {record.levelname for record in caplog.records if "mine-9" in record.message}
    assert levels == {"WARNING"}  # what callers do wrong is no fault of the service


def test_internal_fault_gets_500_in_the_common_error_shape(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        del vars(worker._live.decoder)["_contract"]
        assert (
            error_of(await client.post("/predict", content=picture(), headers=PNG))["code"]
            == "internal"
        )

    run(make_settings(), work)


def test_a_decoding_fault_is_not_reported_as_a_fault_of_the_model(
    make_settings: MakeSettings,
) -> None:
    """Small images of quick models are decoded when the batch is built, others earlier."""

    def broken(image: bytes, name: str) -> Any:
        raise RuntimeError("planted")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        vars(worker._live.decoder)["_pixels"] = broken
        for quick_rows in (worker._live.model.max_batch_size, 0):
            worker._live.batcher.quick_rows = quick_rows
            assert (
                error_of(await client.post("/predict", content=picture(), headers=PNG))["code"]
                == "internal"
            )

    run(make_settings(), work)


def test_model_info_contains_the_requested_and_the_actual_execution(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        card = (await client.get("/model")).json()
        assert card["calibration"] == CALIBRATION.model_dump(mode="json")
        assert card["execution"]["requested"] == {"provider": "cpu", "variant": "auto"}
        assert card["execution"]["actual"]["variant"] == "fp32"
        threads = card["execution"]["num_threads"]
        assert f"intra_op_num_threads={threads}," in card["execution"]["session_options"]
        assert card["execution"]["certified_session_options"] is None  # not recorded then
        assert card["labels"] == LABELS
        assert card["metrics"]["accuracy"]["rows"] == 100
        hop = card["certificate"]["hops"][0]
        assert (hop["status"], hop["requested"], hop["actual"]) == ("agrees", CPU_FP32, CPU_FP32)
        assert card["certificate"]["bundle_digest"] == card["bundle_digest"]

    run(make_settings(provider="cpu"), work)


def test_request_counters_equal_the_responses_that_callers_received(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        seen: dict[int, int] = {}
        for number in range(30):
            content = picture(number) if number % 3 else b"bad"
            status = (await client.post("/predict", content=content, headers=PNG)).status_code
            seen[status] = seen.get(status, 0) + 1
        for status, count in seen.items():
            assert (
                metric(worker, f'slipway_requests_total{{code="{status}",route="/predict"}}')
                == count
            )
        assert metric(worker, "slipway_prediction_duration_seconds_count") == seen[200]
        assert metric(worker, 'slipway_stage_seconds_count{stage="infer"}') == seen[200]
        assert metric(worker, "slipway_batch_size_sum") == seen[200]

    run(make_settings(), work)


def test_docs_list_every_error_code_and_every_metric(make_settings: MakeSettings) -> None:
    text = Path("docs/reference/serving.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, re.MULTILINE)) == {
        code: str(status) for code, status in ERRORS.items()
    }

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        metrics = set(
            re.findall(r"^# HELP (\w+)", worker.metrics.exposition().decode(), re.MULTILINE)
        )
        metrics |= set(GAUGES)  # which only a machine with a GPU has
        assert set(re.findall(r"^\| `(slipway_\w+)`", text, re.MULTILINE)) == {
            name for name in metrics if not name.endswith("_created")
        }

    run(make_settings(), work)
