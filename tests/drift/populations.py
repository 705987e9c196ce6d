"""Simulated rows with known drift and known accuracy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.drift.features import extract, extract_inputs
from slipway.drift.reference import (
    Reference,
    describe_answers,
    describe_inputs,
    references_bytes,
)
from slipway.drift.window import Window
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract
from tests.calibrations import CALIBRATION

NUM_COLUMNS = 20
CLASSES = [str(number) for number in range(10)]
COLUMN = {
    "kind": "number", "required": True, "min": None, "max": None, "has_missing": False,
    "categories": [], "mean": 0.0, "std": 1.0, "fill": 0.0, "quantiles": [],
}  # fmt: skip
CONTRACT = ColumnContract(
    kind="columns",
    columns=[
        Column.model_validate(COLUMN | {"name": f"x{number}"}) for number in range(NUM_COLUMNS)
    ],
)
OUTPUT = OutputContract(kind="probabilities", labels=CLASSES)


@dataclass(frozen=True)
class ReferenceRows:
    """Validation rows with the network's answers and the labels."""

    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    outputs: NDArray[np.float32]  # (rows, labels) probabilities, or (rows, 1) values
    scores: NDArray[np.float32]  # (rows,) OOD scores
    targets: NDArray[np.float64]  # (rows,) class index, or the number itself


@dataclass(frozen=True)
class Population:
    """Standard normal columns, equally frequent classes, perfectly calibrated confidences."""

    shift: float = 0.0  # of the first column, in standard deviations
    first_class: float = 0.1  # fraction of the first class among the predictions
    hardness: float = 0.0  # fraction of hard rows, which have low confidences
    overconfidence: float = 0.0  # confidence above the accuracy
    strangeness: float = 0.0  # added to the OOD score, whose threshold is 0.75

    def draw(self, random: np.random.Generator, num_rows: int) -> ReferenceRows:
        inputs = random.normal(size=(num_rows, NUM_COLUMNS)).astype(np.float32)
        inputs[:, 0] += self.shift
        share = np.array([self.first_class, *[(1 - self.first_class) / 9] * 9])
        predicted = random.choice(10, num_rows, p=share)
        is_hard = random.uniform(size=num_rows) < self.hardness
        chance = np.where(
            is_hard, random.uniform(0.3, 0.8, num_rows), random.beta(12, 1, num_rows) * 0.7 + 0.3
        )
        confidence = np.clip(chance + self.overconfidence, 0.2, 0.999)
        outputs = np.repeat((1 - confidence)[:, None] / 9, 10, axis=1)
        outputs[np.arange(num_rows), predicted] = confidence
        is_right = random.uniform(size=num_rows) < chance
        targets = np.where(is_right, predicted, (predicted + 1) % 10).astype(np.float64)
        scores = (random.gamma(20, 0.02, num_rows) + self.strangeness).astype(np.float32)
        return ReferenceRows(inputs, outputs.astype(np.float32), scores, targets)


ORDINARY = Population()


def reference_of(rows: ReferenceRows) -> Reference:
    return build_reference(CONTRACT, OUTPUT, CALIBRATION, rows)


def build_reference(
    contract: InputContract,
    output: OutputContract,
    calibration: Calibration,
    rows: ReferenceRows,
    further: Iterable[NDArray[Any]] = (),
) -> Reference:
    values = extract_inputs(contract, rows.inputs)
    inputs = describe_inputs(contract, values, further)
    answers = describe_answers(output, calibration, answers_of(rows), rows.targets, inputs, values)
    return Reference(inputs, answers)


def reference_bytes(reference: Reference) -> bytes:
    """Serialise `drift.json` with the single variant fp32."""
    return references_bytes(reference.inputs, {"fp32": reference.answers})


def features_of_rows(rows: ReferenceRows) -> NDArray[np.float32]:
    return extract(CONTRACT, rows.inputs, rows.outputs, rows.scores)


def window_of(reference: Reference, rows: ReferenceRows) -> Window:
    window = Window(reference)
    window.add(features_of_rows(rows))
    return window


def accuracy(rows: ReferenceRows) -> float:
    return float((rows.outputs.argmax(axis=1) == rows.targets).mean())


def answers_of(rows: ReferenceRows) -> Answers:
    return Answers(rows.outputs, rows.scores)
