"""`GET /status`: content, caching and failing parts; and the summary of traffic."""

import asyncio
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from slipway.serving.endpoints import info
from slipway.serving.endpoints.info import summarize_traffic
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import run, set_status_part

PNG = {"content-type": "image/png"}
PARTS = ["model", "traffic", "drift", "feedback", "rollout", "gpu"]


async def fresh(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the current status, bypassing the cache."""
    with monkeypatch.context() as patch:
        patch.setattr(info, "_MAX_AGE_S", 0.0)
        content: dict[str, Any] = (await client.get("/status")).json()
        return content


def test_status_counts_only_requests_of_callers(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number in range(9):
            await client.post(
                "/predict", content=picture(number) if number % 3 else b"bad", headers=PNG
            )
        await client.get("/nowhere")
        for path in ("/livez", "/metrics", "/model", "/"):  # is no traffic
            await client.get(path)
        content = await fresh(client, monkeypatch)
        assert list(content) == PARTS
        assert content["model"] == {
            "ready": True,
            "reason": None,
            "version": worker.require_model().version,
            "task": "image_classification",
        }
        found = content["traffic"]
        assert found["requests_by_code"] == {"200": 6, "404": 1, "422": 3}
        assert found["errors_by_code"] == {"undecodable": 3, "not_found": 1}
        assert (
            found["predictions"],
            found["queue_depth"],
            found["workers_ready"],
            found["expired"],
        ) == (6, 0, 1, 0)
        assert found["latency_buckets"][-1] == [None, 6]
        assert (
            0
            < found["latency_ms"]["p50"]
            <= found["latency_ms"]["p95"]
            <= found["latency_ms"]["p99"]
            < 10_000
        )

    run(make_settings(), work)


def test_without_a_model_the_status_has_the_reason_and_no_latencies(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.get("/status")
        assert answer.status_code == 200
        assert answer.json()["model"]["ready"] is False
        assert "nothing proves this bundle" in answer.json()["model"]["reason"]
        assert answer.json()["traffic"]["latency_ms"] == {"p50": None, "p95": None, "p99": None}

    settings = make_settings()
    settings.certificate.unlink()
    run(settings, work)


def test_the_status_is_computed_at_most_once_a_second(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        made: list[str] = []

        def part() -> dict[str, Any]:
            made.append(threading.current_thread().name)
            return {"times": len(made)}

        set_status_part(worker, "rollout", "rollout", part)
        answers = await asyncio.gather(*(client.get("/status") for _ in range(50)))
        assert {answer.json()["rollout"]["times"] for answer in answers} == {1}
        assert made != [threading.main_thread().name]  # beside the event loop
        assert (await fresh(client, monkeypatch))["rollout"]["times"] == 2

    run(make_settings(), work)


def test_status_shows_all_other_parts_if_one_part_fails(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        def fail() -> dict[str, Any]:
            raise OSError("planted")

        set_status_part(worker, "monitoring", "drift", fail)
        set_status_part(worker, "monitoring", "feedback", lambda: {"joined": 3})
        content = (await client.get("/status")).json()
        assert content["drift"] == {"failed": True}
        assert content["feedback"] == {"joined": 3}
        assert content["model"]["ready"]

    run(make_settings(), work)


def test_traffic_summary_covers_only_the_counted_routes() -> None:
    registry = CollectorRegistry()
    requests = Counter("slipway_requests", "", ["route", "code"], registry=registry)
    requests.labels("/predict", "200").inc(5)
    requests.labels("/status", "200").inc(7)
    assert summarize_traffic(registry.collect(), ["/predict"])["requests_by_code"] == {"200": 5}
    assert summarize_traffic(registry.collect())["requests_by_code"] == {"200": 12}


def test_latency_percentiles_lie_in_the_same_buckets_as_the_true_percentiles() -> None:
    bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
    registry = CollectorRegistry()
    histogram = Histogram(
        "slipway_prediction_duration_seconds", "", buckets=bounds, registry=registry
    )
    seconds = np.random.default_rng(0).lognormal(-4, 0.8, 5000)
    for value in seconds:
        histogram.observe(value)
    found = summarize_traffic(registry.collect())["latency_ms"]
    for percent in (50, 95, 99):
        true = np.quantile(seconds, percent / 100)
        upper = next(bound for bound in bounds if bound >= true)
        lower = max(bound for bound in (0.0, *bounds) if bound < true)
        assert lower * 1000 <= found[f"p{percent}"] <= upper * 1000
