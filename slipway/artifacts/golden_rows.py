"""Golden rows: validation rows and fp32's predictions for them, in `golden_rows.npz`.

The file is in the bundle. Every runtime predicts these rows before it serves a variant. This
detects another model's engine, NaN, overflow and swapped inputs on the serving machine; the
certificate states how good the model is. The file is in numpy's format, without pickle.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers, flipped_rows
from slipway.system.contract import Contract
from slipway.system.errors import BundleError, ParityError

Thresholds = tuple[Sequence[float] | None, Sequence[float] | None]
FILE = "golden_rows.npz"
# Tolerances relative to an answer near 1. fp16: four roundings to 11 bits; int8: to half a step;
# fp32: the tolerance between torch and ONNX at export.
ROUNDING = {"fp32": 1e-5, "fp16": 4 * 2**-11, "int8": 4 * 2**-8}
_SLACK = 4.0  # a guess: kernels of other providers round in other places
_FALSE_ALARMS = 1e-3  # fraction of starts refused for flips if rows flip independently
_ADVICE = "Run the certified files on a machine like the certified one, or run `slipway run` here."


class GoldenBudget(Contract):
    """Largest allowed differences of a variant from fp32 on the golden rows."""

    max_mean_difference: float  # absolute, of probabilities or in the target's unit
    max_mean_score_difference: float  # of the OOD scores
    max_flipped: int  # rows with another label; 0 for a numeric answer


class GoldenFile(Contract):
    """The entry in `bundle.json` for the golden rows: file, digest, and allowed differences."""

    file: str
    sha256: str
    bytes: int
    rows: int
    budgets: dict[str, GoldenBudget]  # by variant


class GoldenResult(Contract):
    """Differences of a variant's predictions from fp32's, measured on the golden rows."""

    rows: int
    max_difference: float
    mean_difference: float
    mean_score_difference: float
    flipped: list[str]  # ids
    worst_row: str  # id of the row with the largest difference
    budget: GoldenBudget


@dataclass(frozen=True)
class GoldenRows:
    """The golden rows, and the predictions of the fp32 graph for them on the CPU."""

    ids: list[str]
    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    answers: Answers


def golden_rows_bytes(rows: GoldenRows) -> bytes:
    """Serialise `golden_rows.npz`; equal rows give equal bytes."""
    stream = io.BytesIO()
    np.savez(
        stream,
        ids=np.array(rows.ids),
        inputs=rows.inputs,
        outputs=rows.answers.outputs,
        scores=rows.answers.scores,
    )
    return stream.getvalue()


def parse_golden_rows(payload: bytes, expected_rows: int) -> GoldenRows:
    """Parse the content of `golden_rows.npz`. Raises BundleError if it is malformed."""
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
            answers = Answers(arrays["outputs"], arrays["scores"])
            rows = GoldenRows(arrays["ids"].tolist(), arrays["inputs"], answers)
    except Exception as error:  # zipfile, zlib and numpy each have their own
        raise BundleError(
            f"{FILE} holds no golden rows: {error}. Run `dvc repro export`."
        ) from error
    lengths = {len(part) for part in (rows.ids, rows.inputs, *rows.answers)}
    if lengths != {expected_rows}:
        raise BundleError(
            f"{FILE} holds {sorted(lengths)} rows, bundle.json says {expected_rows}. "
            "Run `dvc repro export`."
        )
    return rows


def golden_budget(
    found: Answers, expected: Answers, precision: str, thresholds: Thresholds = (None, None)
) -> GoldenBudget:
    """Compute the allowed differences of a variant from fp32, from those measured at export.

    `found` are the variant's predictions on the CPU, `expected` those of fp32. The budget is four
    times the measured differences plus four roundings of the precision. A flipped label is one that
    differs from fp32's. The allowed number of flips is exceeded by chance in 1 of 1,000 starts at
    the measured rate, which Laplace's rule of succession keeps above 0.
    """
    outputs = expected.outputs
    spread, max_flipped = 1.0, 0
    if outputs.shape[1] > 1:
        num_flipped = len(flipped_rows(found.outputs, outputs, thresholds))
        max_flipped = _most_by_chance(len(outputs), (num_flipped + 1) / (len(outputs) + 2))
    else:
        spread = max(float(outputs.std()), float(np.abs(outputs).max()) / 100)
    rounding = ROUNDING[precision]
    difference = float(_distances(found.outputs, outputs).mean())
    score_difference = float(_distances(found.scores, expected.scores).mean())
    largest_score = float(np.abs(expected.scores).max())
    return GoldenBudget(
        max_mean_difference=_SLACK * difference + rounding * spread,
        max_mean_score_difference=_SLACK * score_difference + rounding * largest_score,
        max_flipped=max_flipped,
    )


def check_golden_rows(
    found: Answers,
    rows: GoldenRows,
    budget: GoldenBudget,
    thresholds: Thresholds = (None, None),
) -> GoldenResult:
    """Compare predictions for the golden rows with fp32's. Returns the differences.

    `thresholds` are the decision thresholds of the variant and of fp32, None without them. Raises
    ParityError, which names the worst row, if the differences exceed the budget.
    """
    expected = rows.answers
    shapes = [part.shape for part in found]
    expected_shapes = [part.shape for part in expected]
    if shapes != expected_shapes:
        raise ParityError(
            f"the golden rows were answered by {shapes}, expected {expected_shapes}. {_ADVICE}"
        )
    distances = _distances(found.outputs, expected.outputs)
    score_distances = _distances(found.scores, expected.scores)
    by_row = distances.max(axis=1)
    is_bad = ~np.isfinite(by_row + score_distances)
    if is_bad.any():
        first = rows.ids[int(is_bad.argmax())]
        raise ParityError(
            f"{is_bad.sum()} of {len(rows.ids)} golden rows were answered by NaN or an infinity, "
            f"the first is {first}. {_ADVICE}"
        )
    result = GoldenResult(
        rows=len(rows.ids),
        max_difference=float(by_row.max()),
        mean_difference=float(distances.mean()),
        mean_score_difference=float(score_distances.mean()),
        flipped=[
            rows.ids[row] for row in flipped_rows(found.outputs, expected.outputs, thresholds)
        ],
        worst_row=rows.ids[int(by_row.argmax())],
        budget=budget,
    )
    problems = _problems(result)
    if problems:
        raise ParityError(
            f"the golden rows were not answered as fp32 answers them: {'; '.join(problems)}. "
            f"Worst row: {result.worst_row}, off by {result.max_difference:.3g}. {_ADVICE}"
        )
    return result


def _problems(result: GoldenResult) -> list[str]:
    budget = result.budget
    compared = [
        ("mean difference {:.3g}", result.mean_difference, budget.max_mean_difference),
        (
            "mean difference of the OOD scores {:.3g}",
            result.mean_score_difference,
            budget.max_mean_score_difference,
        ),
        (f"{{:g}} of {result.rows} labels flipped", len(result.flipped), budget.max_flipped),
    ]
    return [
        f"{text.format(value)}, expected at most {most:.3g}"
        for text, value, most in compared
        if value > most
    ]


def _distances(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.abs(found.astype(np.float64) - expected)


def _most_by_chance(num_rows: int, rate: float) -> int:
    """Return the most flips to expect by chance in `num_rows` rows at a `rate` per row.

    It is the smallest number that is exceeded with a probability below _FALSE_ALARMS.
    """
    below = 0.0
    for count in range(num_rows):
        below += math.comb(num_rows, count) * rate**count * (1 - rate) ** (num_rows - count)
        if 1 - below < _FALSE_ALARMS:
            return count
    return num_rows
