"""What an answer is worth: the record that evaluate fits on validation rows, export bundles and the service applies.

artifacts/calibration.json             temperature and thresholds: the `calibration` of bundle.json
artifacts/outlier_score.safetensors    what the outlier score in the graph is computed with

Prediction sets and intervals aim at holding the truth of a share `coverage` of the rows that are like the validation
rows (Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World", chapter 2). That is a mean over draws
of the validation rows: with few of them one draw may be far off, so `evaluate` measures the share on the test rows. It
promises nothing for strangers, which is why every answer has an outlier score as well.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError, SchemaError

_FIX = "Run `dvc repro evaluate`."
# With 200 rows one draw in three misses a coverage of 90 % by more than 2 points: sqrt(0.9 * 0.1 / 202).
FEW_ROWS = 200


Verdict = Literal["below", "within", "above"]


class Answers(NamedTuple):
    """What a model answers to a batch."""

    outputs: NDArray[np.float32]  # (rows, labels) probabilities or (rows, 1) values
    scores: NDArray[np.float32]  # (rows,) outlier scores, 0 or more


def exact(share: float | Fraction) -> Fraction:
    """0.9 as nine tenths: in binary (9 + 1) * (1 - 0.9) is below 1."""
    return Fraction(str(share))


class Conformal(Contract):
    """How a prediction set or an interval is made. Without enough rows for the coverage it is every label, or no interval."""

    coverage: float = Field(gt=0, lt=1)  # share of rows whose set or interval has to hold the truth
    threshold: (
        float | None
    )  # classes: the least probability of a label in the set; a number: half of the interval, or null
    rows: int  # validation rows behind the threshold

    @property
    def is_vacuous(self) -> bool:
        """Whether the rows are too few for the coverage, so that nothing is excluded."""
        return (self.rows + 1) * (1 - exact(self.coverage)) < 1

    @property
    def has_few_rows(self) -> bool:
        """True where one draw of so few rows may well be points away from the coverage."""
        return self.rows < FEW_ROWS

    def verdict(self, low: float, high: float) -> Verdict:
        """The coverage against the interval of what was measured."""
        if high < self.coverage:
            return "below"
        return "above" if low > self.coverage else "within"


class Outlier(Contract):
    """From which score on a row is called an outlier."""

    share: float = Field(gt=0, lt=1)  # of ordinary rows that are called outliers, at most
    threshold: (
        float | None
    )  # scores above are outliers; null, where the rows were too few: no row is one
    rows: int  # validation rows behind the threshold
    layer: str  # of the network, dotted: the score is computed from what it takes
    statistics_sha256: str  # hex, of the file that the score is computed with


class Calibration(Contract):
    """The content of `artifacts/calibration.json`."""

    temperature: float = Field(
        gt=0
    )  # logits are divided by it inside the graph; 1 for a numeric target
    conformal: Conformal
    outlier: Outlier

    def is_outlier(self, scores: NDArray[np.float32] | np.float32) -> NDArray[np.bool_]:
        """Whether each score is above the threshold; of the same shape."""
        most = np.inf if self.outlier.threshold is None else self.outlier.threshold
        return np.asarray(scores > most)

    def prediction_sets(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        """(..., labels) probabilities to which labels are in each row's set; the best one always is."""
        least = np.minimum(
            np.float32(self.conformal.threshold or 0.0), probabilities.max(axis=-1, keepdims=True)
        )
        return np.asarray(probabilities >= least)

    def holds_truth(
        self, outputs: NDArray[np.float32], targets: NDArray[np.float64], *, of_classes: bool
    ) -> NDArray[np.bool_] | None:
        """(rows,) whether each set or interval has the (rows,) class index or number; None where there is no interval."""
        if of_classes:
            sets = self.prediction_sets(outputs)
            return np.asarray(sets[np.arange(len(sets)), targets.astype(np.int64)])
        half = self.conformal.threshold
        return (
            None
            if half is None
            else np.asarray(np.abs(outputs[:, 0].astype(np.float64) - targets) <= half)
        )

    def interval(self, value: float) -> tuple[float, float] | None:
        """The bounds of the true number around a predicted one; None where the rows were too few for the coverage."""
        half = self.conformal.threshold
        return None if half is None else (value - half, value + half)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write `artifacts/calibration.json`."""
    files.write_json(path, calibration.model_dump(mode="json"))


def read_calibration(path: Path, bundled: Calibration | None = None) -> Calibration:
    """Read `artifacts/calibration.json`. SchemaError if it is missing or not understood, IntegrityError if a bundle has another one."""
    try:
        calibration = Calibration.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise SchemaError(
            f"{path} is not what the evaluate stage writes: {error}. {_FIX}"
        ) from error
    if bundled not in (None, calibration):
        raise IntegrityError(
            f"{path} is not the calibration of the bundle, whose sets and outliers would differ. Run `dvc repro export`."
        )
    return calibration
