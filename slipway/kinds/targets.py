"""The kinds of target: one record for each."""

from dataclasses import dataclass
from typing import Literal

_CLASS_METRICS = (
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


@dataclass(frozen=True)
class TargetKind:
    """A kind of target: its output, losses, metrics and baseline."""

    name: str
    output: Literal["probabilities", "value"]  # `output.kind` of a bundle
    losses: tuple[str, ...]  # the values of train.loss that fit; the first is the default
    metrics: tuple[str, ...]  # computed by slipway/metrics/scores.py
    shown_metrics: tuple[str, ...]  # at the top of reports; the first is the headline
    summary_metrics: tuple[str, ...]  # in the summary after a run
    compared_metrics: tuple[str, ...]  # whose change is in the certificate, the headline first
    baseline: str  # the trivial predictor, in a few words
    baseline_rule: str  # its answer to each row

    @property
    def headline(self) -> str:
        """The metric that models, variants, slices and backends are compared by."""
        return self.shown_metrics[0]


CLASS = TargetKind(
    name="class",
    output="probabilities",
    losses=("auto", "cross_entropy"),
    metrics=_CLASS_METRICS,
    shown_metrics=("accuracy", "precision_macro", "recall_macro", "f1_macro", "log_loss"),
    summary_metrics=("accuracy", "f1_macro"),
    compared_metrics=("accuracy", "f1_macro", "log_loss"),  # accuracy hides a rare class
    baseline="the majority class",
    baseline_rule=(
        "the majority class of the training rows for every row, with the classes' shares as "
        "probabilities"
    ),
)
NUMBER = TargetKind(
    name="number",
    output="value",
    losses=("auto", "mse", "huber"),
    metrics=("mse", "rmse", "mae", "r2", "median_error"),
    shown_metrics=("rmse", "mae", "r2", "mse"),
    summary_metrics=("rmse", "r2"),
    compared_metrics=("rmse", "mae"),
    baseline="the mean target",
    baseline_rule="the mean target of the training rows for every row",
)
# Metrics that have no upper bound; every other metric is at most 1.
UNBOUNDED_METRICS = ("log_loss", "brier", "mse", "rmse", "mae", "median_error")
