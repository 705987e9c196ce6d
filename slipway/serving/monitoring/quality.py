"""Measures quality, with intervals, from feedback on the last labelled items.

Callers choose which labels they send, so the quality holds for those rows, not for all traffic.
"""

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np

from slipway.artifacts.bundle import Bundle, Metric
from slipway.artifacts.label_sets import labels_in
from slipway.metrics.scores import Resampling, measure

NUM_JUDGED = 1000  # number of last labelled items that are measured
# Fewest rows, as in monitoring/rules/alerts.yml. Fewer give bootstrap intervals of width 0.
MIN_COMPARED = 30
_RESAMPLING = Resampling(seed=7, num_samples=500, confidence=0.95)
_CLASS_METRICS, _VALUE_METRICS = ("accuracy", "f1_macro"), ("rmse", "mse")
_LABEL_METRICS = ("subset_accuracy", "f1_macro")

Joined = Sequence[tuple[str | float, str | float]]  # truth and prediction


def measure_joined(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    """Return accuracy and macro F1, or RMSE and MSE; empty if the rows do not define them.

    The accuracy of a multi-label model is that of whole sets.
    """
    kind = manifest.output.kind
    if kind == "label_probabilities":
        return _measure_label_sets(manifest, joined)
    if kind == "probabilities":
        return _measure_classes(manifest, joined)
    if kind == "value":
        return _measure_values(manifest, joined)
    assert_never(kind)


def _measure_values(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    if len(joined) < 2:  # `measure` refuses a single number, which has no spread
        return {}
    targets, values = np.array(joined, np.float64).T
    return measure(manifest.task, targets, values[:, None], _RESAMPLING, names=_VALUE_METRICS)


def _measure_classes(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    """Return metrics over the classes that occur; macro F1 ignores all other classes anyway."""
    if not joined:
        return {}
    names = sorted({str(side) for pair in joined for side in pair})
    labels = {label: index for index, label in enumerate(names)}
    targets = np.array([labels[str(truth)] for truth, _ in joined])
    outputs = np.zeros((len(joined), max(2, len(labels))))
    outputs[np.arange(len(joined)), [labels[str(predicted)] for _, predicted in joined]] = 1.0
    return measure(manifest.task, targets, outputs, _RESAMPLING, names=_CLASS_METRICS)


def _measure_label_sets(manifest: Bundle, joined: Joined) -> dict[str, Metric]:
    """Return metrics over the labels that occur; macro F1 ignores all other labels anyway."""
    if not joined:
        return {}
    sets = [[labels_in(str(side)) for side in pair] for pair in joined]
    names = sorted({label for pair in sets for side in pair for label in side}) or ["no label"]
    targets, outputs = (
        np.array([[name in pair[side] for name in names] for pair in sets], np.float64)
        for side in (0, 1)
    )
    return measure(manifest.task, targets, outputs, _RESAMPLING, names=_LABEL_METRICS)


def compare(manifest: Bundle, measured: dict[str, Metric]) -> dict[str, Any]:
    """Return each metric with the bundle's metric on the test split, and a comparison of both.

    `is_worse` is true if the whole interval lies on the worse side of the test split's, and null
    without such a metric or with fewer than MIN_COMPARED rows.
    """
    content: dict[str, Any] = {}
    for name, metric in measured.items():
        tested = manifest.metrics.get(name)
        is_worse = None
        if tested and metric.rows >= MIN_COMPARED:
            is_worse = (
                metric.low > tested.high if name in _VALUE_METRICS else metric.high < tested.low
            )
        content[name] = metric.model_dump(mode="json") | {
            "tested": tested.model_dump(mode="json") if tested else None,
            "is_worse": is_worse,
        }
    return content
