"""The metrics of what is watched. Counters belong to a worker, as the service's others do; gauges are read from what all workers share.

The gauges of drift and quality come from one record, replaced as a whole, so that a scrape never mixes two windows, every worker
shows the same, and a feature of a model that was exchanged does not stay behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.metrics.service_metrics import ServiceMetrics
from serving.metrics.tallies import Distribution

# Of slipway_monitoring_errors_total
PARTS = ("collect", "features", "state", "judge", "quality", "proposal", "feedback")
OUTCOMES = ("watched", "thinned", "dropped")  # of a row
VERDICTS = ("clean", "drifted", "too_small")
FEEDBACK = ("joined", "unknown_request", "duplicate", "invalid")
MAX_CLASSES = 50
MAX_FEATURES = 30
OTHER = "other"
CONFIDENCES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class FeatureFigure:
    """One feature of the last window that was closed."""

    name: str
    statistic: float
    threshold: float


@dataclass(frozen=True)
class MonitoringFigures:
    """What the gauges show: of the model that is served, and of its last window. None: there is nothing to show yet."""

    alarm: bool | None = None
    features: Sequence[FeatureFigure] = ()  # the strongest first
    estimate: tuple[float, float, float] | None = (
        None  # value, low, high; None where it is not valid
    )
    is_estimate_valid: bool | None = None
    quality: dict[str, tuple[float, float, float]] = field(
        default_factory=dict
    )  # value, low, high, by metric
    num_joined: int = 0  # rows behind `quality`


class WatchingMetrics(Collector):
    """Counters of one worker, and the gauges of `figures`."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        self.figures = MonitoringFigures()
        self._classes = Counter(
            "slipway_classes", "Predicted classes.", ["label"], registry=registry
        )
        confidence = Histogram(
            "slipway_confidence",
            "Probability of the predicted class.",
            buckets=CONFIDENCES,
            registry=registry,
        )
        self._confidence = Distribution(confidence, CONFIDENCES)
        self._outliers = Counter(
            "slipway_outliers", "Rows unlike the training rows.", registry=registry
        )
        self._missing = Counter(
            "slipway_missing_cells", "Cells of tables that had no value.", registry=registry
        )
        rows = Counter(
            "slipway_watched_rows",
            "Predicted rows, by whether they were looked at for drift.",
            ["outcome"],
            registry=registry,
        )
        windows = Counter(
            "slipway_drift_windows",
            "Windows that ended, by their verdict.",
            ["verdict"],
            registry=registry,
        )
        feedback = Counter(
            "slipway_feedback",
            "Truths that callers told, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self._rows = {outcome: rows.labels(outcome) for outcome in OUTCOMES}
        self._windows = {verdict: windows.labels(verdict) for verdict in VERDICTS}
        self._feedback = {outcome: feedback.labels(outcome) for outcome in FEEDBACK}
        metrics.add_fault_parts(*PARTS)
        metrics.register_shared(self)
        self.fault = metrics.fault  # counts one by one of PARTS
        self._labels: set[str] = set()

    def classes(self, counts: dict[str, int]) -> None:
        """Count predicted labels; from the fifty-first label on they are "other"."""
        for label, count in counts.items():
            if label not in self._labels and len(self._labels) < MAX_CLASSES:
                self._labels.add(label)
            self._classes.labels(label if label in self._labels else OTHER).inc(count)

    def confidences(self, counts: Sequence[int], total: float) -> None:
        """Note the probabilities of predicted classes, counted by CONFIDENCES, and their sum; one thread alone may call it."""
        self._confidence.include(counts, total)
        self._confidence.flush()

    def outliers(self, num_rows: int) -> None:
        """Count rows that were called outliers."""
        self._outliers.inc(num_rows)

    def missing_cells(self, num_cells: int) -> None:
        """Count cells without a value."""
        self._missing.inc(num_cells)

    def rows(self, outcome: str, num_rows: int) -> None:
        """Count rows by one of OUTCOMES."""
        self._rows[outcome].inc(num_rows)

    def window(self, verdict: str) -> None:
        """Count a window by one of VERDICTS."""
        self._windows[verdict].inc()

    def feedback(self, outcome: str, num_truths: int = 1) -> None:
        """Count truths by one of FEEDBACK."""
        self._feedback[outcome].inc(num_truths)

    def collect(self) -> Iterator[Metric]:
        """The gauges as they are now."""
        figures = self.figures
        shown = figures.features[:MAX_FEATURES]
        statistic = {(one.name,): one.statistic for one in shown}
        threshold = {(one.name,): one.threshold for one in shown}
        yield _gauge(
            "slipway_drift_statistic", "Of the last window, by feature.", ["feature"], statistic
        )
        yield _gauge(
            "slipway_drift_threshold",
            "Above which the statistic is an alarm.",
            ["feature"],
            threshold,
        )
        yield _gauge(
            "slipway_drift_alarm", "1 where the last window drifted.", [], _alone(figures.alarm)
        )
        low, high = (figures.estimate[1], figures.estimate[2]) if figures.estimate else (None, None)
        value = figures.estimate[0] if figures.estimate else None
        yield _gauge(
            "slipway_estimated_quality",
            "Accuracy, or RMSE, of the last window, estimated without labels.",
            [],
            _alone(value),
        )
        yield _gauge(
            "slipway_estimated_quality_low", "Lower bound of the estimate.", [], _alone(low)
        )
        yield _gauge(
            "slipway_estimated_quality_high", "Upper bound of the estimate.", [], _alone(high)
        )
        yield _gauge(
            "slipway_estimate_valid",
            "1 where the estimate may be relied on.",
            [],
            _alone(figures.is_estimate_valid),
        )
        texts = (
            "Of the last rows whose truth was told.",
            "Lower bound of slipway_true_quality.",
            "Upper bound of slipway_true_quality.",
        )
        for place, (part, text) in enumerate(zip(("", "_low", "_high"), texts, strict=True)):
            quality = {(name,): bounds[place] for name, bounds in figures.quality.items()}
            yield _gauge(f"slipway_true_quality{part}", text, ["metric"], quality)
        yield _gauge(
            "slipway_true_quality_rows",
            "Rows behind slipway_true_quality.",
            [],
            {(): figures.num_joined},
        )


def _alone(value: float | None) -> dict[tuple[()], float]:
    return {} if value is None else {(): float(value)}


def _gauge(
    name: str, text: str, labels: list[str], samples: Mapping[Any, float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in samples.items():
        family.add_metric(values, number)
    return family
