"""Tensors of predictions with a decision rule: expected cost and abstention."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.uncertainty import Decision, DecisionCosts
from slipway.serving.open_inference.conversion import as_outputs, describe
from slipway.serving.open_inference.messages import InferRequest
from tests.serving.bundles import LABELS, row_classifier, write_bundle

ANSWER: dict[str, Any] = {
    "label": LABELS[0],
    "probabilities": dict.fromkeys(LABELS, 0.5),
    "prediction_set": LABELS,
    "ood_score": 1.0,
    "is_ood": False,
}


@pytest.mark.parametrize("abstain", [None, 1.0])
def test_infer_outputs_costs_and_abstentions_only_if_the_decision_rule_has_them(
    tmp_path: Path, abstain: float | None
) -> None:
    manifest = write_bundle(tmp_path, row_classifier()).manifest
    request = InferRequest(None, [], None, is_binary=False)
    plain = describe(manifest)["outputs"]
    assert {"expected_cost", "abstain"}.isdisjoint(output["name"] for output in plain)
    costs = DecisionCosts(false_positive=5.0, false_negative=1.0, abstain=abstain)
    decision = Decision(positive=LABELS[0], place=0, costs=costs)
    calibration = manifest.calibration.model_copy(update={"decision": decision})
    decided = manifest.model_copy(update={"calibration": calibration})
    names = ["expected_cost", *(["abstain"] if abstain else [])]
    described = {one["name"]: one["datatype"] for one in describe(decided)["outputs"]}
    assert [name for name in described if name not in {one["name"] for one in plain}] == names
    own = {"expected_cost": 0.25, "abstain": True}
    answer = {"predictions": [ANSWER | {name: own[name] for name in names}] * 2}
    tensors = {one.name: one for one, _ in as_outputs(answer, request, decided)}
    assert set(tensors) == set(described)
    assert np.array_equal(tensors["expected_cost"].values, np.array([0.25, 0.25], np.float32))
    if abstain:
        assert tensors["abstain"].datatype == "BOOL"
        assert tensors["abstain"].values.all()
