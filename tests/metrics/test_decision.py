"""Thresholds about two classes: no other threshold costs less, and answers agree with them."""

from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference

from slipway.artifacts.predictions import prediction_columns
from slipway.artifacts.uncertainty import (
    NEVER,
    Decision,
    DecisionCosts,
    decided_classes,
    flipped_rows,
)
from slipway.metrics.class_uncertainty import ClassUncertainty
from slipway.metrics.decision import abstention, cheapest_threshold
from slipway.metrics.scores import Resampling, measure
from tests.calibrations import CALIBRATION

pytestmark = pytest.mark.unit

GENERATOR = np.random.default_rng(6)
OWN = GENERATOR.random(400) < 0.3
SHARES = np.clip(0.35 * OWN + GENERATOR.random(400) * 0.65, 0, 1).astype(np.float32)
OUTPUTS = np.stack([1 - SHARES, SHARES], axis=1)
TARGETS = OWN.astype(np.float64)


def rule(costs: DecisionCosts | None) -> Decision:
    return Decision(positive="yes", place=1, costs=costs)


def cost_of(threshold: float, costs: DecisionCosts) -> float:
    given = np.float32(threshold) <= SHARES
    return float((given & ~OWN).sum() * costs.false_positive) + float(
        (~given & OWN).sum() * costs.false_negative
    )


@pytest.mark.parametrize(("positive", "negative"), [(1, 1), (5, 1), (1, 9), (1, 0), (0, 1)])
def test_chosen_threshold_has_the_lowest_cost_of_all(positive: float, negative: float) -> None:
    costs = DecisionCosts(false_positive=positive, false_negative=negative, abstain=None)
    chosen = cheapest_threshold(SHARES, OWN, positive, negative)
    tried = [cost_of(float(value), costs) for value in [*SHARES, 0.0, 1.5]]
    assert cost_of(chosen, costs) <= min(tried) + 1e-9


def test_chosen_range_of_abstention_has_the_lowest_cost_of_all() -> None:
    def total(low: float, high: float) -> float:
        above, below = np.float32(high) <= SHARES, np.float32(low) > SHARES
        wrong = 4 * (above & ~OWN).sum() + 2 * (below & OWN).sum()
        return float(wrong + 0.6 * (~above & ~below).sum())

    found = abstention(SHARES, OWN, 4, 2, 0.6)
    assert found is not None
    ends = np.linspace(0, 1, 41)
    tried = [total(low, high) for low in ends for high in ends if low <= high]
    assert total(*found) <= min(tried) + 1e-9
    assert abstention(SHARES, OWN, 4, 2, 3.9) is None  # a person costs nearly as much as a mistake


def test_threshold_without_rows_is_the_optimum_for_perfect_probabilities() -> None:
    empty = SHARES[:0]
    assert cheapest_threshold(empty, OWN[:0], 3, 1) == 0.75
    assert abstention(empty, OWN[:0], 1, 1, 0.25) == (0.25, 0.75)


def test_predicted_labels_metrics_and_flips_follow_the_threshold() -> None:
    thresholds = [NEVER, 0.375]
    assert (decided_classes(OUTPUTS, thresholds) == (SHARES >= 0.375)).all()
    found = measure(
        "table_classification", TARGETS, OUTPUTS, Resampling(7, 100, 0.95), thresholds=thresholds
    )
    expected = reference.f1_score(OWN, SHARES >= 0.375, average="macro")
    assert found["f1_macro"].value == pytest.approx(expected)
    after = OUTPUTS.copy()
    row = int(np.abs(SHARES - 0.375).argmin())
    after[row] = [0.5, 0.5] if SHARES[row] < 0.375 else [0.75, 0.25]
    assert flipped_rows(after, OUTPUTS, (thresholds, thresholds)).tolist() == [row]


def test_the_decision_rule_in_params_is_fitted_with_its_abstention_bounds() -> None:
    costs = DecisionCosts(false_positive=4, false_negative=2, abstain=0.6)
    given = CALIBRATION.model_copy(update={"decision": rule(costs)})
    fitted = given.model_copy(update=ClassUncertainty.decide(given, OUTPUTS, TARGETS))
    assert fitted.decision is not None
    assert fitted.thresholds is not None
    low, high = fitted.decision.abstain_between or (0, 0)
    assert 0 < low <= fitted.thresholds[1] <= high < 1
    assert fitted.thresholds[0] == NEVER
    spent = fitted.decision.costs_of(OUTPUTS, fitted.thresholds, TARGETS)
    assert spent is not None
    assert spent.mean() < min(4 * (~OWN).mean(), 2 * OWN.mean(), 0.6)
    assert ClassUncertainty.decide(CALIBRATION, OUTPUTS, TARGETS) == {}


def answer(**changes: Any) -> dict[str, Any]:
    plain = {
        "label": "yes",
        "probabilities": {"no": 0.625, "yes": 0.375},
        "prediction_set": ["no", "yes"],
        "expected_cost": 1.25,
        "abstain": False,
        "ood_score": 0.0,
        "is_ood": False,
    }
    return {**plain, **changes}


@pytest.mark.parametrize("changes", [{"label": "no"}, {"expected_cost": 1.0}, {"abstain": True}])
def test_decision_that_contradicts_its_costs_is_refused(changes: dict[str, Any]) -> None:
    costs = DecisionCosts(false_positive=2, false_negative=6, abstain=0.5)
    calibration = CALIBRATION.model_copy(
        update={"decision": rule(costs), "thresholds": [NEVER, 0.25]}
    )
    assert len(prediction_columns(answer(), ["no", "yes"], calibration)) == 3
    with pytest.raises(ValueError, match="label or costs contradict probabilities"):
        prediction_columns(answer(**changes), ["no", "yes"], calibration)
