"""The kinds of target, one record for each: classes, several labels, numbers."""

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
    column: Literal["label", "target"]  # of the target in the table of clean rows
    has_classes: bool  # targets are classes, not numbers
    # True: a row can have several labels. Targets and outputs are then (rows, labels), and the
    # table of clean rows has each row's labels as one text (slipway/artifacts/label_sets.py).
    several: bool
    dtype: Literal["int64", "float32"]  # of the targets in a training batch
    rules: tuple[str, ...]  # cleaning rules that apply only to this kind of target
    output: Literal["probabilities", "label_probabilities", "value"]  # `output.kind` of a bundle
    losses: tuple[str, ...]  # possible values of train.loss; the first is the default
    metrics: tuple[str, ...]  # all metrics that the part "scores" computes
    shown_metrics: tuple[str, ...]  # shown at the top of reports; the first is the headline
    summary_metrics: tuple[str, ...]  # shown in the summary after a run
    compared_metrics: tuple[str, ...]  # compared by the certificate, the headline first
    # True: the headline is a fraction of rows, and a regression is its decrease.
    # False: the headline is an error, and a regression is its relative increase.
    headline_is_fraction: bool
    baseline: str  # the trivial predictor in a few words, for reports
    baseline_rule: str  # the answer of the trivial predictor, in words
    parts: Mapping[TargetPart, str]

    def load_part(self, part: TargetPart) -> Any:
        """Import this kind of target's function or class for `part`, for example its loss."""
        return import_part(self.parts[part])

    @property
    def headline(self) -> str:
        """The metric by which models, variants, slices and backends are compared."""
        return self.shown_metrics[0]


CLASS = TargetKind(
    name="class",
    plural="classes",
    column="label",
    has_classes=True,
    several=False,
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
        "trees": "slipway.training.targets.classes:ClassTrees",
        "scores": "slipway.metrics.class_scores:ClassAnswers",
        "results": "slipway.reports.evaluation.class_results:ClassResults",
        "sections": "slipway.reports.pages.sections.classes:ClassSections",
        "uncertainty": "slipway.metrics.class_uncertainty:ClassUncertainty",
    },
)
LABELS = TargetKind(
    name="labels",
    plural="label sets",
    column="label",
    has_classes=True,
    several=True,
    dtype="float32",
    rules=("missing_label", "unknown_label", "conflicting_label", "near_conflict"),
    output="label_probabilities",
    losses=("auto", "bce", "asymmetric"),
    metrics=(
        "subset_accuracy",
        "mean_average_precision",
        "f1_micro",
        "f1_macro",
        "precision_micro",
        "recall_micro",
        "hamming_loss",
        "log_loss",
        "calibration_error",
    ),
    shown_metrics=(
        "subset_accuracy",
        "mean_average_precision",
        "f1_micro",
        "f1_macro",
        "hamming_loss",
    ),
    summary_metrics=("subset_accuracy", "mean_average_precision", "f1_macro"),
    compared_metrics=("subset_accuracy", "f1_macro"),
    headline_is_fraction=True,
    baseline="the label frequencies",
    baseline_rule=(
        "the label frequencies of the training rows as probabilities for every row, "
        "so that it gives the labels that most training rows have"
    ),
    parts={
        "loss": "slipway.training.targets.labels:LabelLoss",
        "head": "slipway.training.targets.labels:LabelHead",
        "scores": "slipway.metrics.label_scores:LabelAnswers",
        "results": "slipway.reports.evaluation.label_results:LabelResults",
        "sections": "slipway.reports.pages.sections.labels:LabelSections",
        "uncertainty": "slipway.metrics.class_uncertainty:LabelUncertainty",
    },
)
NUMBER = TargetKind(
    name="number",
    plural="numbers",
    column="target",
    has_classes=False,
    several=False,
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
        "trees": "slipway.training.targets.numbers:NumberTrees",
        "scores": "slipway.metrics.number_scores:NumberAnswers",
        "results": "slipway.reports.evaluation.number_results:NumberResults",
        "sections": "slipway.reports.pages.sections.numbers:NumberSections",
        "uncertainty": "slipway.metrics.number_scores:NumberUncertainty",
    },
)
# Metrics without an upper bound; all others are at most 1.
UNBOUNDED_METRICS = ("log_loss", "brier", "mse", "rmse", "mae", "median_error")
