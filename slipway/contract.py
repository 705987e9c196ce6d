"""The base of everything that is written by one part and read by another: typed, frozen, no unknown fields."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Task = Literal["image_classification", "image_regression"]
# What each task is measured by; slipway/metrics.py computes them.
METRIC_NAMES: dict[Task, tuple[str, ...]] = {
    "image_classification": (
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
        "log_loss",
    ),
    "image_regression": ("mse", "rmse", "mae", "r2"),
}


class Contract(BaseModel):
    """A record with exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
