"""The traffic and the small model of bench/loop.py: planted changes over 60 days."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from slipway.artifacts.bundle import OutputContract
from slipway.drift.reference import Reference
from slipway.inputs.columns import Column, ColumnContract
from tests.calibrations import CALIBRATION
from tests.drift.populations import COLUMN, ReferenceRows, build_reference

LABELS = ["no", "yes"]
CONTRACT = ColumnContract(
    kind="columns",
    columns=[Column.model_validate(COLUMN | {"name": name}) for name in ("a", "b", "c", "d")],
)
OUTPUT = OutputContract(kind="probabilities", labels=LABELS)
Float = NDArray[np.float64]


@dataclass(frozen=True)
class StreamPlan:
    """A kind of traffic: the shift of the first column by day, and the quality of the labels."""

    name: str
    shift: Callable[[float], float] = lambda day: 0.0
    delay_days: float = 0.0  # from an answer to its label
    wrong: float = 0.0  # fraction of the last key's labels that are wrong
    decides: bool = True  # True: a person approves each request after a day
    require_gain: bool = True  # `loop.require_gain`


SHIFT = 5.0  # standard deviations


def sudden(day: float) -> float:
    """Return the whole shift from day 20 on."""
    return SHIFT * (day >= 20)


def slow(end: float) -> Callable[[float], float]:
    """Return a shift that grows from day 15 to the day `end`."""
    return lambda day: SHIFT * min(1.0, max(0.0, (day - 15) / (end - 15)))


def seasonal(day: float) -> float:
    """Return a shift that depends on the weekday and the hour, as in the traffic of a shop."""
    return float(0.5 * np.sin(2 * np.pi * day / 7) + 0.3 * np.sin(2 * np.pi * day))


PLANS = (
    StreamPlan("sudden shift on day 20", sudden),
    StreamPlan("slow drift from day 15 to 30", slow(30)),
    StreamPlan("slow drift from day 15 to 45", slow(45)),
    StreamPlan("slow drift from day 15 to 60", slow(60)),
    StreamPlan("the same, without `require_gain`", slow(60), require_gain=False),
    StreamPlan("seasonal, by week and day", seasonal),
    StreamPlan("sudden shift, labels 7 days late", sudden, 7.0),
    StreamPlan("clean, one key with 30 % wrong labels", wrong=0.3),
    StreamPlan("sudden shift, the same key", sudden, wrong=0.3),
    StreamPlan("sudden shift, nobody decides", sudden, decides=False),
)


def draw(
    random: np.random.Generator, num_rows: int, shift: float
) -> tuple[Float, NDArray[np.int64]]:
    """Draw (rows, 4) inputs and their classes.

    For a first column above 2.5 the effect of the second column is reversed. Without a shift no row
    is there.
    """
    inputs = random.normal(size=(num_rows, 4))
    inputs[:, 0] = np.clip(inputs[:, 0], -2.5, 2.5) + shift
    return inputs, classes(random, inputs)


class SmallModel:
    """A logistic regression on the inputs and hinges of the first one, with a drift reference."""

    def __init__(self, version: str, inputs: Float, targets: NDArray[np.int64]) -> None:
        self.version = version
        self._fitted = LogisticRegression(C=10.0, max_iter=300).fit(_hinges(inputs), targets)

    def answers(self, inputs: Float) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._fitted.predict_proba(_hinges(inputs)).astype(np.float32)
        return found

    def reference(self, inputs: Float, targets: NDArray[np.int64], train: Float) -> Reference:
        """Describe test rows and training rows, as `export` does."""
        rows = ReferenceRows(
            inputs.astype(np.float32),
            self.answers(inputs),
            ood_scores(inputs),
            targets.astype(np.float64),
        )
        return build_reference(CONTRACT, OUTPUT, CALIBRATION, rows, [train.astype(np.float32)])


def _hinges(inputs: Float) -> Float:
    hinges = np.maximum(0, inputs[:, :1] - np.arange(1, 5))
    return np.concatenate([inputs, hinges, hinges * inputs[:, 1:2]], axis=1)


def ood_scores(inputs: Float) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.abs(inputs).max(axis=1).astype(np.float32)
    return found


def classes(random: np.random.Generator, inputs: Float) -> NDArray[np.int64]:
    score = np.where(inputs[:, 0] > 2.5, -inputs[:, 1], inputs[:, 1] + 0.3 * inputs[:, 0])
    return (score + 0.3 * random.normal(size=len(inputs)) > 0).astype(np.int64)
