"""Compares the metrics of a classification with scikit-learn's on the predictions of the run."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)


def assert_metrics_as_scikit_learn(project: Path) -> int:
    """Compare metrics/evaluate.json with artifacts/predictions.parquet; return the rows of it."""
    report = json.loads((project / "metrics/evaluate.json").read_text())
    rows = pq.read_table(project / "artifacts/predictions.parquet").to_pydict()
    classes = sorted(set(rows["target"]))
    target, predicted = rows["target"], rows["prediction"]
    probabilities = np.array(rows["probabilities"], np.float64)
    assert probabilities.shape == (report["rows"], len(classes))
    probabilities /= probabilities.sum(axis=1, keepdims=True)  # they are stored in float32
    is_class = np.array(target)[:, None] == classes
    macro = {"average": "macro", "labels": classes, "zero_division": 0}
    of_one = probabilities[:, 1] if len(classes) == 2 else probabilities
    expected = {
        "accuracy": accuracy_score(target, predicted),
        "precision_macro": precision_score(target, predicted, **macro),
        "recall_macro": recall_score(target, predicted, **macro),
        "f1_macro": f1_score(target, predicted, **macro),
        "log_loss": log_loss(target, probabilities, labels=classes),
        "brier": ((probabilities - is_class) ** 2).sum(axis=1).mean(),
        "roc_auc": roc_auc_score(target, of_one, labels=classes, multi_class="ovr"),
    }
    found = {entry["name"]: entry["value"] for entry in report["metrics"]}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    return len(target)
