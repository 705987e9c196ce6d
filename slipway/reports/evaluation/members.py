"""Members of an ensemble on the test rows: the gain of the ensemble, and where members disagree.

The best member is the one with the lowest validation loss: chosen on test rows, it would look
better than it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.console import interval
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system.contract import Contract

_MOST_DISPUTED = 0.1  # of the rows
_LEAST_ROWS = 20


@dataclass(frozen=True)
class MemberAnswers:
    """The answers of one member to the test rows."""

    name: str
    weight: float
    loss: float  # on the validation rows
    num_bytes: int  # of its weights
    outputs: NDArray[np.float32]  # (N, K) probabilities or values


class MemberScore(Contract):
    """An entry of a member in metrics/evaluate.json."""

    name: str
    weight: float
    bytes: int
    measured: float  # the headline metric
    gain: Metric  # of the ensemble over this member; above 0 is better

    @property
    def verdict(self) -> str:
        """The gain in words."""
        if self.gain.low <= 0 <= self.gain.high:
            return "within noise"
        return "the ensemble is better" if self.gain.low > 0 else "the ensemble is worse"


class DisputedRows(Contract):
    """The headline metric on the tenth of the rows on which members differ most, and the rest."""

    disputed: Metric
    others: Metric


class MemberComparison(Contract):
    """The members, the best on the validation rows first, and the rows that they dispute."""

    metric: str
    ensemble: float
    members: list[MemberScore]
    dispute: DisputedRows | None  # null with too few rows

    def gain_text(self) -> str:
        """Compare the ensemble with its best member in one sentence."""
        best = self.members[0]
        return (
            f"gain over the best member, {best.name}: {best.gain.value:+.4g} {self.metric} "
            f"({interval(best.gain)}), {best.verdict}"
        )


def compare_members(
    answers: RowAnswers, members: Sequence[MemberAnswers], resampling: Resampling
) -> MemberComparison:
    """Compare the answers of the ensemble with those of each member on the same rows."""
    target = kind_of(answers.task).target
    metric, sign = target.headline, 1 if target.headline_is_fraction else -1
    scores, whole = [], 0.0
    for member in sorted(members, key=lambda member: member.loss):
        found = paired_difference(
            answers.task,
            metric,
            answers.targets,
            member.outputs,
            answers.outputs,
            resampling,
            thresholds=(None, answers.thresholds),
        )
        low, high = sorted((sign * found.low, sign * found.high))
        whole = found.after
        scores.append(
            MemberScore(
                name=member.name,
                weight=member.weight,
                bytes=member.num_bytes,
                measured=found.before,
                gain=Metric(
                    value=sign * found.difference,
                    low=low,
                    high=high,
                    confidence=found.confidence,
                    rows=found.rows,
                ),
            )
        )
    outputs = np.stack([member.outputs for member in members])
    return MemberComparison(
        metric=metric,
        ensemble=whole,
        members=scores,
        dispute=_dispute(answers, outputs, metric, resampling),
    )


def _dispute(
    answers: RowAnswers, outputs: NDArray[np.float32], metric: str, resampling: Resampling
) -> DisputedRows | None:
    """Split the rows by the standard deviation of (members, N, K) answers, summed over K."""
    num_rows = outputs.shape[1]
    num_disputed = round(num_rows * _MOST_DISPUTED)
    if num_disputed < _LEAST_ROWS:
        return None
    spread = outputs.astype(np.float64).std(axis=0).sum(axis=1)
    is_disputed = np.zeros(num_rows, bool)
    is_disputed[np.argsort(-spread, kind="stable")[:num_disputed]] = True
    disputed, others = (
        answers.measure(rows, [metric], resampling)[metric] for rows in (is_disputed, ~is_disputed)
    )
    return DisputedRows(disputed=disputed, others=others)
