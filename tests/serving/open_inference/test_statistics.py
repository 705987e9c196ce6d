"""The service's metrics in Triton's statistics format."""

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from slipway.serving.open_inference.extension import summarize


def _histogram(name: str, count: int, total: float, stage: str | None = None) -> Metric:
    family = HistogramMetricFamily(name, "-", labels=["stage"] if stage else [])
    family.add_metric([stage] if stage else [], [("+Inf", count)], total)
    return family


def test_statistics_count_predictions_rows_batches_stages_and_failures() -> None:
    requests = CounterMetricFamily("slipway_requests", "-", labels=["route", "code"])
    for route, code, number in (
        ("/predict", "200", 5),
        ("/predict", "422", 2),
        ("/v2/models/slipway/infer", "429", 1),
        ("/model", "404", 9),
    ):
        requests.add_metric([route, code], number)
    failed = CounterMetricFamily("slipway_failed_prediction_seconds", "-", value=0.125)
    found = summarize(
        [
            requests,
            failed,
            _histogram("slipway_prediction_duration_seconds", 5, 0.5),
            _histogram("slipway_batch_size", 3, 8),
            _histogram("slipway_stage_seconds", 5, 0.25, "infer"),
        ],
        "slipway",
        "abc9c8f93760",
    )
    assert found["version"] == "188883148552032"  # perf_analyzer takes integers only
    assert (found["inference_count"], found["execution_count"]) == (8, 3)
    stats = found["inference_stats"]
    assert stats["success"] == {"count": 5, "ns": 500_000_000}
    assert stats["compute_infer"] == {"count": 5, "ns": 250_000_000}
    assert stats["queue"] == {"count": 0, "ns": 0}
    assert stats["fail"] == {"count": 3, "ns": 125_000_000}
