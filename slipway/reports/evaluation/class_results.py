"""Evaluation results for classes: predictions, confusion matrix, and scores of each class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import decided_classes
from slipway.metrics.class_scores import (
    class_scores,
    confusion_matrix,
    count_classes,
    log_losses,
)
from slipway.reports.evaluation.record import Evaluation


def confusion(evaluation: Evaluation) -> NDArray[np.int64]:
    """Return the confusion matrix (K, K): numbers of rows by actual and predicted class."""
    return confusion_matrix(evaluation.targets, evaluation.predictions, len(evaluation.classes))


class ClassResults:
    """Results of N predicted classes; `outputs` are (N, K) probabilities."""

    PREDICTION_FIELDS = (
        pa.field("target", pa.string(), nullable=False),  # class names
        pa.field("prediction", pa.string(), nullable=False),
        pa.field("confidence", pa.float32(), nullable=False),  # probability of the prediction
        # in the order of the classes
        pa.field("probabilities", pa.list_(pa.float32()), nullable=False),
    )

    @staticmethod
    def predictions(
        outputs: NDArray[np.float32], thresholds: Sequence[float] | None = None
    ) -> NDArray[np.float64]:
        """Return (N,) the predicted class index of each row.

        It is the most probable class, or the class chosen by the threshold if there is one.
        """
        return np.asarray(decided_classes(outputs, thresholds), np.float64)

    @staticmethod
    def severities(evaluation: Evaluation) -> NDArray[np.float64]:
        """Return the log loss of each wrong row, (N,); negative numbers for correct rows."""
        is_wrong = evaluation.predictions != evaluation.targets
        return np.where(is_wrong, log_losses(evaluation.targets, evaluation.outputs), -1.0)

    @staticmethod
    def entries(evaluation: Evaluation) -> dict[str, Any]:
        matrix = confusion(evaluation)
        scores, rows = class_scores(count_classes(matrix)), matrix.sum(axis=1)
        per_class = [
            {
                "class": name,
                "rows": int(rows[index]),
                "precision": float(scores.precision[index]),
                "recall": float(scores.recall[index]),
                "f1": float(scores.f1[index]),
            }
            for index, name in enumerate(evaluation.classes)
        ]
        return {"per_class": per_class}

    @staticmethod
    def prediction_columns(evaluation: Evaluation) -> dict[str, Any]:
        classes = evaluation.classes
        return {
            "target": [classes[int(index)] for index in evaluation.targets],
            "prediction": [classes[int(index)] for index in evaluation.predictions],
            "confidence": np.take_along_axis(
                evaluation.outputs, evaluation.predictions.astype(np.int64)[:, np.newaxis], axis=1
            )[:, 0],
            "probabilities": list(evaluation.outputs),
        }
