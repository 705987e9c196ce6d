"""The request logger samples and counts requests, and never affects one."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from slipway.artifacts.bundle import Bundle, LoadedBundle
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.predictor.model import AnsweredRow
from slipway.serving.http.routes import sample_number
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import Answered
from slipway.serving.request_log import logger
from slipway.serving.request_log.logger import RequestLogger, RequestLogSettings
from slipway.serving.requests.payload import Payload
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import (
    LoggedRequest,
    SegmentWriter,
    digest_inputs,
    find_requests,
    read_requests,
)
from tests.serving.bundles import (
    CLASS_FIELDS,
    COLUMNS,
    CONTRACT,
    picture,
    row_probabilities,
    table_row,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, run
from tests.traffic.test_request_log import EXECUTION

PNG = {"content-type": "image/png"}
OUTCOMES = ("logged", "dropped", "failed")


def outcome(worker: ModelWorker, name: str) -> float:
    return metric(worker, f'slipway_logged_requests_total{{outcome="{name}"}}')


async def wait_for(worker: ModelWorker, name: str, count: int) -> None:
    for _ in range(300):
        if outcome(worker, name) >= count:
            break
        await asyncio.sleep(0.02)
    assert outcome(worker, name) == count


def test_no_request_is_logged_by_default(make_settings: MakeSettings, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200
        assert not [
            thread for thread in threading.enumerate() if thread.name == "slipway-request-log"
        ]
        assert [outcome(worker, name) for name in OUTCOMES] == [0, 0, 0]

    run(make_settings(request_log_directory="", monitoring=False), work)
    assert {
        path for path in tmp_path.rglob("*") if tmp_path / "state" not in (path, *path.parents)
    } == before  # the rollout writes there


def test_request_log_limits_without_a_directory_cause_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger.open_request_logger(RequestLogSettings(), 1, lambda _outcome, _count: None)
    assert not caplog.records
    settings = RequestLogSettings(request_log_sampling_rate=0.5, request_log_days=3)
    logger.open_request_logger(settings, 1, lambda _outcome, _count: None)
    assert [record.message for record in caplog.records] == [
        "no request is logged: SLIPWAY_REQUEST_LOG_DAYS, SLIPWAY_REQUEST_LOG_SAMPLING_RATE "
        "without SLIPWAY_REQUEST_LOG_DIRECTORY"
    ]


def test_logged_image_request_has_payload_inputs_digest_outputs_and_prediction(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    payload = picture(3, (20, 12))
    answers: list[Any] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answers.append(
            (
                await client.post(
                    "/predict",
                    files={"image": ("x.png", payload)},
                    headers={"x-request-id": "mine"},
                )
            ).json()
        )
        error_of(
            await client.post(
                "/predict", content=b"no image", headers=PNG | {"x-request-id": "refused"}
            )
        )

    run(
        make_settings(request_log_directory=tmp_path / "log"), work
    )  # the queue is written when the service ends
    (found,) = read_requests(tmp_path / "log")
    assert isinstance(found, LoggedRequest)
    assert (found.request_id, found.payload, found.content_type) == (
        "mine",
        payload,
        "application/octet-stream",
    )
    assert found.inputs_sha256 == digest_inputs(array_from_bytes(payload, CONTRACT)[None])
    assert found.answers == [{name: answers[0][name] for name in CLASS_FIELDS}]
    assert found.outputs["ood_score"].tolist() == [answers[0]["ood_score"]]
    assert found.outputs["probabilities"].tolist() == [list(answers[0]["probabilities"].values())]
    assert found.model_version == answers[0]["model_version"]
    assert abs(found.time.timestamp() - time.time()) < 60


def test_logged_table_rows_have_one_prediction_each(
    certified_table: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    rows = [table_row(number) for number in range(7)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", json={"rows": rows}, headers={"x-request-id": "list"})
        await client.post("/predict", json=rows[0], headers={"x-request-id": "one"})
        await wait_for(worker, "logged", 2)

    run(make_settings(request_log_directory=tmp_path / "log"), work)
    (found,), (one,) = (
        find_requests(tmp_path / "log", "list"),
        find_requests(tmp_path / "log", "one"),
    )
    encoded = encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    assert (found.is_list, found.num_rows, one.is_list, one.num_rows) == (True, 7, False, 1)
    assert np.allclose(found.outputs["probabilities"], row_probabilities(encoded), atol=1e-6)
    assert found.inputs_sha256 == digest_inputs(encoded)


def test_sample_depends_only_on_the_id_and_the_rate() -> None:
    ids = [f"{number:016x}" for number in range(20_000)]
    for rate in (0.0, 0.01, 0.25, 1.0):
        drawn = [sample_number(name) < rate for name in ids]
        assert abs(sum(drawn) - rate * len(ids)) <= 4 * (rate * (1 - rate) * len(ids)) ** 0.5
        assert drawn == [sample_number(name) < rate for name in ids]
    assert all(
        sample_number(name) < 0.5 for name in ids if sample_number(name) < 0.2
    )  # a larger sample contains the smaller one


def test_request_log_holds_exactly_the_sampled_requests(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    ids = [f"id-{number}" for number in range(200)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name in ids:
            await client.post("/predict", content=picture(), headers=PNG | {"x-request-id": name})

    run(make_settings(request_log_directory=tmp_path / "log", request_log_sampling_rate=0.3), work)
    found = [
        request.request_id
        for request in read_requests(tmp_path / "log")
        if isinstance(request, LoggedRequest)
    ]
    assert found == [name for name in ids if sample_number(name) < 0.3]
    assert 30 < len(found) < 90


def test_replayed_requests_are_not_logged_again(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name in ("replay-1", "other"):
            await client.post("/predict", content=picture(), headers=PNG | {"x-request-id": name})

    run(make_settings(request_log_directory=tmp_path / "log"), work)
    assert [
        request.request_id
        for request in read_requests(tmp_path / "log")
        if isinstance(request, LoggedRequest)
    ] == ["other"]


@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), OSError(28, "No space left on device"), MemoryError()]
)
def test_failing_request_log_affects_no_request_is_counted_and_recovers(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(writer: SegmentWriter, lines: bytes) -> None:
        raise error

    monkeypatch.setattr(logger, "_RETRY_S", 0.05)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(SegmentWriter, "append", refuse)
            for _ in range(10):
                assert (
                    await client.post("/predict", content=picture(), headers=PNG)
                ).status_code == 200
            await wait_for(worker, "failed", 10)
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200
        await wait_for(worker, "logged", 1)

    run(make_settings(request_log_directory=tmp_path / "log"), work)


# The parts of a model that the logger reads.
MANIFEST = SimpleNamespace(output_name="value", input=CONTRACT)
BUNDLE = LoadedBundle(Path("bundle"), cast(Bundle, MANIFEST), "ab" * 32)
MODEL = cast(
    ServedModel, SimpleNamespace(bundle=BUNDLE, selection=SimpleNamespace(actual=EXECUTION))
)


def answered(number: int, num_bytes: int = 100) -> Answered:
    rows = [AnsweredRow(np.zeros(1, np.float32), np.float32(0), {"value": 0.0}, ("", 0.0, False))]
    payload = Payload("columns", (bytes(num_bytes),))
    return Answered(f"id-{number}", payload, False, np.zeros((1, 2)), MODEL, rows, [{"value": 0.0}])


class HangingWriter(SegmentWriter):
    """A segment writer whose disk hangs until `free` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1 << 20, 1)
        self.free = threading.Event()
        self.hangs = threading.Event()
        self.has_written = False

    def append(self, lines: bytes) -> None:
        self.hangs.set()
        assert self.free.wait(20)
        self.has_written = True
        super().append(lines)


@pytest.mark.parametrize(("limit", "value"), [("MAX_WAITING", 5), ("MAX_WAITING_BYTES", 5 * 116)])
def test_full_request_log_queue_drops_and_counts_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(logger, limit, value)
    counts = dict.fromkeys(OUTCOMES, 0)

    def count(outcome: str, num_requests: int) -> None:
        counts[outcome] += num_requests

    writer = HangingWriter(tmp_path)
    request_logger = RequestLogger(writer, 1.0, count)
    request_logger.offer([answered(0)], 0.0)
    assert writer.hangs.wait(20)
    request_logger.offer([answered(number) for number in range(1, 11)], 0.0)
    request_logger.offer([answered(number) for number in range(11, 21)], 0.0)
    assert counts["dropped"] == 15
    assert not writer.has_written
    writer.free.set()
    request_logger.close()
    assert counts == {"logged": 6, "dropped": 15, "failed": 0}
    assert len(list(read_requests(tmp_path))) == 6


def test_request_larger_than_a_segment_is_dropped(tmp_path: Path) -> None:
    counts: list[tuple[str, int]] = []
    request_logger = RequestLogger(
        SegmentWriter(tmp_path, 1 << 20, 1),
        1.0,
        lambda outcome, number: counts.append((outcome, number)),
    )
    request_logger.offer([answered(1, 100_000), answered(2, 1000)], 0.0)
    request_logger.close()
    assert sorted(counts) == [("dropped", 1), ("logged", 1)]
    assert [
        request.request_id
        for request in read_requests(tmp_path)
        if isinstance(request, LoggedRequest)
    ] == ["id-2"]
