"""What the service's own metrics say of its traffic, for people: over all workers, and of no caller in particular."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from prometheus_client.metrics_core import Metric

PERCENTILES = (50, 95, 99)
_SINGLE = {
    "predictions": "slipway_batch_size_sum",
    "queue_depth": "slipway_queue_depth",
    "expired": "slipway_expired_total",
    "workers_ready": "slipway_ready",
}


def traffic(metrics: Iterable[Metric], asking: Collection[str] | None = None) -> dict[str, Any]:
    """A summary of `metrics`, since the service began; `asking` are the routes that count as requests, None: all of them.

    `requests_by_code` and `errors_by_code` are counts, `predictions` the rows that a model answered, those of explanations included.
    `latency_ms` has the percentiles of a prediction (None before the first), and `latency_buckets` the histogram behind them, [seconds,
    predictions that took at most so long], the last bound None: whoever reads it twice can tell the percentiles of the time between.
    """
    requests: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    buckets: list[tuple[float, float]] = []
    single = dict.fromkeys(_SINGLE.values(), 0)
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name == "slipway_requests_total" and (
            asking is None or sample.labels["route"] in asking
        ):
            requests[sample.labels["code"]] += int(sample.value)
        elif sample.name == "slipway_errors_total" and sample.value:
            errors[sample.labels["error"]] += int(sample.value)
        elif sample.name == "slipway_predict_seconds_bucket":
            buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name in single:
            single[sample.name] = int(sample.value)
    return {
        "requests_by_code": dict(sorted(requests.items())),
        "errors_by_code": dict(errors.most_common()),
        **{name: single[sample] for name, sample in _SINGLE.items()},
        "latency_ms": {
            f"p{percentile}": percentile_ms(buckets, percentile) for percentile in PERCENTILES
        },
        "latency_buckets": [
            [bound if math.isfinite(bound) else None, int(count)]
            for bound, count in sorted(buckets)
        ],
    }


def percentile_ms(buckets: Iterable[tuple[float, float]], percentile: int) -> float | None:
    """From (bound in seconds, values up to it) of a histogram, as Prometheus' histogram_quantile; None without any value.

    Within a bucket values are taken to be spread evenly; beyond the last bound it is that bound.
    """
    below, bound_below = 0.0, 0.0
    ordered = sorted(buckets)
    if not ordered or not ordered[-1][1]:
        return None
    rank = percentile / 100 * ordered[-1][1]
    for bound, up_to in ordered:
        if up_to >= rank and math.isfinite(bound):
            return 1000 * (bound_below + (bound - bound_below) * (rank - below) / (up_to - below))
        if math.isfinite(bound):
            below, bound_below = up_to, bound
    return 1000 * bound_below
