"""The JSON form of a multi-label prediction must fit its own probabilities."""

from typing import Any

import numpy as np
import pytest

from slipway.artifacts.predictions import prediction_columns
from tests.calibrations import CALIBRATION

pytestmark = pytest.mark.unit

LABELS = ["a", "b", "c"]
SEVERAL = CALIBRATION.model_copy(update={"thresholds": [0.5, 0.2, 0.9]})
SHARES = {"a": 0.625, "b": 0.25, "c": 0.75}


def answer(**changes: Any) -> dict[str, Any]:
    columns = np.array([SHARES[label] for label in LABELS], np.float32)
    inside = SEVERAL.prediction_sets(columns)
    likely = [label for label, is_inside in zip(LABELS, inside, strict=True) if is_inside]
    plain = {"probabilities": SHARES, "ood_score": 0.0, "is_ood": False, "labels": ["a", "b"]}
    return {**plain, "prediction_set": likely, **changes}


def test_prediction_is_converted_to_its_probabilities_and_ood_score() -> None:
    assert prediction_columns(answer(), LABELS, SEVERAL).tolist() == [0.625, 0.25, 0.75, 0.0]


def test_prediction_set_contains_every_predicted_label() -> None:
    assert {"a", "b"} <= set(answer()["prediction_set"])


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": ["a"]},
        {"labels": ["a", "b", "c"]},
        {"labels": ["b", "a"]},
        {"prediction_set": []},
        {"probabilities": {**SHARES, "d": 0.1}},
    ],
)
def test_labels_that_contradict_the_probabilities_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"are not those|calibration gives|4 labels, not 3"):
        prediction_columns(answer(**changes), LABELS, SEVERAL)
