"""Proposes the quality gate: the lowest result that is significantly better than the baseline."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

_DEVIATIONS = 2.0  # deviations of the measured value above the baseline: about 97.5 % of cases
_RARE = 0.2  # a gate on accuracy above 1 - this would say nothing of the rare classes
_STEP = 0.001
_ROOM = 0.5  # fraction of the way from the baseline to 1; a gate beyond it would refuse good models


class ProposedGate(NamedTuple):
    """A gate on one metric. `bound` is None if the rows are too few to prove any result."""

    metric: str
    bound: float | None
    reason: str


def class_gate(counts: Mapping[str, int], num_test: int) -> ProposedGate:
    """Return a gate on accuracy; on balanced accuracy if one class has nearly all rows.

    Args:
        counts: rows of each class in all splits.
        num_test: rows of the test split.
    """
    total, most = sum(counts.values()), max(counts.values())
    baseline = most / total
    if baseline <= 1 - _RARE:
        found = _least(baseline, lambda p: math.sqrt(p * (1 - p) / num_test))
        what = f"the majority class has {baseline:.3f}"
        return _gate("accuracy", found, what, num_test)
    baseline = 1 / len(counts)
    rows = [max(1.0, number * num_test / total) for number in counts.values()]
    found = _least(
        baseline, lambda p: baseline * math.sqrt(sum(p * (1 - p) / number for number in rows))
    )
    what = f"the majority class alone has {baseline:.3f}, and {most / total:.3f} of the rows"
    return _gate("balanced_accuracy", found, what, num_test)


def label_gate(counts: Mapping[str, int], num_test: int) -> ProposedGate:
    """Return a gate on the subset accuracy; `counts` are rows of each set of labels."""
    baseline = max(counts.values()) / sum(counts.values())
    found = _least(baseline, lambda p: math.sqrt(p * (1 - p) / num_test))
    what = f"the most frequent set of labels has {baseline:.3f}"
    return _gate("subset_accuracy", found, what, num_test)


def number_gate(num_test: int) -> ProposedGate:
    """Return a gate on R2; the baseline, which predicts the mean target, has an R2 of 0."""
    found = _least(0.0, lambda r2: 2 * math.sqrt(r2 / num_test) * (1 - r2))
    return _gate("r2", found, "the mean target has 0", num_test)


def _least(baseline: float, error: Callable[[float], float]) -> float | None:
    """Return the lowest result that is significantly better than `baseline`.

    `error` returns the standard error of a result. None if there is no such result.
    """
    steps = range(1, round(_ROOM * (1 - baseline) / _STEP))
    values = (baseline + step * _STEP for step in steps)
    return next((v for v in values if v - _DEVIATIONS * error(v) > baseline), None)


def _gate(metric: str, found: float | None, what: str, num_test: int) -> ProposedGate:
    bound = None if found is None else math.ceil(100 * found - 1e-9) / 100
    if bound is None:
        return ProposedGate(metric, None, f"{what}; {num_test} test rows prove no gain")
    reason = f"{what}; {num_test:,} test rows prove a gain from here on. Raise it"
    return ProposedGate(metric, bound, reason)
