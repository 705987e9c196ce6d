"""Requests are kept beside the request path: sampled, counted, and never at the cost of an answer."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from serving.models.model import AnsweredRow, ServedModel
from serving.models.observers import Answered
from serving.request_log import logger
from serving.request_log.logger import Keeper, RequestLogSettings, is_sampled
from serving.requests.payload import Payload
from serving.worker import ModelWorker
from slipway.artifacts.bundle import Bundle, LoadedBundle
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.traffic.request_log import (
    LoggedRequest,
    RequestLogWriter,
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


def outcome(worker: ModelWorker, name: str) -> float:
    return metric(worker, f'slipway_kept_requests_total{{outcome="{name}"}}')


async def wait_for(worker: ModelWorker, name: str, count: int) -> None:
    for _ in range(300):
        if outcome(worker, name) >= count:
            break
        await asyncio.sleep(0.02)
    assert outcome(worker, name) == count


def test_nothing_is_kept_unless_it_is_asked_for(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200
        assert not [thread for thread in threading.enumerate() if thread.name == "slipway-keep"]
        assert [outcome(worker, name) for name in logger.OUTCOMES] == [0, 0, 0]

    run(make_settings(keep_directory="", watch=False), work)
    assert {
        path for path in tmp_path.rglob("*") if tmp_path / "state" not in (path, *path.parents)
    } == before  # a rollout's is there


def test_a_bound_without_a_directory_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever set it believes that something is kept."""
    logger.open_keeper(RequestLogSettings(), 1, lambda _outcome, _count: None)
    assert not caplog.records
    settings = RequestLogSettings(keep_share=0.5, keep_days=3)
    logger.open_keeper(settings, 1, lambda _outcome, _count: None)
    assert [record.message for record in caplog.records] == [
        "nothing is kept: SLIPWAY_KEEP_DAYS, SLIPWAY_KEEP_SHARE without SLIPWAY_KEEP_DIRECTORY"
    ]


def test_an_answered_image_is_kept_with_what_the_model_took_and_answered(
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
        make_settings(keep_directory=tmp_path / "kept"), work
    )  # what waits is written when the service ends
    (found,) = read_requests(tmp_path / "kept")
    assert isinstance(found, LoggedRequest)
    assert (found.request_id, found.payload, found.content_type) == (
        "mine",
        payload,
        "application/octet-stream",
    )
    assert found.inputs_sha256 == digest_inputs(array_from_bytes(payload, CONTRACT)[None])
    assert found.answers == [{name: answers[0][name] for name in CLASS_FIELDS}]
    assert found.outputs["outlier_score"].tolist() == [answers[0]["outlier_score"]]
    assert found.outputs["probabilities"].tolist() == [list(answers[0]["probabilities"].values())]
    assert found.model_version == answers[0]["model_version"]
    assert abs(found.time.timestamp() - time.time()) < 60


def test_rows_of_a_table_are_kept_with_an_answer_for_each(
    certified_table: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    rows = [table_row(number) for number in range(7)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", json={"rows": rows}, headers={"x-request-id": "list"})
        await client.post("/predict", json=rows[0], headers={"x-request-id": "one"})
        await wait_for(worker, "kept", 2)

    run(make_settings(keep_directory=tmp_path / "kept"), work)
    (found,), (one,) = (
        find_requests(tmp_path / "kept", "list"),
        find_requests(tmp_path / "kept", "one"),
    )
    encoded = encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    assert (found.is_list, found.num_rows, one.is_list, one.num_rows) == (True, 7, False, 1)
    assert np.allclose(found.outputs["probabilities"], row_probabilities(encoded), atol=1e-6)
    assert found.inputs_sha256 == digest_inputs(encoded)


def test_the_sample_is_a_pure_function_of_the_id_and_has_its_share() -> None:
    ids = [f"{number:016x}" for number in range(20_000)]
    for share in (0.0, 0.01, 0.25, 1.0):
        drawn = [is_sampled(name, share) for name in ids]
        assert abs(sum(drawn) - share * len(ids)) <= 4 * (share * (1 - share) * len(ids)) ** 0.5
        assert drawn == [is_sampled(name, share) for name in ids]
    assert all(
        is_sampled(name, 0.5) for name in ids if is_sampled(name, 0.2)
    )  # a larger share has the smaller one in it


def test_a_sampled_share_is_what_is_on_disk(make_settings: MakeSettings, tmp_path: Path) -> None:
    ids = [f"id-{number}" for number in range(200)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name in ids:
            await client.post("/predict", content=picture(), headers=PNG | {"x-request-id": name})

    run(make_settings(keep_directory=tmp_path / "kept", keep_share=0.3), work)
    found = [
        request.request_id
        for request in read_requests(tmp_path / "kept")
        if isinstance(request, LoggedRequest)
    ]
    assert found == [name for name in ids if is_sampled(name, 0.3)]
    assert 30 < len(found) < 90


def test_what_a_replay_sends_is_not_kept_again(make_settings: MakeSettings, tmp_path: Path) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name in ("replay-1", "other"):
            await client.post("/predict", content=picture(), headers=PNG | {"x-request-id": name})

    run(make_settings(keep_directory=tmp_path / "kept"), work)
    assert [
        request.request_id
        for request in read_requests(tmp_path / "kept")
        if isinstance(request, LoggedRequest)
    ] == ["other"]


@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), OSError(28, "No space left on device"), MemoryError()]
)
def test_a_thread_that_raises_costs_no_request_and_is_counted(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(folder: RequestLogWriter, lines: bytes) -> None:
        raise error

    monkeypatch.setattr(logger, "_RETRY_S", 0.05)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(RequestLogWriter, "append", refuse)
            for _ in range(10):
                assert (
                    await client.post("/predict", content=picture(), headers=PNG)
                ).status_code == 200
            await wait_for(worker, "failed", 10)
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200
        await wait_for(worker, "kept", 1)  # and the thread goes on

    run(make_settings(keep_directory=tmp_path / "kept"), work)


# Keeping looks at the digest, at this name and at how the model ran.
BUNDLE = LoadedBundle(Path("bundle"), cast(Bundle, SimpleNamespace(output_name="value")), "ab" * 32)
MODEL = cast(
    ServedModel, SimpleNamespace(bundle=BUNDLE, selection=SimpleNamespace(actual=EXECUTION))
)


def answered(number: int, num_bytes: int = 100) -> Answered:
    rows = [AnsweredRow(np.zeros(1, np.float32), np.float32(0), {"value": 0.0}, ("", 0.0, False))]
    payload = Payload("columns", (bytes(num_bytes),))
    return Answered(f"id-{number}", payload, False, np.zeros((1, 2)), MODEL, rows, [{"value": 0.0}])


class HangingFolder(RequestLogWriter):
    """A disk that does not come back until it is let go."""

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
def test_a_full_queue_drops_and_counts_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(logger, limit, value)
    counts = dict.fromkeys(logger.OUTCOMES, 0)

    def count(outcome: str, num_requests: int) -> None:
        counts[outcome] += num_requests

    folder = HangingFolder(tmp_path)
    keeper = Keeper(folder, 1.0, count)
    keeper.offer([answered(0)], 0.0)
    assert folder.hangs.wait(20)
    keeper.offer([answered(number) for number in range(1, 11)], 0.0)
    keeper.offer([answered(number) for number in range(11, 21)], 0.0)
    assert counts["dropped"] == 15
    assert not folder.has_written
    folder.free.set()
    keeper.close()
    assert counts == {"kept": 6, "dropped": 15, "failed": 0}
    assert len(list(read_requests(tmp_path))) == 6


def test_a_request_that_no_segment_can_hold_is_dropped(tmp_path: Path) -> None:
    counts: list[tuple[str, int]] = []
    keeper = Keeper(
        RequestLogWriter(tmp_path, 1 << 20, 1),
        1.0,
        lambda outcome, number: counts.append((outcome, number)),
    )
    keeper.offer([answered(1, 100_000), answered(2, 1000)], 0.0)
    keeper.close()
    assert sorted(counts) == [("dropped", 1), ("kept", 1)]
    assert [
        request.request_id
        for request in read_requests(tmp_path)
        if isinstance(request, LoggedRequest)
    ] == ["id-2"]
