"""Compares a candidate with the served model on recent labelled rows and on the old test rows.

Both are test rows of the merged data. Neither model was trained on any of them: the stable split
moves no old row to another split, and assigns collected rows by the same rule. Both models answer
the same rows, so the intervals are those of paired differences.

The gain has to show on all recent rows, or on the newer half of them: while drift goes on, the rows
of its begin hide what the candidate gains on the traffic of now. With intervals of 95 % a candidate
without a gain passes each of the two tests with a probability of at most 2.5 %.

The gain also has to hold without the labels of any single API key, with a one-sided error of 5 %.
A key alone cannot make a gain then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.artifacts.gates import Verdict
from slipway.config.loop import LoopParams
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.loop.label_keys import KeyRecord, keys_that_stand_out
from slipway.loop.machine import Outcome
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.reference_comparison import (
    ReferenceAnswers,
    ReferenceComparison,
    compare,
)
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system.contract import Contract

MIN_ROWS = 20  # a part with fewer test rows is not compared


class CandidateComparison(Contract):
    """Differences between the candidate and the served model, by part of the test rows.

    A part is null if it has too few rows.
    """

    old: ReferenceComparison | None
    recent: ReferenceComparison | None
    keys: dict[str, int]  # number of recent test rows that each API key labelled
    without: dict[str, ReferenceComparison | None]  # by key: recent rows that others labelled
    # The same on the newer half of the recent rows; null and empty in requests of older versions.
    latest: ReferenceComparison | None = None
    latest_without: dict[str, ReferenceComparison | None] = Field(default_factory=dict)
    refused: list[str]  # descriptions of the keys whose labels were not used at all
    contradicted: list[KeyRecord]  # keys whose recent labels contradict the candidate


def compare_models(
    served: ReferenceAnswers,
    candidate: RowAnswers,
    keys: Sequence[str | None],
    answered: Sequence[float],
    resampling: Resampling,
    refused: Sequence[str] = (),
    trusted: Sequence[str] = (),
) -> CandidateComparison:
    """Compare the served model with the candidate, on old and on recent test rows.

    The N rows are the test rows of the former data and of the rows collected from traffic. A
    collected row is recent if its request was answered after the cause of this cycle, such as
    drift.

    Args:
        served: the served model's answers.
        candidate: the candidate's answers, with the targets.
        keys: (N,) name of the API key that labelled a recent row; None for an old row, "" for a
            collected row that is not recent.
        answered: (N,) when each recent row was answered, in seconds since 1970; the numbers of
            other rows have no effect.
        resampling: settings of the bootstrap, which gives every interval.
        refused: descriptions of the keys whose labels were not used; they are only recorded.
        trusted: keys that are never reported for labels that contradict the candidate.
    """
    names = np.array([key or "" for key in keys], object)
    is_old, is_recent = np.array([key is None for key in keys], bool), names != ""
    times = np.array(answered, np.float64)
    is_latest = is_recent & (times > np.median(times[is_recent])) if is_recent.any() else is_recent
    present = sorted(set(names[is_recent]))
    confidence = resampling.confidence
    one_sided = replace(resampling, confidence=max(2 * confidence - 1, confidence / 2))

    on = partial(_compare_on, served, candidate)
    others = present if len(present) > 1 else []
    errors = candidate.losses[is_recent]
    return CandidateComparison(
        old=on(is_old, resampling),
        recent=on(is_recent, resampling),
        keys={name: int((names == name).sum()) for name in present},
        without={name: on(is_recent & (names != name), one_sided) for name in others},
        latest=on(is_latest, resampling),
        latest_without={name: on(is_latest & (names != name), one_sided) for name in others},
        refused=list(refused),
        contradicted=keys_that_stand_out(
            errors, list(names[is_recent]), [0.0] * len(errors), trusted
        ),
    )


def _compare_on(
    served: ReferenceAnswers,
    candidate: RowAnswers,
    rows: NDArray[np.bool_],
    resampling: Resampling,
) -> ReferenceComparison | None:
    """Compare two models on some rows, (N,) bool; None if these are too few."""
    if (rows & ~served.refused).sum() < MIN_ROWS:
        return None
    part = replace(
        served,
        refused=served.refused[rows],
        outputs=served.outputs[rows],
        known=None if served.known is None else served.known[rows],
    )
    own = replace(candidate, targets=candidate.targets[rows], outputs=candidate.outputs[rows])
    return compare(own, part, resampling)


def judge(
    comparison: CandidateComparison, gates: Verdict, params: LoopParams
) -> tuple[Outcome | None, str]:
    """Return (outcome, reason): the outcome that ends the cycle, or None to propose the candidate.

    If `loop.max_forgetting` is less than one test row, one row may be lost.
    """
    old, recent = comparison.old, comparison.recent
    if gates in ("missed", "unjudged"):
        return "refused", f"its quality gates are {gates}"
    if old is None or recent is None:
        missing = "old" if old is None else "recent"
        return "refused", f"there are fewer than {MIN_ROWS} {missing} test rows to compare on"
    fault = _label_fault(comparison, params)
    if fault is not None:
        return fault
    parts = [("recent rows", recent, comparison.without)]
    if comparison.latest is not None:
        parts.append(("the newer recent rows", comparison.latest, comparison.latest_without))
    one_row = 0.0 if old.difference.metric in UNBOUNDED_METRICS else 1 / old.loss.rows
    if old.loss.value > max(params.max_forgetting, one_row) + 1e-12:
        return "worse", f"it forgets: on old test rows {_text(old)}"
    for name, part, _ in parts:
        if part.loss.low > 0:
            return "worse", f"on {name} {_text(part)}"
    for key, rest in comparison.without.items():
        if rest is not None and rest.loss.low > 0:
            return "worse", f"without the labels of key {key}, on recent rows {_text(rest)}"
    doubts = [_doubt(*part) for part in parts]
    if params.require_gain and all(doubts):
        return "no_gain", "; ".join(doubts)
    shown = doubts.index("") if "" in doubts else 0
    name, part, _ = parts[shown]
    return None, f"on {name} {_text(part)}; on old test rows {_text(old)}"


def _label_fault(comparison: CandidateComparison, params: LoopParams) -> tuple[Outcome, str] | None:
    """Return the outcome and the reason if the recent labels cannot be relied on; else None."""
    if comparison.contradicted:
        named = "; ".join(record.text for record in comparison.contradicted)
        return "wrong_labels", f"labels that the candidate contradicts, too: {named}"
    if len(comparison.keys) < params.min_keys:
        return "refused", (
            f"its recent labels come from {len(comparison.keys)} key "
            f"({', '.join(comparison.keys)}), loop.min_keys is {params.min_keys}"
        )
    return None


def _doubt(
    name: str, part: ReferenceComparison, without: Mapping[str, ReferenceComparison | None]
) -> str:
    """Describe why a part shows no gain; "" if it shows one, without any single key as well."""
    if part.loss.high >= 0:
        return f"no gain is shown: on {name} {_text(part)}"
    for key, rest in without.items():
        if rest is None or rest.loss.high >= 0:
            found = f"on {name} {_text(rest)}" if rest else f"fewer than {MIN_ROWS} rows are left"
            return f"its gain rests on the labels of key {key} alone: without, {found}"
    return ""


def _text(comparison: ReferenceComparison) -> str:
    found = comparison.difference
    return (
        f"{found.metric} is {found.after:.4g} after {found.before:.4g} "
        f"(change {found.low:+.4g} to {found.high:+.4g}, {found.rows} rows)"
    )
