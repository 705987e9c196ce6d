import asyncio
import re
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from slipway.serving.endpoints.info import percentile_ms, summarize_traffic
from slipway.serving.http.responses import ERRORS
from slipway.serving.metrics.service_metrics import FLUSH_S, ServiceMetrics
from slipway.serving.metrics.tallies import CounterTally, HistogramTally
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run

PNG = {"content-type": "image/png"}
BOUNDS = (0.1, 1.0, 2.5)


def exposed(registry: CollectorRegistry) -> str:
    """Return the metrics as text, without the creation times of series."""
    return re.sub(r"^.*_created.*\n", "", generate_latest(registry).decode(), flags=re.MULTILINE)


@settings(deadline=None)
@given(st.lists(st.floats(0, 5, allow_nan=False) | st.sampled_from(BOUNDS)), st.integers(1, 4))
def test_a_histogram_tally_equals_a_prometheus_histogram(
    values: list[float], flush_every: int
) -> None:
    own, tallied = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("seconds", "Help.", buckets=BOUNDS, registry=own)
    distribution = HistogramTally(
        Histogram("seconds", "Help.", buckets=BOUNDS, registry=tallied), BOUNDS
    )
    for number, value in enumerate(values):
        reference.observe(value)
        distribution.observe(value)
        if number % flush_every == 0:
            distribution.flush()
    distribution.flush()
    distribution.flush()  # which has nothing to add
    found, expected = exposed(tallied).splitlines(), exposed(own).splitlines()
    assert [line for line in found if "_sum" not in line] == [
        line for line in expected if "_sum" not in line
    ]
    sums = [
        float(line.split()[-1]) for line in (*found, *expected) if line.startswith("seconds_sum")
    ]
    assert sums[0] == pytest.approx(sums[1])


def test_flushing_while_another_thread_counts_loses_and_duplicates_nothing() -> None:
    registry = CollectorRegistry()
    count = CounterTally(Counter("things", "Help.", registry=registry))
    distribution = HistogramTally(
        Histogram("seconds", "Help.", buckets=BOUNDS, registry=registry), BOUNDS
    )
    is_over = threading.Event()

    def flush_all_the_time() -> None:
        while not is_over.is_set():
            count.flush()
            distribution.flush()

    thread = threading.Thread(target=flush_all_the_time)
    thread.start()
    for _ in range(100_000):
        count.total += 1
        distribution.observe(1.0)
    is_over.set()
    thread.join()
    count.flush()
    distribution.flush()
    assert "things_total 100000.0" in exposed(registry)
    assert "seconds_count 100000.0" in exposed(registry)
    assert "seconds_sum 100000.0" in exposed(registry)


def test_counts_are_flushed_within_the_documented_time() -> None:
    async def work() -> None:
        metrics = ServiceMetrics()
        metrics.answered("/predict", 200)
        metrics.refused("internal")
        assert 'slipway_requests_total{code="200",route="/predict"} 0.0' in exposed(
            metrics.registry
        )  # the twin: not yet
        await asyncio.sleep(3 * FLUSH_S)
        text = exposed(metrics.registry)
        assert 'slipway_requests_total{code="200",route="/predict"} 1.0' in text
        assert 'slipway_errors_total{error="internal"} 1.0' in text

    asyncio.run(work())


def test_counts_are_exact_at_every_scrape_and_after_close() -> None:
    async def work() -> None:
        metrics = ServiceMetrics()
        for number in range(1, 4):
            metrics.answered("/predict", 200)
            assert f'code="200",route="/predict"}} {number}.0' in metrics.exposition().decode()
        metrics.close()
        metrics.answered("/predict", 503)  # an answer after the end of the model
        assert 'code="503",route="/predict"} 1.0' in exposed(metrics.registry)

    asyncio.run(work())


def test_the_traffic_summary_counts_the_requests(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        empty = summarize_traffic(worker.metrics.collect())
        assert (empty["requests_by_code"], empty["predictions"]) == ({}, 0)
        assert empty["latency_ms"] == {"p50": None, "p95": None, "p99": None}
        for number in range(6):
            await client.post("/predict", content=picture(number), headers=PNG)
        await client.post("/predict", files=[("image", ("x.png", picture(), "image/png"))] * 3)
        await client.post("/predict", content=b"no image", headers=PNG)
        summary = summarize_traffic(worker.metrics.collect())
        assert summary["requests_by_code"] == {"200": 7, "422": 1}
        assert summary["predictions"] == 9
        assert (summary["queue_depth"], summary["expired"]) == (0, 0)
        latency = summary["latency_ms"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] < 30_000

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("buckets", "percentile", "expected"),
    [
        ([(0.1, 50), (0.2, 100), (float("inf"), 100)], 50, 100.0),
        ([(0.1, 50), (0.2, 100), (float("inf"), 100)], 75, 150.0),
        ([(0.1, 0), (0.2, 10), (float("inf"), 10)], 10, 110.0),
        ([(0.1, 1), (0.2, 1), (float("inf"), 100)], 99, 200.0),  # beyond the last bound
        ([(0.1, 0), (float("inf"), 0)], 50, None),
        ([], 50, None),
    ],
)
def test_percentiles_equal_those_of_prometheus(
    buckets: list[tuple[float, float]], percentile: int, expected: float
) -> None:
    found = percentile_ms(buckets, percentile)
    assert found == (None if expected is None else pytest.approx(expected))


def test_batches_are_observed_with_size_and_fill(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post(
            "/predict", files=[("image", ("x.png", picture(), "image/png"))] * 5
        )  # batches of 4 and 1
        assert metric(worker, "slipway_batch_fill_sum") == 1.25
        assert metric(worker, 'slipway_batch_fill_bucket{le="0.25"}') == 1
        assert metric(worker, 'slipway_stage_seconds_count{stage="queue"}') == 1
        assert metric(worker, "slipway_queue_wait_seconds_count") == 1

    run(make_settings(max_batch_size=4), work)


MOST_SERIES = 300  # for each worker, whatever is asked


def test_the_number_of_series_of_a_worker_is_limited_for_any_requests(
    make_settings: MakeSettings,
) -> None:
    """Every error code, five codes on every path, every stage: the most that callers can cause."""

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for code in ERRORS:
            worker.metrics.refused(code)
        for route in ("/", "/predict", "/livez", "/readyz", "/metrics", "/model", "other"):
            for status in (200, 404, 405, 429, 503):
                worker.metrics.answered(route, status)
        lines = worker.metrics.exposition().decode().splitlines()
        num_series = sum(not line.startswith("#") and "_created" not in line for line in lines)
        assert 100 < num_series < MOST_SERIES

    run(make_settings(), work)


def test_docs_state_the_flush_interval() -> None:
    assert f"at most {FLUSH_S:g} s old" in Path("docs/reference/serving.md").read_text()


def test_the_docs_name_the_buckets_of_prediction_duration_and_the_model_labels(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        text = worker.metrics.exposition().decode()
        bounds = [
            float(bound)
            for bound in re.findall(
                r'slipway_prediction_duration_seconds_bucket\{le="([\d.]+)"\}', text
            )
        ]
        (row,) = re.findall(r"^\| `slipway_prediction_duration_seconds` .+$", page, re.MULTILINE)
        assert row.endswith(f"bounds {', '.join(f'{bound:g}' for bound in bounds)} |")
        (labels,) = re.findall(r"^slipway_model_info\{(.+)\} 1.0$", text, re.MULTILINE)
        (row,) = re.findall(r"^\| `slipway_model_info` \| (.+?) \|", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == set(re.findall(r'(\w+)="', labels))

    page = Path("docs/reference/serving.md").read_text()
    run(make_settings(), work)
