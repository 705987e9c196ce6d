"""The base of everything that is written by one part and read by another: typed, frozen, no unknown fields."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

Task = Literal[
    "image_classification", "image_regression", "table_classification", "table_regression"
]
CLASSIFICATION_METRICS = (
    "accuracy",
    "balanced_accuracy",
    "precision_macro",
    "precision_micro",
    "precision_weighted",
    "recall_macro",
    "recall_micro",
    "recall_weighted",
    "f1_macro",
    "f1_micro",
    "f1_weighted",
    "top_k_accuracy",
    "log_loss",
    "brier",
    "roc_auc",
    "average_precision",
    "calibration_error",
)
REGRESSION_METRICS = ("mse", "rmse", "mae", "r2", "median_error")
UNBOUNDED_METRICS = (
    "log_loss",
    "brier",
    "mse",
    "rmse",
    "mae",
    "median_error",
)  # the others are never above 1


def is_classification(task: Task) -> bool:
    """Whether the target is a class; otherwise it is a number."""
    return task.endswith("classification")


def is_table(task: Task) -> bool:
    """Whether a row is made of columns; otherwise it is an image."""
    return task.startswith("table")


def metric_names(task: Task) -> tuple[str, ...]:
    """The metrics of each task; slipway/metrics/scores.py computes them."""
    return CLASSIFICATION_METRICS if is_classification(task) else REGRESSION_METRICS


class Contract(BaseModel):
    """A record with exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic has it, but without cached properties, which would tell of the fields before."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied
