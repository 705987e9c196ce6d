"""Summarizes the predictions in Triton's statistics format, from the service's metrics."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric

from slipway.serving.metrics.service_metrics import PREDICTION_ROUTES

_DURATION = "slipway_prediction_duration_seconds"
_FAILED_SECONDS = "slipway_failed_prediction_seconds_total"
_STAGES = {
    "queue": "queue",
    "compute_input": "decode",
    "compute_infer": "infer",
    "compute_output": "encode",
}


def summarize(metrics: Iterable[Metric], name: str, version: str) -> dict[str, Any]:
    """Return the entry of `model_stats`. It counts predictions of all versions since the start.

    The hexadecimal `version` becomes decimal: Triton's perf_analyzer reads it as an integer, and
    fails or finds no statistics for any other text.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    num_failed = 0
    for sample in (sample for metric in metrics for sample in metric.samples):
        sums[sample.name + sample.labels.get("stage", "")] += sample.value
        is_prediction = sample.labels.get("route", "").endswith(PREDICTION_ROUTES)
        if sample.name == "slipway_requests_total" and is_prediction:
            num_failed += int(sample.value) if sample.labels["code"] != "200" else 0

    def duration(count: str, seconds: str) -> dict[str, int]:
        return {"count": int(sums[count]), "ns": round(1e9 * sums[seconds])}

    stages = {
        theirs: duration(f"slipway_stage_seconds_count{ours}", f"slipway_stage_seconds_sum{ours}")
        for theirs, ours in _STAGES.items()
    }
    return {
        "name": name,
        "version": str(int(version, 16)),
        "inference_count": int(sums["slipway_batch_size_sum"]),  # rows
        "execution_count": int(sums["slipway_batch_size_count"]),  # batches
        "inference_stats": {
            "success": duration(f"{_DURATION}_count", f"{_DURATION}_sum"),
            "fail": {"count": num_failed, "ns": round(1e9 * sums[_FAILED_SECONDS])},
            **stages,
        },
        "batch_stats": [],
    }
