"""Compares an ensemble with its members on test rows: its gain, and rows on which they disagree.

The best member is the one with the lowest validation loss: chosen on test rows, it would look
better than it is. A student is judged by the fraction of the ensemble's gain over this member that
it keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.console import interval
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system.contract import Contract

ENSEMBLE_NAME = "ensemble"
_MOST_DISPUTED = 0.1  # fraction of the rows
_LEAST_ROWS = 20
ENOUGH_KEPT = 0.8  # fraction of the ensemble's gain that a good student keeps


class Speed(Contract):
    """The speed of an fp32 graph, on the CPU of the machine that ran `evaluate`."""

    latency_ms: float  # median of one row
    rows_per_second: float  # at the fastest batch size up to 64


@dataclass(frozen=True)
class MemberAnswers:
    """The predictions of one member for the test rows."""

    name: str
    weight: float
    loss: float  # on the validation rows
    num_bytes: int  # of its weights
    outputs: NDArray[np.float32]  # (N, K) probabilities or values
    speed: Speed


@dataclass(frozen=True)
class StudentAnswers:
    """The predictions of a student, and of the ensemble that taught it, for the test rows."""

    name: str
    is_served: bool  # True if it is served in place of the ensemble
    num_bytes: int  # of its weights
    outputs: NDArray[np.float32]  # (N, K)
    ensemble: NDArray[np.float32]  # (N, K)
    speed: Speed


@dataclass(frozen=True)
class EnsembleAnswers:
    """The members of an ensemble, its student if there is one, and its own speed."""

    members: Sequence[MemberAnswers]
    speed: Speed
    student: StudentAnswers | None = None


class MemberScore(Contract):
    """An entry of a member in metrics/evaluate.json."""

    name: str
    weight: float
    bytes: int
    measured: float  # the headline metric
    gain: Metric  # gain of the ensemble over this member; positive is better
    speed: Speed

    @property
    def verdict(self) -> str:
        """The gain in words; "within noise" if its interval contains 0."""
        if self.gain.low <= 0 <= self.gain.high:
            return "within noise"
        return "the ensemble is better" if self.gain.low > 0 else "the ensemble is worse"


class StudentScore(Contract):
    """A student compared with its ensemble and the best member."""

    name: str
    is_served: bool
    bytes: int
    measured: float  # the headline metric
    gain: Metric  # gain of the student over the best member; positive is better
    kept: float | None  # fraction of the ensemble's gain; null if the ensemble has none
    speed: Speed

    def verdict(self, best: MemberScore) -> str:
        """Return the kept gain in words, and the latency beside that of the member `best`."""
        ratio = self.speed.latency_ms / best.speed.latency_ms
        slower = f"at {ratio:.2g}x the latency of {best.name}"
        if self.kept is None:
            return f"the ensemble has no gain that a student could keep; it answers {slower}"
        kept = f"{self.kept:.0%} of the ensemble's gain"
        if self.kept < ENOUGH_KEPT:
            return f"it keeps {kept}, less than the {ENOUGH_KEPT:.0%} to expect, {slower}"
        return f"it keeps {kept} {slower}"


class DisputedRows(Contract):
    """The headline metric on the tenth of the rows with the most disagreement, and on the rest."""

    disputed: Metric
    others: Metric


class MemberComparison(Contract):
    """The scores of the members, best on validation rows first, and of the disputed rows."""

    metric: str
    ensemble: float
    speed: Speed  # of the ensemble
    members: list[MemberScore]
    dispute: DisputedRows | None  # null with too few rows
    student: StudentScore | None = None

    @property
    def label(self) -> str:
        """The metric as a page names it."""
        return {"rmse": "RMSE"}.get(self.metric, self.metric.replace("_", " "))

    def gain_text(self) -> str:
        """Compare the ensemble with its best member in one sentence."""
        best = self.members[0]
        return (
            f"gain over the best member, {best.name}: {best.gain.value:+.4g} {self.label} "
            f"({interval(best.gain)}), {best.verdict}"
        )

    def student_text(self, student: StudentScore) -> str:
        """Compare the student with the ensemble in one sentence."""
        return (
            f"gain of the {student.name}: {student.gain.value:+.4g} {self.label} "
            f"({interval(student.gain)}); {student.verdict(self.members[0])}"
        )


def compare_members(
    answers: RowAnswers, found: EnsembleAnswers, resampling: Resampling
) -> MemberComparison:
    """Compare the predictions of the ensemble with those of each member on the same rows.

    `answers` has the predictions of the served model: the ensemble, or a student that is served.
    `found` has those of the members.
    """
    whole, members, student = answers, found.members, found.student
    if student and student.is_served:
        whole = replace(answers, outputs=student.ensemble, thresholds=None)
    metric = kind_of(answers.task).target.headline
    best_first = sorted(members, key=lambda member: member.loss)
    scores, measured = [], 0.0
    for member in best_first:
        before, measured, gain = _gain(whole, member.outputs, resampling)
        scores.append(
            MemberScore(
                name=member.name,
                weight=member.weight,
                bytes=member.num_bytes,
                measured=before,
                gain=gain,
                speed=member.speed,
            )
        )
    outputs = np.stack([member.outputs for member in members])
    return MemberComparison(
        metric=metric,
        ensemble=measured,
        speed=found.speed,
        members=scores,
        dispute=_dispute(whole, outputs, metric, resampling),
        student=_score(student, answers, best_first[0], scores[0].gain, resampling)
        if student
        else None,
    )


def _gain(
    answers: RowAnswers, before: NDArray[np.float32], resampling: Resampling
) -> tuple[float, float, Metric]:
    """Return the headline metric of outputs `before` (N, K) and of `answers`, and the gain."""
    target = kind_of(answers.task).target
    found = paired_difference(
        answers.task,
        target.headline,
        answers.targets,
        before,
        answers.outputs,
        resampling,
        thresholds=(None, answers.thresholds),
    )
    sign = 1 if target.headline_is_fraction else -1
    low, high = sorted((sign * found.low, sign * found.high))
    gain = Metric(
        value=sign * found.difference,
        low=low,
        high=high,
        confidence=found.confidence,
        rows=found.rows,
    )
    return found.before, found.after, gain


def _score(
    student: StudentAnswers,
    answers: RowAnswers,
    best: MemberAnswers,
    whole: Metric,
    resampling: Resampling,
) -> StudentScore:
    """Compare a student with the best member; `whole` is the ensemble's gain over it."""
    own = answers
    if not student.is_served:
        own = replace(answers, outputs=student.outputs, thresholds=None)
    _, measured, gain = _gain(own, best.outputs, resampling)
    return StudentScore(
        name=student.name,
        is_served=student.is_served,
        bytes=student.num_bytes,
        measured=measured,
        gain=gain,
        kept=gain.value / whole.value if whole.value > 0 else None,
        speed=student.speed,
    )


def _dispute(
    answers: RowAnswers, outputs: NDArray[np.float32], metric: str, resampling: Resampling
) -> DisputedRows | None:
    """Divide the rows by the disagreement of the members, and score both parts.

    It is the standard deviation of outputs (members, N, K) over members, summed over K.
    """
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
