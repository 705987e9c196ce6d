"""Compares the trained network with the reference model on the same rows.

The gain or loss is measured, and a test tells if chance explains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import GateResult
from slipway.kinds.registry import kind_of
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.metrics.paired_bootstrap import PairedDifference, paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system.contract import Contract
from slipway.system.errors import DataError

_MIN_ROWS = 2


@dataclass(frozen=True)
class ReferenceAnswers:
    """The predictions of a reference model for the test rows."""

    folder: str
    version: str  # first digits of the bundle's digest
    provider: str
    outputs: NDArray[np.float32]  # (N, K) in the order of the network's classes; NaN if refused
    refused: NDArray[np.bool_]  # (N,) True for rows that its input contract refuses
    known: NDArray[np.bool_] | None  # (N,) its training and validation rows; None if unknown
    remark: str  # about the known rows
    thresholds: Sequence[float] | None = None  # of its labels, if rows have several


class ReferenceComparison(Contract):
    """The comparison with a reference model, as an entry in metrics/evaluate.json."""

    folder: str
    version: str
    provider: str
    difference: PairedDifference  # the trained network minus the reference model
    loss: Metric  # positive is worse: lost fraction of accuracy, or relative growth of the RMSE
    p_value: float  # two-sided, of the hypothesis of no difference
    refused: int  # test rows left out because the reference model refuses them
    known: int | None  # test rows left out because it was trained on them; null if unknown
    knowledge: str  # remark on the known rows


def compare(
    answers: RowAnswers, reference: ReferenceAnswers, resampling: Resampling
) -> ReferenceComparison:
    """Compare the headline metric on rows that the reference model accepts and has not seen.

    Raises:
        DataError: fewer than two rows are left.
    """
    known = np.zeros(len(answers.targets), bool) if reference.known is None else reference.known
    rows = ~(known | reference.refused)
    if rows.sum() < _MIN_ROWS:
        raise DataError(
            f"{int(rows.sum())} of {len(rows)} test rows can be compared with the reference model "
            f"in {reference.folder}: it refuses {int(reference.refused.sum())} and was trained on "
            f"{int(known.sum())}. Set evaluate.reference_model to null, or to another bundle."
        )
    before, after, targets = reference.outputs[rows], answers.outputs[rows], answers.targets[rows]
    difference = paired_difference(
        answers.task,
        kind_of(answers.task).target.headline,
        targets,
        before,
        after,
        resampling,
        thresholds=(reference.thresholds, answers.thresholds),
    )
    p_value = difference.p_value
    if p_value is None:
        p_value = _sign_flip_p_value(targets, before, after, resampling)
    return ReferenceComparison(
        folder=reference.folder,
        version=reference.version,
        provider=reference.provider,
        difference=difference,
        loss=_loss(difference),
        p_value=p_value,
        refused=int(reference.refused.sum()),
        known=None if reference.known is None else int(known.sum()),
        knowledge=reference.remark,
    )


def reference_gate(comparison: ReferenceComparison, max_regression: float) -> GateResult:
    """Return the result of the gate on the loss, which is missed above `max_regression`."""
    metric = comparison.difference.metric
    what = "growth" if metric in UNBOUNDED_METRICS else "lost"
    return GateResult(
        name=f"{metric.replace('_', ' ')} {what}",
        key="evaluate.max_regression",
        where=f"comparison with reference model {comparison.version}",
        is_of_slice=False,
        min=None,
        max=max_regression,
        measured=comparison.loss,
        remark=f"p = {comparison.p_value:.3g}",
    )


def _loss(difference: PairedDifference) -> Metric:
    """Express the difference as a loss, rounded because 0.98 - 0.97 is above 0.01 in binary."""
    scale = -1.0
    if difference.metric in UNBOUNDED_METRICS:
        scale = 1 / (difference.before or difference.after or 1.0)
    bounds = (difference.difference, difference.low, difference.high)
    value, *ends = (round(bound * scale, 12) + 0.0 for bound in bounds)
    low, high = sorted(ends)
    return Metric(
        value=value, low=low, high=high, confidence=difference.confidence, rows=difference.rows
    )


def _sign_flip_p_value(
    targets: NDArray[np.float64],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    resampling: Resampling,
) -> float:
    """Return the two-sided p-value of the mean change of the squared error.

    If both models were equally good, each row's change could as well have the other sign (R. A.
    Fisher, The Design of Experiments, 1935, chapter 3). Random signs replace all combinations.
    """
    changes = (after[:, 0] - targets) ** 2 - (before[:, 0] - targets) ** 2
    observed = abs(float(changes.sum())) * (1 - 1e-9)
    generator = np.random.default_rng(resampling.seed)
    num_as_large = 0
    for _ in range(resampling.num_samples):
        signs = generator.integers(2, size=len(changes)) * 2 - 1
        num_as_large += abs(float((signs * changes).sum())) >= observed
    return (1 + num_as_large) / (1 + resampling.num_samples)
