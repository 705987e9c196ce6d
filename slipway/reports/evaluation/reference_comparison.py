"""The trained network against the last released model, on the very same rows: how much was lost or gained, and whether it may be chance."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import GateResult
from slipway.metrics.paired_bootstrap import PairedDifference, paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.slice_scores import RowAnswers, headline
from slipway.system.contract import Contract
from slipway.system.errors import DataError

_FEWEST_ROWS = 2
_LOSS = {"accuracy": "accuracy lost", "rmse": "rmse growth"}


@dataclass(frozen=True)
class ReleasedAnswers:
    """What a released bundle answered to the test rows."""

    folder: str
    version: str  # the beginning of the bundle's digest
    provider: str
    outputs: NDArray[
        np.float32
    ]  # (N, K) in the order of the network's classes; without worth where `refused`
    refused: NDArray[np.bool_]  # (N,) rows that its input contract does not take
    known: (
        NDArray[np.bool_] | None
    )  # (N,) rows that it learned from or was chosen by; None: nobody can say
    knowledge: str  # what can be said of that, in words


class ReleasedComparison(Contract):
    """One line in metrics/evaluate.json."""

    folder: str
    version: str
    provider: str
    difference: PairedDifference  # of the trained network from the released one
    loss: Metric  # above 0 is worse: accuracy lost as a share of the rows, or relative growth of the RMSE
    p_value: float  # two-sided, of no difference
    refused: int  # test rows left out, since the released model does not take them
    known: (
        int | None
    )  # test rows left out, since it learned from them or was chosen by them; null: nobody can say
    knowledge: str


def compare(
    answers: RowAnswers, released: ReleasedAnswers, resampling: Resampling
) -> ReleasedComparison:
    """The headline metric of both, over the rows that the released model takes and has not learned from.

    DataError where fewer than two are left.
    """
    known = np.zeros(len(answers.targets), bool) if released.known is None else released.known
    rows = ~(known | released.refused)
    if rows.sum() < _FEWEST_ROWS:
        raise DataError(
            f"{int(rows.sum())} of {len(rows)} test rows can be compared with the released model in {released.folder}: it refuses "
            f"{int(released.refused.sum())} and has learned from {int(known.sum())}. Set evaluate.reference_model to null, or to another bundle."
        )
    metric = headline(answers.task)
    before, after, targets = released.outputs[rows], answers.outputs[rows], answers.targets[rows]
    difference = paired_difference(answers.task, metric, targets, before, after, resampling)
    return ReleasedComparison(
        folder=released.folder,
        version=released.version,
        provider=released.provider,
        difference=difference,
        loss=_loss(difference),
        p_value=difference.p_value
        if difference.p_value is not None
        else _sign_flip_p_value(targets, before, after, resampling),
        refused=int(released.refused.sum()),
        known=None if released.known is None else int(known.sum()),
        knowledge=released.knowledge,
    )


def released_gate(comparison: ReleasedComparison, max_loss: float) -> GateResult:
    """Missed where more is lost than `max_loss`."""
    return GateResult(
        name=_LOSS[comparison.difference.metric],
        key="evaluate.max_regression",
        where=f"comparison with released model {comparison.version}",
        is_of_slice=False,
        min=None,
        max=max_loss,
        measured=comparison.loss,
        remark=f"p = {comparison.p_value:.3g}",
    )


def _loss(difference: PairedDifference) -> Metric:
    """Rounded, since 0.98 - 0.97 is above 0.01 in binary."""
    sign_and_scale = (
        -1.0
        if difference.metric == "accuracy"
        else 1 / (difference.before or difference.after or 1.0)
    )
    low, high = sorted(
        round(bound * sign_and_scale, 12) + 0.0 for bound in (difference.low, difference.high)
    )
    value = round(difference.difference * sign_and_scale, 12) + 0.0
    return Metric(
        value=value, low=low, high=high, confidence=difference.confidence, rows=difference.rows
    )


def _sign_flip_p_value(
    targets: NDArray[np.float64],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    resampling: Resampling,
) -> float:
    """Two-sided p-value of the mean change of the squared error: were both models alike, each row's change could as well be the other way.

    R. A. Fisher, The Design of Experiments (1935), chapter 3; with random signs instead of all.
    """
    changes = (after[:, 0] - targets) ** 2 - (before[:, 0] - targets) ** 2
    generator = np.random.default_rng(resampling.seed)
    as_large = 0
    for _ in range(resampling.num_samples):
        signs = generator.integers(2, size=len(changes)) * 2 - 1
        as_large += abs(float((signs * changes).sum())) >= abs(float(changes.sum())) * (1 - 1e-9)
    return (1 + as_large) / (1 + resampling.num_samples)
