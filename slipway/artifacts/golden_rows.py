"""Canary rows: validation rows as the network takes them, with fp32's answers, that travel in the bundle as `canary.npz`.

Whatever runs a variant answers them before it serves. That finds another model's engine, NaN, overflow and swapped inputs
on the very machine; how good a model is, the certificate says. The file is numpy's own format, without pickle.
"""

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers
from slipway.system.contract import Contract
from slipway.system.errors import BundleError, ParityError

FILE = "canary.npz"
# Of an answer near 1: four roundings to fp16's 11 bits, or to half a step of int8. fp32: what export allows between torch and ONNX.
_ROUNDING = {"fp32": 1e-5, "fp16": 4 * 2**-11, "int8": 4 * 2**-8}
_SLACK = 4.0  # guess: kernels of another provider round in other places than those that the budget was measured with
_FALSE_ALARMS = 1e-3  # share of starts refused for flips alone, if the rows flipped independently


class CanaryBudget(Contract):
    """How far a variant may be from fp32 on the canary rows, whatever runs it."""

    max_mean_difference: float  # absolute, on probabilities or in the target's unit
    max_mean_score_difference: float  # of the outlier scores
    max_flipped: int  # rows whose label is another; 0 for a value, which has none


class Canary(Contract):
    """What `bundle.json` says of the canary rows."""

    file: str
    sha256: str
    bytes: int
    rows: int
    budgets: dict[str, CanaryBudget]  # by variant


class CanaryResult(Contract):
    """How the canary rows were answered."""

    rows: int
    max_difference: float
    mean_difference: float
    mean_score_difference: float
    flipped: list[str]  # ids
    worst_row: str  # id of the row with the largest difference
    budget: CanaryBudget


@dataclass(frozen=True)
class CanaryRows:
    """The rows themselves."""

    ids: list[str]
    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    answers: Answers  # fp32's, on the CPU


def canary_bytes(rows: CanaryRows) -> bytes:
    """The content of `canary.npz`: equal rows give equal bytes."""
    stream = io.BytesIO()
    np.savez(
        stream,
        ids=np.array(rows.ids),
        inputs=rows.inputs,
        outputs=rows.answers.outputs,
        scores=rows.answers.scores,
    )
    return stream.getvalue()


def parse_canary(payload: bytes, expected_rows: int) -> CanaryRows:
    """The rows in the content of `canary.npz`; BundleError if it holds something else."""
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
            rows = CanaryRows(
                arrays["ids"].tolist(),
                arrays["inputs"],
                Answers(arrays["outputs"], arrays["scores"]),
            )
    except Exception as error:  # zipfile, zlib and numpy each have their own
        raise BundleError(
            f"{FILE} holds no canary rows: {error}. Run `dvc repro export`."
        ) from error
    lengths = {len(part) for part in (rows.ids, rows.inputs, *rows.answers)}
    if lengths != {expected_rows}:
        raise BundleError(
            f"{FILE} holds {sorted(lengths)} rows, bundle.json says {expected_rows}. Run `dvc repro export`."
        )
    return rows


def canary_budget(found: Answers, expected: Answers, precision: str) -> CanaryBudget:
    """The budget of a variant that answered `found` to the canary rows on the CPU, where fp32 answered `expected`.

    Four times the difference that was measured, and four roundings of the precision on top. Flips: as many as come together in
    1 of 1,000 starts at the share that was measured (Laplace's rule of succession keeps it above 0).
    """
    outputs, largest_score = expected.outputs, float(np.abs(expected.scores).max())
    has_labels = outputs.shape[1] > 1
    spread = 1.0 if has_labels else max(float(outputs.std()), float(np.abs(outputs).max()) / 100)
    num_flipped = len(_flipped(found.outputs, outputs))
    return CanaryBudget(
        max_mean_difference=_SLACK * float(_distances(found.outputs, outputs).mean())
        + _ROUNDING[precision] * spread,
        max_mean_score_difference=_SLACK * float(_distances(found.scores, expected.scores).mean())
        + _ROUNDING[precision] * largest_score,
        max_flipped=_most_by_chance(len(outputs), (num_flipped + 1) / (len(outputs) + 2))
        if has_labels
        else 0,
    )


def check_canary(found: Answers, rows: CanaryRows, budget: CanaryBudget) -> CanaryResult:
    """How `found` differs from fp32's answers; ParityError, naming the worst row, where that is beyond the budget."""
    expected = rows.answers
    shapes = ([part.shape for part in found], [part.shape for part in expected])
    if shapes[0] != shapes[1]:
        raise ParityError(
            f"the canary rows were answered by {shapes[0]}, expected {shapes[1]}. {_ADVICE}"
        )
    distances, score_distances = (
        _distances(found.outputs, expected.outputs),
        _distances(found.scores, expected.scores),
    )
    of_rows = distances.max(axis=1)
    is_bad = ~np.isfinite(of_rows + score_distances)
    if is_bad.any():
        what = f"{is_bad.sum()} of {len(rows.ids)} canary rows were answered by NaN or an infinity"
        raise ParityError(f"{what}, the first is {rows.ids[int(is_bad.argmax())]}. {_ADVICE}")
    result = CanaryResult(
        rows=len(rows.ids),
        max_difference=float(of_rows.max()),
        mean_difference=float(distances.mean()),
        mean_score_difference=float(score_distances.mean()),
        flipped=[rows.ids[row] for row in _flipped(found.outputs, expected.outputs)],
        worst_row=rows.ids[int(of_rows.argmax())],
        budget=budget,
    )
    problems = _problems(result)
    if problems:
        worst = f"Worst row: {result.worst_row}, off by {result.max_difference:.3g}."
        raise ParityError(
            f"the canary rows were not answered as fp32 answers them: {problems}. {worst} {_ADVICE}"
        )
    return result


_ADVICE = "Run the certified files on a machine like the one that certified them, or run `dvc repro` here."


def _problems(result: CanaryResult) -> str:
    budget, problems = result.budget, []
    if result.mean_difference > budget.max_mean_difference:
        problems.append(
            f"mean difference {result.mean_difference:.3g}, expected at most {budget.max_mean_difference:.3g}"
        )
    if result.mean_score_difference > budget.max_mean_score_difference:
        most = budget.max_mean_score_difference
        problems.append(
            f"mean difference of the outlier scores {result.mean_score_difference:.3g}, expected at most {most:.3g}"
        )
    if len(result.flipped) > budget.max_flipped:
        problems.append(
            f"{len(result.flipped)} of {result.rows} labels flipped, expected at most {budget.max_flipped}"
        )
    return "; ".join(problems)


def _distances(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.abs(found.astype(np.float64) - expected)


def _flipped(found: NDArray[np.float32], expected: NDArray[np.float32]) -> list[int]:
    return np.flatnonzero(found.argmax(axis=1) != expected.argmax(axis=1)).tolist()


def _most_by_chance(num_rows: int, share: float) -> int:
    """The smallest count that is exceeded with a probability below `_FALSE_ALARMS`, where each row counts with probability `share`."""
    below = 0.0
    for count in range(num_rows):
        below += math.comb(num_rows, count) * share**count * (1 - share) ** (num_rows - count)
        if 1 - below < _FALSE_ALARMS:
            return count
    return num_rows
