"""How good the model has proved to be: over the last items whose truth was told, with intervals, beside what the bundle says.

Callers choose which truths they tell, so the number is of those rows, not of all traffic.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipway.artifacts.bundle import Bundle, Metric
from slipway.metrics.scores import Resampling, measure

NUM_JUDGED = 1000  # the last ones
FEWEST_COMPARED = 30  # rows, as in monitoring/rules/alerts.yml: resampled, a single wrong answer would have an interval without width
_RESAMPLING = Resampling(seed=7, num_samples=500, confidence=0.95)
_OF_CLASSES, _OF_VALUES = ("accuracy", "f1_macro"), ("rmse", "mse")

Joined = Sequence[tuple[str | float, str | float]]  # truth and prediction


def metric_names(manifest: Bundle) -> tuple[str, ...]:
    """What is measured for a bundle's task."""
    return _OF_CLASSES if manifest.output.kind == "probabilities" else _OF_VALUES


def measure_joined(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    """Accuracy and macro F1, or RMSE and MSE, by name; empty where the rows do not define them."""
    if manifest.output.kind == "probabilities":
        return _measure_classes(manifest, joined)
    if (
        len(joined) < 2
    ):  # slipway/metrics/scores.py refuses a single number, of which there is no spread
        return {}
    targets, values = (np.array([pair[side] for pair in joined], np.float64) for side in (0, 1))
    return measure(manifest.task, targets, values[:, None], _RESAMPLING, names=_OF_VALUES)


def _measure_classes(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    """Over the classes that occur or are predicted: macro F1 counts no others, so it is the same number, at less cost."""
    if not joined:
        return {}
    labels = {
        label: index
        for index, label in enumerate(sorted({str(side) for pair in joined for side in pair}))
    }
    targets = np.array([labels[str(truth)] for truth, _ in joined])
    sure = np.zeros((len(joined), max(2, len(labels))))
    sure[np.arange(len(joined)), [labels[str(predicted)] for _, predicted in joined]] = 1.0
    return measure(manifest.task, targets, sure, _RESAMPLING, names=_OF_CLASSES)


def compare(manifest: Bundle, measured: dict[str, Metric]) -> dict[str, Any]:
    """Each metric with its interval, the bundle's own of the test split, and whether the whole interval is on the worse side of it.

    None instead of that where there is nothing to compare with, or too little to compare.
    """
    content: dict[str, Any] = {}
    for name, metric in measured.items():
        tested = manifest.metrics.get(name)
        content[name] = metric.model_dump(mode="json") | {
            "tested": tested.model_dump(mode="json") if tested else None,
            "is_worse": _is_worse(name, metric, tested)
            if tested and metric.rows >= FEWEST_COMPARED
            else None,
        }
    return content


def _is_worse(name: str, metric: Metric, tested: Metric) -> bool:
    """Whether the intervals do not even touch, on the wrong side."""
    return metric.low > tested.high if name in _OF_VALUES else metric.high < tested.low
