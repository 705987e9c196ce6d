"""What is answered is watched beside the request path: counted, judged, remembered, and never at the cost of an answer."""

import asyncio
import io
import json
import logging
import re
import sqlite3
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from prometheus_client import generate_latest

from serving.metrics.service_metrics import ServiceMetrics
from serving.monitoring import models as watched_models
from serving.monitoring import watcher as watching
from serving.monitoring.metrics import MAX_CLASSES, PARTS, WatchingMetrics
from serving.monitoring.models import WatchedModel
from serving.monitoring.sampling import Thinning
from serving.monitoring.store import Store
from serving.monitoring.watcher import Watcher
from serving.rollout.reconciler import RolloutReconciler
from serving.worker import ModelWorker
from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.drift.reference import Reference, read_reference
from slipway.system.errors import BundleError
from slipway.traffic.monitoring_records import DATABASE
from tests.serving.bundles import certify, picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run, status_part, until
from tests.serving.watched import pictures, remembered, watched_bundle

PNG = {"content-type": "image/png"}
WATCHED = 'slipway_watched_rows_total{outcome="watched"}'

pytestmark = pytest.mark.usefixtures("quick_watching")


async def send(
    client: httpx.AsyncClient, payloads: list[bytes], prefix: str = ""
) -> list[dict[str, Any]]:
    """The answers, a few requests at a time."""
    answers: list[dict[str, Any]] = []
    for begin in range(0, len(payloads), 32):
        ids = [f"{prefix}{begin + place}" for place in range(len(payloads[begin : begin + 32]))]
        sent = [
            client.post(
                "/predict",
                content=payload,
                headers=PNG | ({"x-request-id": name} if prefix else {}),
            )
            for name, payload in zip(ids, payloads[begin : begin + 32], strict=True)
        ]
        for response in await asyncio.gather(*sent):
            assert response.status_code == 200, response.text
            answers.append(response.json())
    return answers


def errors(worker: ModelWorker, part: str) -> float:
    return metric(worker, f'slipway_monitoring_errors_total{{part="{part}"}}')


def windows(worker: ModelWorker, verdict: str) -> float:
    return metric(worker, f'slipway_drift_windows_total{{verdict="{verdict}"}}')


def status(worker: ModelWorker, part: str = "drift") -> dict[str, Any]:
    found: dict[str, Any] = status_part(worker, part)
    return found


def rows_in(state: Path) -> int:
    """Rows of all windows, open and closed."""
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        found = connection.execute("SELECT total(num_rows) FROM windows").fetchone()
    return int(found[0])


@pytest.fixture(params=["in whole", "only counted"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How requests are taken: as without load, or as the most are under a heavy one."""
    if request.param == "only counted":
        monkeypatch.setattr(Thinning, "divide", lambda self, requests: ((), requests))
    return str(request.param)


def test_classes_confidence_and_outliers_are_counted_as_the_callers_saw_them(
    make_watched: MakeSettings, taken: str
) -> None:
    outcome = "watched" if taken == "in whole" else "thinned"
    payloads = pictures(3, 40) + [picture(seed) for seed in range(20)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answers = await send(client, payloads)
        await until(
            lambda: metric(worker, f'slipway_watched_rows_total{{outcome="{outcome}"}}') == 60
        )
        for label, count in Counter(answer["label"] for answer in answers).items():
            assert metric(worker, f'slipway_classes_total{{label="{label}"}}') == count
        assert metric(worker, "slipway_outliers_total") == sum(
            answer["is_outlier"] for answer in answers
        )
        highest = [max(answer["probabilities"].values()) for answer in answers]
        assert metric(worker, "slipway_confidence_count") == 60
        assert metric(worker, 'slipway_confidence_bucket{le="0.7"}') == sum(
            share <= np.float32(0.7) for share in highest
        )
        assert metric(worker, "slipway_confidence_sum") == pytest.approx(sum(highest))

    run(make_watched(), work)


def test_labels_beyond_the_fiftieth_are_other() -> None:
    service_metrics = ServiceMetrics()
    registry = service_metrics.registry
    metrics = WatchingMetrics(service_metrics)
    metrics.classes({f"label{number}": 1 for number in range(MAX_CLASSES + 30)})
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("slipway_classes_total")
    ]
    assert len(lines) == MAX_CLASSES + 1
    assert 'slipway_classes_total{label="other"} 30.0' in lines


@pytest.mark.usefixtures("taken")
def test_missing_cells_of_a_table_are_counted(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    rows = [table_row(number) for number in range(10)]  # each fifth lacks its city

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", json={"rows": [*rows, rows[1] | {"income": None}]})
        await until(lambda: metric(worker, "slipway_missing_cells_total") > 0)
        assert metric(worker, "slipway_missing_cells_total") == 3

    run(make_settings(), work)


@pytest.mark.process
def test_windows_of_rows_like_the_reference_are_clean_and_of_others_drifted(
    make_watched: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 300))
        await until(lambda: windows(worker, "clean") >= 1)
        assert windows(worker, "drifted") == 0
        await until(lambda: status(worker)["verdict"] == "clean")
        assert metric(worker, "slipway_drift_alarm") == 0
        assert metric(worker, "slipway_estimate_valid") == 1
        low, value, high = (
            metric(worker, f"slipway_estimated_quality{end}") for end in ("_low", "", "_high")
        )
        assert 0 < low <= value <= high <= 1

        await send(client, pictures(6, 600, shift=60))
        await until(lambda: windows(worker, "drifted") >= 1)
        await until(lambda: status(worker)["verdict"] == "drifted")
        assert metric(worker, "slipway_drift_alarm") == 1
        drifted = {feature["name"] for feature in status(worker)["features"] if feature["drifted"]}
        assert {"brightness", "outlier_score"} <= drifted
        strength = metric(worker, 'slipway_drift_statistic{feature="brightness"}')
        assert strength > metric(worker, 'slipway_drift_threshold{feature="brightness"}') > 0

    run(make_watched(window_rows=200), work)


@pytest.mark.process
def test_the_alarm_ends_in_a_proposal_with_commands_and_in_nothing_else(
    make_watched: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_watched(
        window_rows=200, keep_directory=str(make_watched().state.parent / "kept")
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 700, shift=60))
        await until(
            lambda: status(worker).get("proposal") is not None and windows(worker, "drifted") >= 2
        )
        version = worker.require_model().version
        (proposal,) = (settings.state / "proposals").glob(
            "*.md"
        )  # one for the beginning, none for each further window
        assert str(proposal) == status(worker)["proposal"]["path"]
        text = proposal.read_text()
        assert version in text
        assert re.search(r"^\| brightness \| \w+ \| [\d.e+-]+ \| [\d.e+-]+ \|$", text, re.MULTILINE)
        assert (
            f"python -m slipway.traffic.collect data/collected.parquet --kept {worker.request_log} --state {settings.state}"
            in text
        )
        assert (
            "\npython -m slipway.data.merge data/next.parquet\ndvc exp run -S data.path=data/next.parquet\n"
            in text
        )
        assert worker.require_model().version == version

    with caplog.at_level(logging.WARNING, "bentoml.slipway"):
        logging.getLogger("bentoml").propagate = True
        run(settings, work)


def test_a_proposal_is_told_with_its_window_after_a_clean_one_and_after_a_restart(
    make_watched: MakeSettings,
) -> None:
    settings = make_watched(window_rows=200)

    async def drift_and_end(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 200, shift=60))
        await until(lambda: status(worker).get("proposal") is not None)

    async def be_clean(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 300))
        await until(
            lambda: windows(worker, "clean") >= 1 and status(worker).get("verdict") == "clean"
        )
        (proposal,) = (settings.state / "proposals").glob("*.md")
        (drifted,) = (window["closed"] for window in status(worker)["windows"] if window["drifted"])
        assert status(worker)["proposal"] == {"path": str(proposal), "closed": drifted}
        proposal.unlink()
        await until(lambda: status(worker)["proposal"] is None)

    run(settings, drift_and_end)
    run(settings, be_clean)


@pytest.mark.process
def test_a_window_ends_with_its_age_but_not_before_it_can_be_judged(
    make_watched: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 60))
        await until(lambda: windows(worker, "too_small") >= 1)
        assert windows(worker, "clean") == 0
        await send(client, pictures(7, 60))
        await until(lambda: windows(worker, "clean") == 1)  # of all 120: what was too small went on
        assert rows_in(worker.settings.state) == 120

    run(make_watched(window_minutes=0.01), work)


def test_what_a_replay_sends_is_neither_counted_nor_remembered(make_watched: MakeSettings) -> None:
    settings = make_watched()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 40), "replay-")
        await send(client, pictures(5, 10), "other-")
        await until(lambda: metric(worker, 'slipway_watched_rows_total{outcome="watched"}') == 10)

    run(settings, work)
    assert rows_in(settings.state) == 10
    assert remembered(settings.state) == 10


def test_a_window_begins_with_its_first_row_not_when_that_is_written_down(
    make_watched: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 1))
        answered = time.time()
        await until(lambda: (status(worker).get("open_window") or {}).get("rows") == 1)
        await send(client, pictures(5, 200))
        await until(lambda: bool(status(worker)["windows"]))
        assert answered - 2 < status(worker)["windows"][-1]["opened"] < answered

    run(make_watched(window_rows=200), work)


def test_a_wrong_prediction_is_evidence_though_its_truth_was_told_before_it_was_written_down(
    make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(
        RolloutReconciler, "note_wrong", lambda self, version: noted.append(version)
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        (picture,) = pictures(5, 1)
        label = (await send(client, [picture]))[0]["label"]
        other = next(
            one for one in worker.require_model().bundle.manifest.output.labels if one != label
        )
        for request_id, truth in (("right-0", label), ("wrong-0", other)):
            assert (
                await client.post("/feedback", json={"request_id": request_id, "truth": truth})
            ).status_code == 202
        await send(client, [picture], "right-")
        await send(client, [picture], "wrong-")
        await until(lambda: noted == [worker.require_model().version])

    run(make_watched(), work)


async def send_50(seed: int, client: httpx.AsyncClient, worker: ModelWorker) -> None:
    await send(client, pictures(seed, 50))


def test_a_window_goes_on_after_a_restart_and_no_row_counts_twice(
    make_watched: MakeSettings,
) -> None:
    settings = make_watched()
    for seed in range(3):
        run(settings, partial(send_50, seed))
        assert rows_in(settings.state) == 50 * (seed + 1)
    with closing(sqlite3.connect(settings.state / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM windows").fetchone() == (1,)


def test_a_bundle_without_a_reference_is_served_and_counted_and_says_that_it_has_none(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 20))
        await until(lambda: metric(worker, "slipway_confidence_count") == 20)
        await until(lambda: "reference" in status(worker)["state"])
        assert sum(errors(worker, part) for part in PARTS) == 0

    run(make_settings(), work)


@pytest.mark.parametrize("watch", [True, False])
def test_rows_that_are_watched_are_counted_from_the_start_and_as_a_window_grows_that_does_not_end(
    make_watched: MakeSettings, watch: bool
) -> None:
    settings = make_watched(watch=watch, window_rows=10_000_000, window_minutes=44_640)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert f"{WATCHED} 0.0" in worker.exposition().decode()  # an alert asks whether it rises
        for count in (40, 80) if watch else ():
            await send(client, pictures(count, 40))
            await until(
                lambda count=count: metric(worker, WATCHED) == rows_in(settings.state) == count  # type: ignore[misc]
            )
        assert sum(windows(worker, verdict) for verdict in ("clean", "drifted", "too_small")) == 0

    run(settings, work)


def test_nothing_is_watched_where_it_is_off_or_only_the_verify_stage_is_answered(
    make_watched: MakeSettings,
) -> None:
    for settings in (make_watched(watch=False), make_watched(accept_draft=True)):

        async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
            await send(client, pictures(5, 5))
            assert [status_part(worker, part) for part in ("drift", "feedback")] == [None, None]

        run(settings, work)
        assert not (settings.state / DATABASE).exists()


@pytest.mark.parametrize(
    ("owner", "method", "part"),
    [
        (Watcher, "_gather", "collect"),
        (Watcher, "_add", "features"),
        (Store, "merge", "state"),
        (Watcher, "_measure", "quality"),
        (Watcher, "_propose", "proposal"),
    ],
)
@pytest.mark.parametrize("error", [MemoryError(), sqlite3.OperationalError("database is locked")])
def test_whatever_raises_costs_no_request_is_counted_and_recovers(
    make_watched: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    part: str,
    error: Exception,
) -> None:
    part = "state" if isinstance(error, sqlite3.Error) else part

    def fail(*arguments: object) -> None:
        raise error

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, fail)
            await send(client, pictures(5, 20))
            await until(lambda: errors(worker, part) > 0)
            await until(lambda: bool(status(worker)["faults"]))
        before = metric(worker, "slipway_confidence_count")
        await send(client, pictures(6, 20))
        await until(lambda: metric(worker, "slipway_confidence_count") >= before + 20)
        await until(lambda: not status(worker)["faults"])
        await send(client, pictures(7, 20))

    run(make_watched(), work)
    assert rows_in(make_watched().state) >= 20


def test_a_reference_that_cannot_be_read_costs_no_request_and_is_tried_again(
    make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_reference
    fails = [True]

    def sometimes(bundle: LoadedBundle, variant: str) -> Reference | None:
        if fails:
            raise BundleError("planted")
        return read(bundle, variant)

    monkeypatch.setattr(watched_models, "read_reference", sometimes)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 20))
        await until(lambda: errors(worker, "features") > 0)
        await until(lambda: "tried again" in status(worker)["state"])
        await until(
            lambda: metric(worker, "slipway_confidence_count") == 20
        )  # what needs no reference is counted
        fails.clear()
        await until(lambda: status(worker)["state"] == "watching")
        await send(client, pictures(6, 20))
        await until(lambda: metric(worker, 'slipway_watched_rows_total{outcome="watched"}') == 20)

    run(make_watched(), work)


def test_a_window_that_cannot_be_judged_is_counted_and_the_next_begins(
    make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                WatchedModel, "judge", lambda *arguments: {"drifted": True, "value": float("nan")}
            )
            await send(client, pictures(5, 150))
            await until(lambda: errors(worker, "judge") >= 1)
        assert windows(worker, "drifted") == 0
        await send(client, pictures(6, 150))
        await until(lambda: windows(worker, "clean") >= 1)

    run(make_watched(window_rows=100), work)


@pytest.mark.process
def test_a_full_queue_drops_and_counts_without_waiting(
    make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_WAITING", 10)
    monkeypatch.setattr(watching, "GATHER_S", 0.5)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await until(lambda: status(worker)["state"] != "starting")
        await send(client, pictures(5, 32))
        await until(lambda: metric(worker, 'slipway_watched_rows_total{outcome="dropped"}') >= 12)
        await until(
            lambda: (
                sum(
                    metric(worker, f'slipway_watched_rows_total{{outcome="{name}"}}')
                    for name in ("watched", "dropped")
                )
                == 32
            )
        )

    run(make_watched(), work)


@pytest.mark.process
def test_what_waits_is_bounded_with_the_bodies_that_it_holds(
    make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs for seconds would else fill the memory: a photograph is a hundred times what the network takes of it."""
    monkeypatch.setattr(watching, "MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(watching, "GATHER_S", 0.5)
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
        stream, "PNG"
    )
    large = stream.getvalue()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await until(lambda: status(worker)["state"] != "starting")
        await send(client, [large] * 32)
        await until(
            lambda: (
                metric(worker, 'slipway_watched_rows_total{outcome="dropped"}')
                >= 32 - 2 * (100_000 // len(large))
            )
        )

    run(make_watched(), work)


def test_the_series_of_drift_and_quality_are_bounded(make_watched: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 200, shift=60))
        await until(lambda: metric(worker, "slipway_drift_alarm") == 1)
        lines = [
            line
            for line in worker.exposition().decode().splitlines()
            if re.match(r"slipway_(drift|classes|estimate|true)", line)
        ]
        assert len(lines) < 60

    run(make_watched(window_rows=100), work)


def test_two_models_have_windows_of_their_own(certified: Path, make_watched: MakeSettings) -> None:
    settings = make_watched()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 30))

    run(settings, work)
    bundle = watched_bundle(certified)
    manifest = json.loads((bundle.root / "bundle.json").read_text()) | {
        "left_out": {"int8": "planted"}
    }
    (bundle.root / "bundle.json").write_text(json.dumps(manifest))
    certify(certified / "certificate.json", load_bundle(bundle.root))
    run(settings, work)
    with closing(sqlite3.connect(settings.state / DATABASE)) as connection:
        found = connection.execute("SELECT model, num_rows FROM windows ORDER BY id").fetchall()
    assert [rows for _, rows in found] == [30, 30]
    assert len({model for model, _ in found}) == 2
