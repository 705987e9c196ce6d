"""Uncertainty parameters: fitted by `evaluate`, stored in the bundle, applied by the service.

artifacts/calibration.json             temperature and thresholds: `calibration` in bundle.json
artifacts/ood_score.safetensors    statistics behind the OOD score in the graph

Prediction sets and intervals contain the label of a fraction `coverage` of rows like the validation
rows (Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World", chapter 2). That is
a mean over draws of validation rows, and one draw of few rows may be far off, so `evaluate`
measures the coverage on test rows. It does not hold for unusual inputs, so every prediction also
has an OOD score.
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import IntegrityError, SchemaError

_FIX = "Run `dvc repro evaluate`."
NEVER = 2.0  # a threshold that no probability reaches, so the label is never predicted
# With 200 rows a coverage of 90 % is missed by over 2 points in a third of the draws:
# sqrt(0.9 * 0.1 / 202).
FEW_ROWS = 200
Verdict = Literal["below", "within", "above"]


class Answers(NamedTuple):
    """Outputs and OOD scores of a model for a batch of rows."""

    outputs: NDArray[np.float32]  # (rows, labels) probabilities or (rows, 1) values
    scores: NDArray[np.float32]  # (rows,) OOD scores, 0 or more


def exact(fraction: float | Fraction) -> Fraction:
    """Convert a fraction such as 0.9 to the exact decimal, nine tenths.

    Binary rounding would matter: (9 + 1) * (1 - 0.9) is less than 1.
    """
    return Fraction(str(fraction))


class Conformal(Contract):
    """Threshold of conformal prediction sets or intervals, fitted on validation rows.

    With too few rows for the coverage, sets contain every label and there are no intervals.
    """

    coverage: float = Field(gt=0, lt=1)  # fraction of rows whose set or interval contains the label
    # Classes: smallest probability of a label in the set; numbers: half of the interval.
    threshold: float | None
    rows: int  # validation rows behind the threshold

    @property
    def is_vacuous(self) -> bool:
        """True if there are too few rows for the coverage, so that nothing is excluded."""
        return (self.rows + 1) * (1 - exact(self.coverage)) < 1

    @property
    def has_few_rows(self) -> bool:
        """True if the rows are so few that the actual coverage may be off by percentage points."""
        return self.rows < FEW_ROWS

    def verdict(self, low: float, high: float) -> Verdict:
        """Compare `low` to `high`, the interval of the measured coverage, with the target coverage.

        Returns "below" or "above" if the whole interval is there, else "within".
        """
        if high < self.coverage:
            return "below"
        return "above" if low > self.coverage else "within"


class OODThreshold(Contract):
    """Threshold of the OOD score, above which an input is flagged as unusual."""

    fraction: float = Field(gt=0, lt=1)  # maximum fraction of ordinary rows flagged
    threshold: float | None  # scores above are flagged; null with too few rows: none are
    rows: int  # validation rows behind the threshold
    layer: str  # dotted name; the score is computed from its input
    statistics_sha256: str  # hex, of ood_score.safetensors


class DecisionCosts(Contract):
    """Costs of decisions between two classes, in any unit; a right decision costs nothing."""

    false_positive: float
    false_negative: float
    abstain: float | None  # of leaving a row to a person; null: never


class Decision(Contract):
    """Rule that turns the probability of the positive one of two classes into a decision."""

    positive: str
    place: int  # of the positive class among the labels
    costs: DecisionCosts | None  # null: its threshold has the largest F1
    # Probabilities of the positive class from the first to below the second are left to a person.
    abstain_between: tuple[float, float] | None = None
    rows: int = 0  # validation rows behind threshold and bounds

    def abstains(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return a mask (...,) of the predictions that are left to a person."""
        shares = probabilities[..., self.place]
        if self.abstain_between is None:
            return np.zeros(shares.shape, bool)
        low, high = np.asarray(self.abstain_between, np.float32)
        return np.asarray((shares >= low) & (shares < high))

    def expected_costs(
        self, probabilities: NDArray[np.float32], thresholds: Sequence[float]
    ) -> NDArray[np.float64] | None:
        """Return the expected cost of each prediction, (...,) float64; None without costs."""
        if self.costs is None:
            return None
        shares = probabilities[..., self.place].astype(np.float64)
        is_positive = decided_classes(probabilities, thresholds) == self.place
        wrong = np.where(
            is_positive,
            (1 - shares) * self.costs.false_positive,
            shares * self.costs.false_negative,
        )
        return np.where(self.abstains(probabilities), self.costs.abstain or 0.0, wrong)

    def costs_of(
        self,
        probabilities: NDArray[np.float32],
        thresholds: Sequence[float],
        targets: NDArray[np.generic],
    ) -> NDArray[np.float64] | None:
        """Return the cost of each prediction, given its true class, (rows,) float64.

        Returns None without costs.
        """
        if self.costs is None:
            return None
        is_positive = decided_classes(probabilities, thresholds) == self.place
        is_own = np.asarray(targets) == self.place
        cost = np.where(is_positive & ~is_own, self.costs.false_positive, 0.0)
        cost = cost + np.where(~is_positive & is_own, self.costs.false_negative, 0.0)
        return np.where(self.abstains(probabilities), self.costs.abstain or 0.0, cost)

    def facts(
        self, probabilities: NDArray[np.float32], thresholds: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Return extra fields of each answer, such as its cost, from probabilities (rows, 2)."""
        costs = self.expected_costs(probabilities, thresholds)
        if self.costs is None or costs is None:
            return [{} for _ in probabilities]
        found: list[dict[str, Any]] = [{"expected_cost": cost} for cost in costs.tolist()]
        if self.costs.abstain is not None:
            for fact, abstains in zip(found, self.abstains(probabilities).tolist(), strict=True):
                fact["abstain"] = abstains
        return found


class Calibration(Contract):
    """The content of `artifacts/calibration.json`: temperature, thresholds and decision rule."""

    # Divides the logits in the graph, a number for each label if rows have several; 1 for numeric
    # targets.
    temperature: PositiveFloat | list[PositiveFloat]
    conformal: Conformal
    ood: OODThreshold
    # The smallest probability at which each label is given, in the order of the labels; null if the
    # most probable label is given, or for numeric targets. With a decision about two classes that
    # of the other class is NEVER.
    thresholds: list[float] | None = None
    decision: Decision | None = None

    def is_ood(self, scores: NDArray[np.float32] | np.float32) -> NDArray[np.bool_]:
        """Return a mask of the OOD scores above the threshold, in the shape of `scores`."""
        most = np.inf if self.ood.threshold is None else self.ood.threshold
        return np.asarray(scores > most)

    def given(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return a mask (..., labels) of the predicted labels of a multi-label model."""
        return given_labels(probabilities, self.thresholds)

    def prediction_sets(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return a mask (..., labels) of the labels in each prediction set.

        A set always contains the most probable label, and for a multi-label model all predicted
        labels.
        """
        least = np.minimum(
            np.float32(self.conformal.threshold or 0.0), probabilities.max(axis=-1, keepdims=True)
        )
        inside = np.asarray(probabilities >= least)
        if self.thresholds is None:
            return inside
        if self.decision is None:
            return inside | self.given(probabilities)
        chosen = decided_classes(probabilities, self.thresholds)[..., np.newaxis]
        return np.asarray(inside | (np.arange(probabilities.shape[-1]) == chosen))

    def interval(self, value: float) -> tuple[float, float] | None:
        """Return the bounds around a predicted number; None with too few rows for the coverage."""
        half = self.conformal.threshold
        return None if half is None else (value - half, value + half)


def given_labels(
    probabilities: NDArray[np.float32], thresholds: Sequence[float] | None
) -> NDArray[np.bool_]:
    """Return a mask (..., labels) of the predicted labels of a multi-label model.

    A label is predicted if its probability reaches its threshold; without `thresholds`, if it
    reaches 0.5. Compares in float32, so that Python's and numpy's numbers cannot differ.
    """
    least = np.asarray(0.5 if thresholds is None else thresholds, np.float32)
    return np.asarray(probabilities >= least)


def decided_classes(
    probabilities: NDArray[np.float32], thresholds: Sequence[float] | None
) -> NDArray[np.int64]:
    """Return the position of each predicted class, (...,) int64.

    `probabilities` are (..., classes). Without `thresholds` it is the most probable class, and the
    first of equal ones. With `thresholds` of two classes, it is the positive class if its
    probability reaches its threshold.
    """
    if thresholds is None:
        return np.asarray(probabilities.argmax(axis=-1))
    positive = int(np.argmin(thresholds))
    reaches = probabilities[..., positive] >= np.float32(thresholds[positive])
    return np.where(reaches, positive, 1 - positive)


def decisions(
    outputs: NDArray[np.float32], thresholds: Sequence[float] | None
) -> NDArray[np.generic]:
    """Return a model's predicted labels in a form that can be compared with another model's.

    Without `thresholds` it is the position of the most probable label, (rows, 1), which is always 0
    for values. With `thresholds` it is a mask (rows, labels) of the predicted labels.
    """
    if thresholds is None:
        return np.asarray(outputs.argmax(axis=1)[:, np.newaxis])
    return given_labels(outputs, thresholds)


def flipped_rows(
    found: NDArray[np.float32],
    expected: NDArray[np.float32],
    thresholds: tuple[Sequence[float] | None, Sequence[float] | None] = (None, None),
) -> NDArray[np.int64]:
    """Return the positions of the rows whose predicted labels differ.

    `found` and `expected` are outputs (rows, outputs) of two models; `thresholds` are theirs.
    """
    now, before = (
        decisions(outputs, own) for outputs, own in zip((found, expected), thresholds, strict=True)
    )
    return np.flatnonzero((now != before).any(axis=1))


def leads(outputs: NDArray[np.float32], thresholds: Sequence[float] | None) -> NDArray[np.float64]:
    """Return the margin of each row's predicted label, in probability, (rows,) float64.

    Without `thresholds` it is the difference of the two largest probabilities; with `thresholds`,
    the smallest distance of a probability from its threshold.
    """
    if thresholds is None:
        best = np.sort(outputs.astype(np.float64), axis=1)
        return np.asarray(best[:, -1] - best[:, -2])
    return np.asarray(np.abs(outputs - np.asarray(thresholds, np.float64)).min(axis=1))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write `artifacts/calibration.json`."""
    files.write_json(path, calibration.model_dump(mode="json"))


def read_calibration(path: Path, bundled: Calibration | None = None) -> Calibration:
    """Read `artifacts/calibration.json`.

    Raises SchemaError if it is missing or malformed, IntegrityError if it differs from `bundled`.
    """
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    calibration = parse_record(Calibration, path, payload, SchemaError, _FIX)
    if bundled not in (None, calibration):
        raise IntegrityError(
            f"{path} differs from the calibration of the bundle. Run `dvc repro export`."
        )
    return calibration
