"""The JSON form of one prediction, as callers of the service get it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Calibration, decided_classes


def prediction_columns(
    prediction: Mapping[str, Any], labels: Sequence[str], calibration: Calibration
) -> NDArray[np.float32]:
    """Return (columns + 1,): probabilities in the order of `labels` or the value, then OOD score.

    Raises:
        KeyError, TypeError: the prediction has another form.
        ValueError: parts of it contradict each other.
    """
    score = np.float32(prediction["ood_score"])
    if prediction["is_ood"] is not bool(calibration.is_ood(score)):
        raise ValueError("ood_score and is_ood do not go together")
    if not labels:
        interval = calibration.interval(prediction["value"])
        if prediction["interval"] != (interval and list(interval)):
            raise ValueError("value and interval do not go together")
        return np.array([prediction["value"], score], np.float32)

    probabilities = prediction["probabilities"]
    columns = np.array([probabilities[label] for label in labels], np.float32)
    if len(probabilities) != len(labels):
        raise ValueError("labels and probabilities do not go together")
    if (rule := calibration.decision) is not None and calibration.thresholds is not None:
        chosen = labels[int(decided_classes(columns, calibration.thresholds))]
        (facts,) = rule.facts(columns[np.newaxis], calibration.thresholds)
        if prediction["label"] != chosen or any(prediction[name] != facts[name] for name in facts):
            raise ValueError("label, costs and probabilities do not go together")
    elif calibration.thresholds is not None:
        given = calibration.given(columns)
        if prediction["labels"] != [name for name, own in zip(labels, given, strict=True) if own]:
            raise ValueError("labels and probabilities do not go together")
    elif probabilities[prediction["label"]] != float(columns.max()):
        raise ValueError("label and probabilities do not go together")
    is_inside = calibration.prediction_sets(columns)
    expected = [label for label, inside in zip(labels, is_inside, strict=True) if inside]
    if sorted(prediction["prediction_set"]) != sorted(expected):
        raise ValueError("probabilities and prediction_set do not go together")
    return np.append(columns, score)
