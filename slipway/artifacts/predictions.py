"""The JSON form of one prediction in the service's responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Calibration, decided_classes


def prediction_columns(
    prediction: Mapping[str, Any], labels: Sequence[str], calibration: Calibration
) -> NDArray[np.float32]:
    """Convert a prediction in JSON to numbers, (n,) float32, and check that its fields agree.

    The numbers are the probabilities in the order of `labels`, or the value; then the OOD score.

    Raises:
        KeyError, TypeError: a field is missing or of a wrong type.
        ValueError: parts of it contradict each other.
    """
    score = np.float32(prediction["ood_score"])
    if prediction["is_ood"] is not bool(calibration.is_ood(score)):
        raise ValueError("is_ood contradicts ood_score by the bundle's threshold")
    if not labels:
        interval = calibration.interval(prediction["value"])
        if prediction["interval"] != (interval and list(interval)):
            raise ValueError("interval is not the one that the calibration gives for value")
        return np.array([prediction["value"], score], np.float32)

    probabilities = prediction["probabilities"]
    columns = np.array([probabilities[label] for label in labels], np.float32)
    if len(probabilities) != len(labels):
        raise ValueError(f"probabilities has {len(probabilities)} labels, not {len(labels)}")
    _check_decision(prediction, labels, columns, calibration)
    is_inside = calibration.prediction_sets(columns)
    if sorted(prediction["prediction_set"]) != sorted(_chosen(labels, is_inside)):
        raise ValueError(
            f"prediction_set is {sorted(prediction['prediction_set'])}, but the "
            f"bundle's calibration gives {sorted(_chosen(labels, is_inside))}"
        )
    return np.append(columns, score)


def _check_decision(
    prediction: Mapping[str, Any],
    labels: Sequence[str],
    columns: NDArray[np.float32],
    calibration: Calibration,
) -> None:
    """Raise ValueError if the predicted labels are not those of the probabilities `columns`."""
    rule, thresholds = calibration.decision, calibration.thresholds
    if thresholds is None:
        if prediction["probabilities"][prediction["label"]] != float(columns.max()):
            raise ValueError("label is not the one with the largest probability")
    elif rule is None:
        if prediction["labels"] != _chosen(labels, calibration.given(columns)):
            raise ValueError("labels are not those with probabilities that reach their thresholds")
    else:
        (facts,) = rule.facts(columns[np.newaxis], thresholds)
        # In float32, as the Open Inference Protocol sends a cost.
        are_facts = all(np.float32(prediction[name]) == np.float32(facts[name]) for name in facts)
        if (
            prediction["label"] != labels[int(decided_classes(columns, thresholds))]
            or not are_facts
        ):
            raise ValueError("label or costs contradict probabilities by the bundle's decision")


def _chosen(labels: Sequence[str], is_chosen: NDArray[np.bool_]) -> list[str]:
    return [label for label, chosen in zip(labels, is_chosen, strict=True) if chosen]
