"""Metrics of monitoring: counters of one worker, and gauges of the state that all workers share.

The gauges of drift and quality come from one record that is replaced as a whole. So a scrape never
mixes two windows, all workers show the same values, and features of a replaced model disappear.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.metrics.tallies import HistogramTally

# Labels of slipway_monitoring_errors_total.
PARTS = ("collect", "features", "state", "judge", "quality", "proposal", "feedback", "database")
MAX_CLASSES = 50
MAX_FEATURES = 30
OTHER = "other"
CONFIDENCES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

Bounds = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class GaugeValues:
    """Values of the gauges for the served model and its last window; None while unknown."""

    alarm: bool | None = None
    # (name, statistic, threshold), strongest first
    features: Sequence[tuple[str, float, float]] = ()
    estimate: Bounds | None = None  # None if it is not valid
    is_estimate_valid: bool | None = None
    quality: dict[str, Bounds] = field(default_factory=dict)  # bounds by metric
    num_joined: int = 0  # number of rows from which `quality` was measured
    num_waiting: int = 0  # rows waiting for the database of several services


class MonitoringMetrics(Collector):
    """Counters of one worker, and the gauges of `values`."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        self.values = GaugeValues()
        self._classes = Counter(
            "slipway_classes_total", "Predicted classes.", ["label"], registry=registry
        )
        confidence = Histogram(
            "slipway_confidence",
            "Probability of the predicted class.",
            buckets=CONFIDENCES,
            registry=registry,
        )
        self._confidence = HistogramTally(confidence, CONFIDENCES)
        self.ood_rows = Counter(
            "slipway_ood_rows_total", "Rows unlike the training rows.", registry=registry
        )
        self.missing_values = Counter(
            "slipway_missing_values_total", "Missing values in table rows.", registry=registry
        )
        rows = Counter(
            "slipway_monitored_rows_total",
            "Predicted rows by what monitoring did with them.",
            ["outcome"],
            registry=registry,
        )
        windows = Counter(
            "slipway_drift_windows_total",
            "Windows that ended, by verdict.",
            ["verdict"],
            registry=registry,
        )
        feedback = Counter(
            "slipway_feedback_total", "Labels that callers sent.", ["outcome"], registry=registry
        )
        self.rows = _children(rows, "monitored", "skipped", "dropped")
        self.windows = _children(windows, "clean", "drifted", "too_small")
        self.feedback = _children(feedback, "joined", "unknown_request", "duplicate", "invalid")
        metrics.add_fault_parts(*PARTS)
        metrics.register_shared(self)
        self.fault = metrics.fault  # function that counts one failure of a part
        self._labels: set[str] = set()

    def count_classes(self, counts: dict[str, int]) -> None:
        """Count predicted labels by name; those beyond the first MAX_CLASSES count as "other"."""
        for label, count in counts.items():
            if label not in self._labels and len(self._labels) < MAX_CLASSES:
                self._labels.add(label)
            self._classes.labels(label if label in self._labels else OTHER).inc(count)

    def count_confidences(self, counts: Sequence[int], total: float) -> None:
        """Add counts by bucket of CONFIDENCES, and the sum of values.

        Call it on one thread only.
        """
        self._confidence.include(counts, total)
        self._confidence.flush()

    def collect(self) -> Iterator[Metric]:
        values = self.values
        features = values.features[:MAX_FEATURES]
        yield _gauge(
            "slipway_drift_statistic",
            "Drift statistic of the last window.",
            {name: statistic for name, statistic, _ in features},
            "feature",
        )
        yield _gauge(
            "slipway_drift_threshold",
            "Largest statistic without an alarm.",
            {name: threshold for name, _, threshold in features},
            "feature",
        )
        yield _gauge("slipway_drift_alarm", "1 if the last window drifted.", values.alarm)
        value, low, high = values.estimate or (None, None, None)
        yield _gauge(
            "slipway_estimated_quality",
            "Accuracy or RMSE of the last window, estimated without labels.",
            value,
        )
        yield _gauge("slipway_estimated_quality_low", "Lower bound of the estimate.", low)
        yield _gauge("slipway_estimated_quality_high", "Upper bound of the estimate.", high)
        yield _gauge(
            "slipway_estimate_valid", "1 if the estimate is reliable.", values.is_estimate_valid
        )
        texts = (
            "Quality on the last rows with a label from feedback.",
            "Lower bound of slipway_feedback_quality.",
            "Upper bound of slipway_feedback_quality.",
        )
        for place, (suffix, text) in enumerate(zip(("", "_low", "_high"), texts, strict=True)):
            quality = {name: bounds[place] for name, bounds in values.quality.items()}
            yield _gauge(f"slipway_feedback_quality{suffix}", text, quality, "metric")
        yield _gauge(
            "slipway_feedback_quality_rows",
            "Rows behind slipway_feedback_quality.",
            values.num_joined,
        )
        yield _gauge(
            "slipway_feedback_waiting_rows",
            "Predictions and labels that wait for SLIPWAY_DATABASE_URL.",
            values.num_waiting,
        )


def _children(counter: Counter, *values: str) -> dict[str, Counter]:
    """Create the series for all values of a counter's label, so that all are exported at once."""
    return {value: counter.labels(value) for value in values}


def _gauge(
    name: str, text: str, value: Mapping[str, float] | float | None, label: str = ""
) -> GaugeMetricFamily:
    """Build a gauge of one value, or of one value for each value of `label`."""
    family = GaugeMetricFamily(name, text, labels=[label] if label else [])
    if isinstance(value, Mapping):
        for key, number in value.items():
            family.add_metric([key], number)
    elif value is not None:
        family.add_metric([], float(value))
    return family
