"""Judges if a window's differences from the reference are drift or chance.

All features, statistics and windows share one budget of false alarms. The thresholds follow from
the budget and the tests' null distributions. A window alarms if any statistic exceeds its
threshold. A window with too few rows for these distributions gets the verdict `too_small`; its rows
should be judged as part of a longer window.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipway.drift.feature_reference import FeatureReference
from slipway.drift.histogram import merge_rare
from slipway.drift.reference import Reference
from slipway.drift.two_sample_tests import (
    Statistic,
    TwoSampleTest,
    kolmogorov_smirnov,
    mann_whitney,
    psi,
)
from slipway.drift.window import Window
from slipway.system.contract import Contract

Counts = NDArray[np.int64]

MIN_ROWS = 100  # in smaller windows the normal approximations fail at such low levels
JOINT = "all_numbers_together"
_DAYS = 30
_QUADRATIC = ("psi", "mmd")  # statistics that grow with the square of a shift
_NUM_TESTS = {"number": 3, "category": 1}  # number of tests of one feature


@dataclass(frozen=True)
class Budget:
    """Expected number of false alarms in 30 days without drift, and the number of windows a day."""

    false_alarms_per_30_days: float = 1.0
    windows_per_day: float = 24.0

    @property
    def level(self) -> float:
        """Probability of an alarm in one window without drift; at most one half."""
        return min(0.5, self.false_alarms_per_30_days / (_DAYS * self.windows_per_day))


class FeatureVerdict(Contract):
    """One feature, judged by the statistic with the largest value relative to its threshold."""

    name: str  # name of the feature, or "all_numbers_together" for the joint test
    statistic: Statistic
    value: float
    threshold: float  # threshold of the statistic's absolute value
    p_value: float  # p-value of this statistic only, not corrected for the number of tests
    drifted: bool
    psi: float  # for charts, also if another statistic is stronger; the MMD for the joint test

    @property
    def strength(self) -> float:
        """Size of the shift relative to the smallest one that alarms; above 1 for drift."""
        ratio = abs(self.value) / self.threshold
        return math.sqrt(ratio) if self.statistic in _QUADRATIC else ratio


class Verdict(Contract):
    """The drift verdict on one window of traffic, with one entry for each feature."""

    verdict: Literal["clean", "drifted", "too_small"]
    rows: int
    level: float  # probability of an alarm without drift
    features: list[FeatureVerdict]  # strongest first; empty for a window that is too small

    @property
    def drifted(self) -> bool:
        return self.verdict == "drifted"


def judge(reference: Reference, window: Window, level: float = Budget().level) -> Verdict:
    """Judge one window; `level` is the probability of a false alarm (`Budget.level`).

    Windows must not share rows, because the budget does not hold for overlapping windows.
    """
    if window.num_rows < MIN_ROWS:
        return Verdict(verdict="too_small", rows=window.num_rows, level=level, features=[])
    joint = reference.inputs.joint
    num_tests = sum(_NUM_TESTS[feature.kind] for feature in reference.features)
    num_tests += joint is not None
    test_level = level / num_tests  # Bonferroni: valid for features that depend on each other
    verdicts = [
        _judge_feature(feature, window.counts(column), test_level)
        for column, feature in enumerate(reference.features)
    ]
    if joint is not None:
        test = joint.test(window.joint_mean, window.num_rows, test_level)
        verdicts.append(_strongest(JOINT, [test]))
    drifted = any(feature.drifted for feature in verdicts)
    return Verdict(
        verdict="drifted" if drifted else "clean",
        rows=window.num_rows,
        level=level,
        features=sorted(verdicts, key=lambda feature: feature.strength, reverse=True),
    )


def _judge_feature(feature: FeatureReference, counts: Counts, level: float) -> FeatureVerdict:
    expected = np.array(feature.counts, np.int64)
    if feature.kind == "category":
        return _strongest(feature.name, [psi(*merge_rare(counts, expected, ordered=False), level)])
    # Move missing values to the front; at the end they would be merged with the largest numbers.
    merged = merge_rare(np.roll(counts, 1), np.roll(expected, 1), ordered=True)
    tests = [psi(*merged, level)]
    known, expected_known = counts[:-1], expected[:-1]  # missing values have no order
    if known.sum() >= MIN_ROWS and expected_known.sum() >= MIN_ROWS:
        merged = merge_rare(known, expected_known, ordered=True)
        tests += [kolmogorov_smirnov(*merged, level), mann_whitney(*merged, level)]
    return _strongest(feature.name, tests)


def _strongest(name: str, tests: list[TwoSampleTest]) -> FeatureVerdict:
    verdicts = [
        FeatureVerdict(
            name=name,
            statistic=test.statistic,
            value=float(test.values),
            threshold=float(test.thresholds),
            p_value=float(test.p_values),
            drifted=bool(test.exceeded),
            psi=float(tests[0].values),
        )
        for test in tests
    ]
    return max(verdicts, key=lambda verdict: verdict.strength)
