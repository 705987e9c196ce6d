"""Proposed gates exceed the baseline by as much as the test rows can prove."""

import math

import pytest

from slipway.project.gate import class_gate, number_gate

pytestmark = pytest.mark.unit


def test_proposed_gate_is_lower_with_more_test_rows() -> None:
    bounds = [class_gate({"a": 50, "b": 50}, rows).bound for rows in (20, 200, 2000)]
    assert None not in bounds
    assert bounds == sorted(bounds, key=lambda bound: -(bound or 0))
    assert (bounds[-1] or 0) > 0.5


def test_proposed_gate_is_two_standard_errors_above_the_majority_class() -> None:
    gate = class_gate({"a": 60, "b": 40}, 300)
    assert gate.metric == "accuracy"
    assert gate.bound is not None
    error = math.sqrt(gate.bound * (1 - gate.bound) / 300)
    assert 0.6 <= gate.bound - 2 * error < 0.61


def test_proposed_gate_uses_balanced_accuracy_for_rare_classes() -> None:
    gate = class_gate({"good": 950, "bad": 50}, 1000)
    assert gate.metric == "balanced_accuracy"
    assert gate.bound is not None
    assert 0.5 < gate.bound < 0.8


def test_init_proposes_no_gate_for_a_handful_of_test_rows() -> None:
    assert class_gate({"a": 9, "b": 1}, 2).bound is None
    assert number_gate(2).bound is None
    assert (number_gate(3000).bound or 1) < 0.05
