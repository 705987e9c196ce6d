"""Evaluation results for a numeric target: squared and absolute errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.metrics.number_scores import errors_by_target
from slipway.metrics.scores import Resampling, TargetErrors
from slipway.reports.evaluation.record import Evaluation

_NUM_RANGES = 5  # ranges of the target whose errors are shown separately


class NumberResults:
    """Results of N predicted values; `outputs` are (N, 1)."""

    PREDICTION_FIELDS = (
        pa.field("target", pa.float64(), nullable=False),
        pa.field("prediction", pa.float64(), nullable=False),
    )

    @staticmethod
    def predictions(
        outputs: NDArray[np.float32], thresholds: Sequence[float] | None = None
    ) -> NDArray[np.float64]:
        return outputs[:, 0].astype(np.float64)

    @staticmethod
    def severities(evaluation: Evaluation) -> NDArray[np.float64]:
        """Return the absolute errors (N,)."""
        return np.asarray(np.abs(evaluation.predictions - evaluation.targets))

    @staticmethod
    def target_errors(
        targets: NDArray[np.float64], outputs: NDArray[np.float32], resampling: Resampling
    ) -> list[TargetErrors]:
        return errors_by_target(targets, outputs, _NUM_RANGES, resampling)

    @staticmethod
    def entries(evaluation: Evaluation) -> dict[str, Any]:
        if not evaluation.target_errors:
            return {}
        return {"by_target": [entry.model_dump() for entry in evaluation.target_errors]}

    @staticmethod
    def prediction_columns(evaluation: Evaluation) -> dict[str, Any]:
        return {
            "target": evaluation.targets.tolist(),
            "prediction": evaluation.predictions.tolist(),
        }
