"""Evaluation results for sets of labels: scores by label, and co-occurrence of labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import given_labels
from slipway.metrics.label_scores import LabelAnswers, label_log_losses
from slipway.metrics.roc_auc import rank_labels, ranking_scores
from slipway.metrics.scores import fraction
from slipway.reports.evaluation.record import Evaluation


class LabelResults:
    """Results of N predicted sets of labels; `outputs` are (N, K) probabilities."""

    PREDICTION_FIELDS = (
        pa.field("target", pa.list_(pa.string()), nullable=False),  # labels of the row
        pa.field("prediction", pa.list_(pa.string()), nullable=False),
        # in the order of the classes
        pa.field("probabilities", pa.list_(pa.float32()), nullable=False),
    )

    @staticmethod
    def predictions(
        outputs: NDArray[np.float32], thresholds: Sequence[float] | None = None
    ) -> NDArray[np.float64]:
        """Return the predicted labels, (N, K): 1 if a label is predicted, else 0."""
        return given_labels(outputs, thresholds).astype(np.float64)

    @staticmethod
    def severities(evaluation: Evaluation) -> NDArray[np.float64]:
        """Return the largest log loss of each wrong row's labels, (N,); negative for right rows."""
        losses = label_log_losses(evaluation.targets, evaluation.outputs).max(axis=1)
        return np.where(evaluation.is_wrong, losses, -1.0)

    @staticmethod
    def entries(evaluation: Evaluation) -> dict[str, Any]:
        return {"per_label": label_table(evaluation), "co_occurrence": _together(evaluation)}

    @staticmethod
    def prediction_columns(evaluation: Evaluation) -> dict[str, Any]:
        return {
            "target": names_of(evaluation.classes, evaluation.targets),
            "prediction": names_of(evaluation.classes, evaluation.predictions),
            "probabilities": list(evaluation.outputs),
        }


def names_of(classes: Sequence[str], labels: NDArray[Any]) -> list[list[str]]:
    """Return the names of the labels of each row: (N, K) 0 or 1 -> N lists."""
    return [[classes[int(label)] for label in np.flatnonzero(row)] for row in np.asarray(labels)]


def label_table(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return threshold, rows and scores of each label, in the order of the classes."""
    answers = LabelAnswers(evaluation.targets, evaluation.outputs, None, evaluation.thresholds)
    hits, actual, given = (part[0] for part in answers.label_counts())
    scores = (fraction(hits, given), fraction(hits, actual), fraction(2 * hits, actual + given))
    thresholds = evaluation.thresholds or [0.5] * len(evaluation.classes)
    every_row = np.ones((1, answers.num_rows))
    table = []
    for place, name in enumerate(evaluation.classes):
        own = slice(place, place + 1)
        ranked = rank_labels(answers.actual[:, own], answers.probabilities[:, own])
        average = float(ranking_scores(ranked, every_row)[1][0]) if ranked else None
        precision, recall, f1 = (float(score[place]) for score in scores)
        table.append(
            {
                "label": name,
                "rows": int(actual[place]),
                "given": int(given[place]),
                "threshold": float(thresholds[place]),
                "precision": precision,
                "recall": recall,
                "f1": f1,
                "average_precision": average,
            }
        )
    return table


def co_occurrence(labels: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of rows with both labels, (K, K); the diagonal counts rows per label."""
    own = np.asarray(labels, np.int64)
    return np.asarray(own.T @ own)


def _together(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return an entry for each pair of labels that occurs together in targets or predictions."""
    actual, given = co_occurrence(evaluation.targets), co_occurrence(evaluation.predictions)
    names = evaluation.classes
    return [
        {
            "labels": [names[one], names[other]],
            "rows": int(actual[one, other]),
            "given": int(given[one, other]),
        }
        for one in range(len(names))
        for other in range(one + 1, len(names))
        if actual[one, other] or given[one, other]
    ]
