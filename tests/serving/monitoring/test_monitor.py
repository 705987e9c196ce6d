"""The traffic monitor counts, judges and stores traffic, and never affects a request."""

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

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.drift.reference import Reference, read_reference
from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.monitoring import models, monitor, queue
from slipway.serving.monitoring.aggregator import TrafficAggregator
from slipway.serving.monitoring.metrics import MAX_CLASSES, PARTS, MonitoringMetrics
from slipway.serving.monitoring.models import MonitoredModel
from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.monitoring.sampling import RequestSampler
from slipway.serving.monitoring.store import Store
from slipway.serving.rollout.reconciler import RolloutReconciler
from slipway.serving.worker import ModelWorker
from slipway.system.errors import BundleError
from slipway.traffic.monitoring_records import DATABASE
from tests.serving.bundles import certify, picture, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run, status_part, until
from tests.serving.monitoring.monitored import monitored_bundle, num_predictions, pictures

PNG = {"content-type": "image/png"}
MONITORED = 'slipway_monitored_rows_total{outcome="monitored"}'

pytestmark = pytest.mark.usefixtures("quick_monitoring")


async def send(
    client: httpx.AsyncClient, payloads: list[bytes], prefix: str = ""
) -> list[dict[str, Any]]:
    """Send requests, 32 at a time. Returns their responses."""
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
    """Return the number of rows in all windows; 0 while the database is being created."""
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        try:
            found = connection.execute("SELECT total(num_rows) FROM windows").fetchone()
        except sqlite3.OperationalError:
            return 0
    return int(found[0])


@pytest.fixture(params=["sampled", "only counted"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sample every request, as without load, or none, as for most requests under heavy load."""
    if request.param == "only counted":
        monkeypatch.setattr(RequestSampler, "divide", lambda self, requests: ((), requests))
    return str(request.param)


def test_monitoring_metrics_count_classes_confidences_and_outliers_of_all_predictions(
    make_monitored: MakeSettings, mode: str
) -> None:
    outcome = "monitored" if mode == "sampled" else "skipped"
    payloads = pictures(3, 40) + [picture(seed) for seed in range(20)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answers = await send(client, payloads)
        await until(
            lambda: metric(worker, f'slipway_monitored_rows_total{{outcome="{outcome}"}}') == 60
        )
        for label, count in Counter(answer["label"] for answer in answers).items():
            assert metric(worker, f'slipway_classes_total{{label="{label}"}}') == count
        assert metric(worker, "slipway_ood_rows_total") == sum(
            answer["is_ood"] for answer in answers
        )
        highest = [max(answer["probabilities"].values()) for answer in answers]
        assert metric(worker, "slipway_confidence_count") == 60
        assert metric(worker, 'slipway_confidence_bucket{le="0.7"}') == sum(
            share <= np.float32(0.7) for share in highest
        )
        assert metric(worker, "slipway_confidence_sum") == pytest.approx(sum(highest))

    run(make_monitored(), work)


def test_metrics_count_labels_beyond_the_fiftieth_as_other() -> None:
    service_metrics = ServiceMetrics()
    registry = service_metrics.registry
    metrics = MonitoringMetrics(service_metrics)
    metrics.count_classes({f"label{number}": 1 for number in range(MAX_CLASSES + 30)})
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("slipway_classes_total")
    ]
    assert len(lines) == MAX_CLASSES + 1
    assert 'slipway_classes_total{label="other"} 30.0' in lines


@pytest.mark.usefixtures("mode")
def test_metrics_count_missing_values_of_table_rows(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    rows = [table_row(number) for number in range(10)]  # every fifth lacks its city

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", json={"rows": [*rows, rows[1] | {"income": None}]})
        await until(lambda: metric(worker, "slipway_missing_values_total") > 0)
        assert metric(worker, "slipway_missing_values_total") == 3

    run(make_settings(), work)


@pytest.mark.process
def test_drift_verdict_is_clean_for_rows_like_the_reference_and_drifted_for_shifted_ones(
    make_monitored: MakeSettings,
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
        assert {"brightness", "ood_score"} <= drifted
        strength = metric(worker, 'slipway_drift_statistic{feature="brightness"}')
        assert strength > metric(worker, 'slipway_drift_threshold{feature="brightness"}') > 0

    run(make_monitored(window_rows=200), work)


@pytest.mark.process
def test_drift_alarm_writes_one_proposal_with_commands_and_changes_no_model(
    make_monitored: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_monitored(
        window_rows=200, request_log_directory=str(make_monitored().state.parent / "log")
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 700, shift=60))
        await until(
            lambda: status(worker).get("proposal") is not None and windows(worker, "drifted") >= 2
        )
        version = worker.require_model().version
        (proposal,) = (settings.state / "proposals").glob(
            "*.md"
        )  # one when drift begins, none for later windows
        assert str(proposal) == status(worker)["proposal"]["path"]
        text = proposal.read_text()
        assert version in text
        assert re.search(r"^\| brightness \| \w+ \| [\d.e+-]+ \| [\d.e+-]+ \|$", text, re.MULTILINE)
        assert (
            "slipway dataset collect data/collected.parquet "
            f"--request-log {worker.request_log} --state {settings.state}" in text
        )
        assert (
            "\nslipway dataset merge data/next.parquet\n"
            "slipway run data.path=data/next.parquet\n" in text
        )
        assert worker.require_model().version == version

    with caplog.at_level(logging.WARNING, "bentoml.slipway"):
        logging.getLogger("bentoml").propagate = True
        run(settings, work)


def test_status_shows_the_proposal_after_a_clean_window_and_a_restart(
    make_monitored: MakeSettings,
) -> None:
    settings = make_monitored(window_rows=200)

    async def send_drifted(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 200, shift=60))
        await until(lambda: status(worker).get("proposal") is not None)

    async def send_clean(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 300))
        await until(
            lambda: windows(worker, "clean") >= 1 and status(worker).get("verdict") == "clean"
        )
        (proposal,) = (settings.state / "proposals").glob("*.md")
        (drifted,) = (window["closed"] for window in status(worker)["windows"] if window["drifted"])
        assert status(worker)["proposal"] == {"path": str(proposal), "closed": drifted}
        proposal.unlink()
        await until(lambda: status(worker)["proposal"] is None)

    run(settings, send_drifted)
    run(settings, send_clean)


@pytest.mark.process
def test_drift_window_past_its_time_stays_open_until_it_has_enough_rows_to_judge(
    make_monitored: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 60))
        await until(lambda: windows(worker, "too_small") >= 1)
        assert windows(worker, "clean") == 0
        await send(client, pictures(7, 60))
        await until(lambda: windows(worker, "clean") == 1)  # of all 120 rows
        assert rows_in(worker.settings.state) == 120

    run(make_monitored(window_minutes=0.01), work)


def test_replayed_requests_are_not_monitored(
    make_monitored: MakeSettings,
) -> None:
    settings = make_monitored()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 40), "replay-")
        await send(client, pictures(5, 10), "other-")
        await until(
            lambda: metric(worker, 'slipway_monitored_rows_total{outcome="monitored"}') == 10
        )

    run(settings, work)
    assert rows_in(settings.state) == 10
    assert num_predictions(settings.state) == 10


def test_window_opens_with_its_first_row_and_not_with_its_first_merge(
    make_monitored: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 1))
        answered = time.time()
        await until(lambda: (status(worker).get("open_window") or {}).get("rows") == 1)
        await send(client, pictures(5, 200))
        await until(lambda: bool(status(worker)["windows"]))
        assert answered - 2 < status(worker)["windows"][-1]["opened"] < answered

    run(make_monitored(window_rows=200), work)


def test_wrong_prediction_counts_against_a_canary_even_if_its_label_came_first(
    make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
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
                await client.post(
                    "/feedback", json={"request_id": request_id, "ground_truth": truth}
                )
            ).status_code == 202
        await send(client, [picture], "right-")
        await send(client, [picture], "wrong-")
        await until(lambda: noted == [worker.require_model().version])

    run(make_monitored(), work)


async def send_50(seed: int, client: httpx.AsyncClient, worker: ModelWorker) -> None:
    await send(client, pictures(seed, 50))


def test_window_continues_after_a_restart_without_counting_rows_twice(
    make_monitored: MakeSettings,
) -> None:
    settings = make_monitored()
    for seed in range(3):
        run(settings, partial(send_50, seed))
        assert rows_in(settings.state) == 50 * (seed + 1)
    with closing(sqlite3.connect(settings.state / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM windows").fetchone() == (1,)


def test_status_reports_a_bundle_without_drift_reference_and_counts_rows(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 20))
        await until(lambda: metric(worker, "slipway_confidence_count") == 20)
        await until(lambda: "reference" in status(worker)["state"])
        assert sum(errors(worker, part) for part in PARTS) == 0

    run(make_settings(), work)


@pytest.mark.parametrize("monitoring", [True, False])
def test_monitored_rows_counter_starts_at_zero_and_grows_before_the_window_closes(
    make_monitored: MakeSettings, monitoring: bool
) -> None:
    settings = make_monitored(monitoring=monitoring, window_rows=10_000_000, window_minutes=44_640)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert f"{MONITORED} 0.0" in worker.metrics.exposition().decode()  # an alert needs the zero
        for count in (40, 80) if monitoring else ():
            await send(client, pictures(count, 40))

            def is_counted(count: int = count) -> bool:
                return metric(worker, MONITORED) == rows_in(settings.state) == count

            await until(is_counted)
        assert sum(windows(worker, verdict) for verdict in ("clean", "drifted", "too_small")) == 0

    run(settings, work)


def test_monitoring_is_off_if_disabled_and_during_verify(
    make_monitored: MakeSettings,
) -> None:
    for settings in (make_monitored(monitoring=False), make_monitored(accept_draft=True)):

        async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
            await send(client, pictures(5, 5))
            assert [status_part(worker, part) for part in ("drift", "feedback")] == [None, None]

        run(settings, work)
        assert not (settings.state / DATABASE).exists()


@pytest.mark.parametrize(
    ("owner", "method", "part"),
    [
        (TrafficMonitor, "_gather", "collect"),
        (TrafficAggregator, "_add", "features"),
        (Store, "merge", "state"),
        (TrafficMonitor, "_measure", "quality"),
        (TrafficMonitor, "_write_proposals", "proposal"),
    ],
)
@pytest.mark.parametrize("error", [MemoryError(), sqlite3.OperationalError("database is locked")])
def test_failing_monitoring_step_affects_no_request_is_counted_and_recovers(
    make_monitored: MakeSettings,
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

    run(make_monitored(), work)
    assert rows_in(make_monitored().state) >= 20


def test_unreadable_drift_reference_affects_no_request_and_is_retried(
    make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_reference
    fails = [True]

    def sometimes(bundle: LoadedBundle, variant: str) -> Reference | None:
        if fails:
            raise BundleError("planted")
        return read(bundle, variant)

    monkeypatch.setattr(models, "read_reference", sometimes)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 20))
        await until(lambda: errors(worker, "features") > 0)
        await until(lambda: "tried again" in status(worker)["state"])
        await until(
            lambda: metric(worker, "slipway_confidence_count") == 20
        )  # what needs no reference is counted
        fails.clear()
        await until(lambda: status(worker)["state"] == "monitoring")
        await send(client, pictures(6, 20))
        await until(
            lambda: metric(worker, 'slipway_monitored_rows_total{outcome="monitored"}') == 20
        )

    run(make_monitored(), work)


def test_window_that_fails_to_be_judged_is_counted_and_the_next_one_opens(
    make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                MonitoredModel, "judge", lambda *arguments: {"drifted": True, "value": float("nan")}
            )
            await send(client, pictures(5, 150))
            await until(lambda: errors(worker, "judge") >= 1)
        assert windows(worker, "drifted") == 0
        await send(client, pictures(6, 150))
        await until(lambda: windows(worker, "clean") >= 1)

    run(make_monitored(window_rows=100), work)


@pytest.mark.process
def test_full_monitoring_queue_drops_and_counts_rows(
    make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MAX_WAITING", 10)
    monkeypatch.setattr(monitor, "GATHER_S", 0.5)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await until(lambda: status(worker)["state"] != "starting")
        await send(client, pictures(5, 32))
        await until(lambda: metric(worker, 'slipway_monitored_rows_total{outcome="dropped"}') >= 12)
        await until(
            lambda: (
                sum(
                    metric(worker, f'slipway_monitored_rows_total{{outcome="{name}"}}')
                    for name in ("monitored", "dropped")
                )
                == 32
            )
        )

    run(make_monitored(), work)


@pytest.mark.process
def test_monitoring_queue_is_bounded_in_bytes(
    make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A photo is a hundred times larger than the pixels for the network."""
    monkeypatch.setattr(queue, "MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(monitor, "GATHER_S", 0.5)
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
                metric(worker, 'slipway_monitored_rows_total{outcome="dropped"}')
                >= 32 - 2 * (100_000 // len(large))
            )
        )

    run(make_monitored(), work)


def test_drift_and_quality_have_a_bounded_number_of_series(make_monitored: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(6, 200, shift=60))
        await until(lambda: metric(worker, "slipway_drift_alarm") == 1)
        lines = [
            line
            for line in worker.metrics.exposition().decode().splitlines()
            if re.match(r"slipway_(drift|classes|estimate|feedback_quality)", line)
        ]
        assert len(lines) < 60

    run(make_monitored(window_rows=100), work)


def test_each_model_has_separate_drift_windows(
    certified: Path, make_monitored: MakeSettings
) -> None:
    settings = make_monitored()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await send(client, pictures(5, 30))

    run(settings, work)
    bundle = monitored_bundle(certified)
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
