"""Counts rollouts and shadowed requests for Prometheus, and logs the events of rollouts."""

import logging

from prometheus_client import Counter, Gauge

from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.rollout.evidence import SHADOWED
from slipway.serving.rollout.state import OUTCOMES, Event

logger = logging.getLogger("bentoml.slipway")


class RolloutMetrics:
    """Metrics of rollouts, shadowed requests, and a canary's fraction."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        metrics.add_slots("candidate", "shadow")
        metrics.add_fault_parts("rollout")
        self._metrics = metrics
        swaps = Counter(
            "slipway_swaps_total",
            "Rollouts, by outcome.",
            ["outcome"],
            registry=registry,
        )
        shadowed = Counter(
            "slipway_shadow_total",
            "Requests copied to a candidate, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._swaps: dict[str, Counter] = {what: swaps.labels(what) for what in OUTCOMES}
        self._shadowed = {outcome: shadowed.labels(outcome) for outcome in SHADOWED}
        self.candidate_fraction = Gauge(
            "slipway_candidate_fraction",
            "Fraction of the requests that a canary answers.",
            multiprocess_mode="livemax",
            registry=registry,
        )

    def log(self, event: Event) -> None:
        """Log an event of a rollout, and count its outcome. Called in only one of the workers."""
        if event.what in self._swaps:
            self._swaps[event.what].inc()
        level = logging.ERROR if event.what in ("refused", "rolled_back") else logging.INFO
        what = event.what.replace("_", " ")
        logger.log(level, "rollout: model %s %s: %s", event.model, what, event.reason)

    def shadowed(self, outcome: str) -> None:
        """Count a shadowed request by its outcome. Thread-safe."""
        self._shadowed[outcome].inc()
        if outcome in ("agrees", "differs"):
            self._metrics.answer("shadow")
