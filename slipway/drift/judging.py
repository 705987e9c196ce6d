"""Is a window drift, or chance? Thresholds come from the laws of the statistics and one stated budget of false alarms.

The budget is shared by all features, all statistics and all windows. An alarm is one window in which any statistic is above its
threshold. A window below the laws' validity is `too_small`: its rows belong into a longer one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference
from slipway.drift.histogram import merge_rare
from slipway.drift.reference import Reference
from slipway.drift.statistics import Comparison, Statistic, kolmogorov_smirnov, mann_whitney, psi
from slipway.drift.window import Window
from slipway.system.contract import Contract

Counts = NDArray[np.int64]

MIN_ROWS = (
    100  # of a window; below, the normal laws are not trusted at the levels that a budget makes
)
LEAST_EXPECTED = 20.0  # rows of the smaller sample in a bin; rarer ones are put together
JOINT = "all_numbers_together"
_DAYS = 30
_SQUARED = ("psi", "mmd")  # these grow with the square of a shift
_NUM_TESTS = {
    "number": 3,
    "category": 1,
}  # psi, and of numbers Kolmogorov and Smirnov's and Mann and Whitney's


@dataclass(frozen=True)
class Budget:
    """How many false alarms may be expected in 30 days of drift-free traffic, and how many windows a day has."""

    false_alarms_per_30_days: float = 1.0
    windows_per_day: float = 24.0

    @property
    def level(self) -> float:
        """The probability that a drift-free window may raise an alarm; at most one half."""
        return min(0.5, self.false_alarms_per_30_days / (_DAYS * self.windows_per_day))


class FeatureVerdict(Contract):
    """One feature, by the statistic that is furthest above, or least below, its threshold."""

    name: str  # of the feature, or `all_numbers_together`
    statistic: Statistic
    value: float
    threshold: float  # for the absolute value
    p_value: float  # of this statistic alone
    drifted: bool
    psi: (
        float  # for charts, whichever statistic is the strongest; of all numbers together their MMD
    )

    @property
    def strength(self) -> float:
        """How far it is beyond its threshold, above 1 for drift: in proportion to the shift, so that features can be compared by it."""
        return _strength(self.statistic, self.value, self.threshold)


class Verdict(Contract):
    """What is said of a window."""

    verdict: Literal["clean", "drifted", "too_small"]
    rows: int
    level: float  # the probability of an alarm without drift
    features: list[FeatureVerdict]  # the strongest first; empty for a window that is too small

    @property
    def drifted(self) -> bool:
        """Whether there is an alarm."""
        return self.verdict == "drifted"


def judge(reference: Reference, window: Window, budget: Budget | None = None) -> Verdict:
    """The verdict on one window whose rows are in no other one: on overlapping windows the budget does not hold."""
    return judge_at(reference, window, (budget or Budget()).level)


def judge_at(reference: Reference, window: Window, level: float) -> Verdict:
    """The same at a given probability of an alarm without drift."""
    if window.num_rows < MIN_ROWS:
        return Verdict(verdict="too_small", rows=window.num_rows, level=level, features=[])
    num_tests = sum(_NUM_TESTS[feature.kind] for feature in reference.features) + (
        reference.inputs.joint is not None
    )
    each = level / num_tests  # Bonferroni: whatever the features have to do with each other
    found = [
        _judge_feature(feature, window.counts(column), each)
        for column, feature in enumerate(reference.features)
    ]
    if reference.inputs.joint is not None:
        found.append(
            _verdict_on(
                JOINT, [reference.inputs.joint.test(window.joint_mean, window.num_rows, each)]
            )
        )
    ordered = sorted(found, key=lambda feature: feature.strength, reverse=True)
    drifted = any(feature.drifted for feature in found)
    return Verdict(
        verdict="drifted" if drifted else "clean",
        rows=window.num_rows,
        level=level,
        features=ordered,
    )


def _judge_feature(feature: FeatureReference, counts: Counts, level: float) -> FeatureVerdict:
    tested = [psi(*_comparable(counts, feature), level)]
    if feature.kind == "number":
        there, own = (
            counts[:-1],
            np.array(feature.counts[:-1]),
        )  # without missing values, which have no order
        if there.sum() >= MIN_ROWS and own.sum() >= MIN_ROWS:
            merged = merge_rare(there, own, LEAST_EXPECTED, ordered=True)
            tested += [kolmogorov_smirnov(*merged, level), mann_whitney(*merged, level)]
    return _verdict_on(feature.name, tested)


def _comparable(counts: Counts, feature: FeatureReference) -> tuple[Counts, Counts]:
    """Both samples' counts, rare bins put together: neighbours of a number, the rarest of a category."""
    own = np.array(feature.counts, np.int64)
    if feature.kind == "category":
        return merge_rare(counts, own, LEAST_EXPECTED, ordered=False)
    return merge_rare(
        np.roll(counts, 1), np.roll(own, 1), LEAST_EXPECTED, ordered=True
    )  # missing ones first, where they are on their own


def _verdict_on(name: str, tested: list[Comparison]) -> FeatureVerdict:
    strongest = max(
        tested, key=lambda one: _strength(one.statistic, float(one.values), float(one.thresholds))
    )
    value, threshold = float(strongest.values), float(strongest.thresholds)
    return FeatureVerdict(
        name=name,
        statistic=strongest.statistic,
        value=value,
        threshold=threshold,
        p_value=float(strongest.p_values),
        drifted=bool(strongest.exceeded),
        psi=float(tested[0].values),
    )


def _strength(statistic: Statistic, value: float, threshold: float) -> float:
    ratio = abs(value) / threshold
    return math.sqrt(ratio) if statistic in _SQUARED else ratio
