"""Drift features: a few numbers and categories per row, from a model's input and its answer.

Images: brightness, contrast, sharpness, noise and similar, on a grid of pixels. Table rows: their
columns. Answers: the class or value, its certainty, and the OOD score, which summarises how far the
network's penultimate activations are from those of training rows. Vectorised numpy only.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import decided_classes
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.system.contract import Contract

Float = NDArray[np.float32]

PREDICTED_CLASS = "predicted_class"
CONFIDENCE = "confidence"
OOD_SCORE = "ood_score"


class Feature(Contract):
    """Description of one feature: a number, or an index into `categories`; NaN if missing."""

    name: str
    kind: Literal["number", "category"]
    origin: Literal["input", "output"]
    categories: list[str]  # empty for a number


def extract(
    contract: InputContract,
    inputs: NDArray[Any],
    outputs: Float,
    scores: Float,
    *,
    several: bool = False,
    thresholds: Sequence[float] | None = None,
) -> Float:
    """Return (rows, features) float32: the input features, then the output features.

    Args:
        inputs: (rows, ...) encoded inputs of the network.
        outputs: (rows, labels) probabilities or (rows, 1) values.
        scores: (rows,) OOD scores.
        several: True if a row can have several labels, each with its own probability.
        thresholds: decision thresholds of two classes; None for the most probable class.
    """
    answers = extract_outputs(outputs, scores, several=several, thresholds=thresholds)
    return np.concatenate([extract_inputs(contract, inputs), answers], axis=1)


def input_features(contract: InputContract) -> list[Feature]:
    """List the columns of `extract_inputs`."""
    list_features: Callable[[InputContract], list[Feature]]
    list_features = input_kind(contract.kind).load_part("input_features")
    return list_features(contract)


def extract_inputs(contract: InputContract, inputs: NDArray[Any]) -> Float:
    """Return (rows, features) float32: the input features, which need no model."""
    measure: Callable[[InputContract, NDArray[Any]], Float]
    measure = input_kind(contract.kind).load_part("measure_features")
    return measure(contract, inputs)


def output_features(output: OutputContract) -> list[Feature]:
    """List the columns of `extract_outputs`."""
    if output.kind == "value":
        return [_output_number("value"), _output_number(OOD_SCORE)]
    if output.kind == "label_probabilities":
        names = [f"probability of {label}" for label in output.labels]
        return [_output_number(name) for name in (*names, CONFIDENCE, OOD_SCORE)]
    if output.kind == "probabilities":
        numbers = (CONFIDENCE, "entropy", "margin", OOD_SCORE)
        label = Feature(
            name=PREDICTED_CLASS, kind="category", origin="output", categories=output.labels
        )
        return [label, *map(_output_number, numbers)]
    assert_never(output.kind)


def _output_number(name: str) -> Feature:
    return Feature(name=name, kind="number", origin="output", categories=[])


def extract_outputs(
    outputs: Float,
    scores: Float,
    *,
    several: bool = False,
    thresholds: Sequence[float] | None = None,
) -> Float:
    """Return (rows, features) float32: the output features of the answers.

    The class is the one that the service would return. Entropy is in nats. The margin is the
    largest probability minus the second largest. With `several`, the features are the probability
    of each label, `confidence_of_labels` and the OOD score.
    """
    if several:
        return np.column_stack([outputs, confidence_of_labels(outputs), scores]).astype(np.float32)
    if outputs.shape[1] == 1:
        return np.column_stack([outputs[:, 0], scores]).astype(np.float32)
    probabilities = np.clip(outputs, np.finfo(np.float32).tiny, 1)
    entropy = -(probabilities * np.log(probabilities)).sum(axis=1)
    second, first = np.partition(outputs, -2, axis=1)[:, -2:].T
    columns = [decided_classes(outputs, thresholds), first, entropy, first - second, scores]
    return np.column_stack(columns).astype(np.float32)


def confidence_of_labels(outputs: Float) -> Float:
    """Return (rows,) the probability that all labels are right if they are cut at 1/2.

    Assumes that labels are independent given the input.
    """
    return np.asarray(np.maximum(outputs, 1 - outputs).prod(axis=1, dtype=np.float64), np.float32)
