"""The kinds of target: one record for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipway.kinds.parts import TargetPart, import_part

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
    plural: str
    column: Literal["label", "target"]  # of clean rows
    has_classes: bool  # the target of a row is among the data's classes
    dtype: Literal["int64", "float32"]  # of the targets in a training batch
    rules: tuple[str, ...]  # of cleaning that only such targets can break
    output: Literal["probabilities", "value"]  # `output.kind` of a bundle
    losses: tuple[str, ...]  # the values of train.loss that fit; the first is the default
    metrics: tuple[str, ...]  # computed by the part "scores"
    shown_metrics: tuple[str, ...]  # at the top of reports; the first is the headline
    summary_metrics: tuple[str, ...]  # in the summary after a run
    compared_metrics: tuple[str, ...]  # whose change is in the certificate, the headline first
    # True: the headline is a fraction of rows, and a loss is the points by which it falls.
    # False: the headline is an error, and a loss is its relative growth.
    headline_is_fraction: bool
    baseline: str  # the trivial predictor, in a few words
    baseline_rule: str  # its answer to each row
    parts: Mapping[TargetPart, str]

    def load_part(self, part: TargetPart) -> Any:
        """Import a part."""
        return import_part(self.parts[part])

    @property
    def headline(self) -> str:
        """The metric that models, variants, slices and backends are compared by."""
        return self.shown_metrics[0]


CLASS = TargetKind(
    name="class",
    plural="classes",
    column="label",
    has_classes=True,
    dtype="int64",
    rules=("missing_label", "unknown_label", "conflicting_label", "near_conflict"),
    output="probabilities",
    losses=("auto", "cross_entropy"),
    metrics=_CLASS_METRICS,
    shown_metrics=("accuracy", "precision_macro", "recall_macro", "f1_macro", "log_loss"),
    summary_metrics=("accuracy", "f1_macro"),
    compared_metrics=("accuracy", "f1_macro", "log_loss"),  # accuracy hides a rare class
    headline_is_fraction=True,
    baseline="the majority class",
    baseline_rule=(
        "the majority class of the training rows for every row, "
        "with the class frequencies as probabilities"
    ),
    parts={
        "loss": "slipway.training.targets.classes:ClassLoss",
        "head": "slipway.training.targets.classes:ClassHead",
        "scores": "slipway.metrics.class_scores:ClassAnswers",
        "results": "slipway.reports.evaluation.class_results:ClassResults",
        "sections": "slipway.reports.pages.sections.classes:ClassSections",
        "uncertainty": "slipway.metrics.class_uncertainty:ClassUncertainty",
    },
)
NUMBER = TargetKind(
    name="number",
    plural="numbers",
    column="target",
    has_classes=False,
    dtype="float32",
    rules=("missing_target", "not_a_number", "non_finite_target", "conflicting_target"),
    output="value",
    losses=("auto", "mse", "huber"),
    metrics=("mse", "rmse", "mae", "r2", "median_error"),
    shown_metrics=("rmse", "mae", "r2", "mse"),
    summary_metrics=("rmse", "r2"),
    compared_metrics=("rmse", "mae"),
    headline_is_fraction=False,
    baseline="the mean target",
    baseline_rule="the mean target of the training rows for every row",
    parts={
        "loss": "slipway.training.targets.numbers:NumberLoss",
        "head": "slipway.training.targets.numbers:NumberHead",
        "scores": "slipway.metrics.number_scores:NumberAnswers",
        "results": "slipway.reports.evaluation.number_results:NumberResults",
        "sections": "slipway.reports.pages.sections.numbers:NumberSections",
        "uncertainty": "slipway.metrics.number_scores:NumberUncertainty",
    },
)
# Metrics that have no upper bound; every other metric is at most 1.
UNBOUNDED_METRICS = ("log_loss", "brier", "mse", "rmse", "mae", "median_error")
