"""What the page shows of the traffic, from the service's own metrics as they are scraped: over all workers, of no caller in particular."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PERCENTILES = (50, 95, 99)


def traffic(exposition: bytes, asking: Collection[str]) -> dict[str, Any]:
    """A summary of the metrics in `exposition`, since the service began; `asking` are the routes that count as traffic.

    `requests` by status and `errors` by code are counts, `latency_ms` has the percentiles of a prediction (None before the first),
    and `latency_buckets` the histogram behind them, [seconds, predictions that took at most so long], so that whoever
    reads it twice can tell the percentiles of the time between.
    """
    requests: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    buckets: dict[float, float] = {}
    single = {"slipway_queue_depth": 0.0, "slipway_ready": 0.0, "slipway_batch_size_sum": 0.0}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            if sample.name == "slipway_requests_total" and sample.labels["route"] in asking:
                requests[sample.labels["code"]] += int(sample.value)
            elif sample.name == "slipway_errors_total" and sample.value:
                errors[sample.labels["error"]] += int(sample.value)
            elif sample.name == "slipway_predict_seconds_bucket":
                buckets[float(sample.labels["le"])] = sample.value
            elif sample.name in single:
                single[sample.name] = sample.value
    latencies = {f"p{percent}": quantile(buckets, percent / 100) for percent in PERCENTILES}
    return {
        "requests": dict(sorted(requests.items())),
        "errors": dict(errors.most_common()),
        "predictions": int(buckets.get(math.inf, 0)),
        "rows": int(single["slipway_batch_size_sum"]),
        "queue_depth": int(single["slipway_queue_depth"]),
        "workers_ready": int(single["slipway_ready"]),
        "latency_ms": {name: None if seconds is None else round(seconds * 1000, 3) for name, seconds in latencies.items()},
        "latency_buckets": [[None if math.isinf(bound) else bound, int(count)] for bound, count in sorted(buckets.items())],
    }


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value that `share` of the observations do not exceed, linear within a bucket, as Prometheus' histogram_quantile has it.

    `buckets` are cumulative counts by upper bound, the last one infinity, whose observations count as the largest finite bound.
    None without observations.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0
    if not total:
        return None
    wanted, below, lower = share * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (buckets[bound] - below)
        below, lower = buckets[bound], lower if math.isinf(bound) else bound
    return lower
