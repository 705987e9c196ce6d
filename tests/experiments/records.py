"""Records of experiments as runs leave them."""

import os
from typing import Any

from slipway.artifacts.bundle import Metric
from slipway.experiments.records import ExperimentRecord, Results


def results(value: float = 0.9, **changes: Any) -> Results:
    """Results with an interval of 0.02 around `value`."""
    found = Metric(value=value, low=value - 0.01, high=value + 0.01, confidence=0.95, rows=100)
    content: dict[str, Any] = {
        "headline": "accuracy",
        "metric": found,
        "baseline": 0.1,
        "log_loss": 0.3,
        "gates": "passed",
        "certificate": "certified",
    }
    return Results(**(content | changes))


def record(name: str, **changes: Any) -> ExperimentRecord:
    """A finished run."""
    content: dict[str, Any] = {
        "format_version": 1,
        "name": name,
        "started": "2026-01-02T03:04:05.000+00:00",
        "seconds": 12.3,
        "status": "done",
        "cause": "",
        "stage": None,
        "params": {"seed": 7, "train.epochs": 30},
        "results": results(),
        "process": os.getpid(),
        "group": None,
    }
    return ExperimentRecord(**(content | changes))
