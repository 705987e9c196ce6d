"""Two answers to the same rows: are they still the same answer?

The certificate's rules made fit for a few rows, which have no accuracy. Where nothing may change (fp32 against torch, the
recorded answer against the same runtime now) every number has to be within 1e-5, as `verify.max_difference` asks of the test
rows. Of a variant that may cost accuracy the labels have to be equal; a number may be off by twice what it was off by on the test rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.certificate import Execution

MAX_DIFFERENCE = 1e-5
_MARGIN = 2.0  # of a difference that was measured on other rows, or in other batches
Answer = Mapping[str, NDArray[np.float32]]  # (rows, ...) by output name


@dataclass(frozen=True)
class AnswerTolerance:
    """How far an answer may be from the one it is compared with.

    `relative` is absolute on probabilities and relative to the largest number, where that is above 1, on values and scores;
    `absolute`, by output name, comes on top. Where `relative` is None only the outputs in `absolute` have a bound. Labels
    have to be equal but where the two best probabilities are within twice of `relative` and `absolute`.
    """

    relative: float | None
    absolute: Mapping[str, float]


@dataclass(frozen=True)
class BackendResult:
    """One way of answering the request."""

    name: str  # "decode", "torch", "onnxruntime/cpu/fp16", "tensorrt/fp16", "recorded", "service"
    status: Literal["reference", "equal", "parted", "not_executed"]
    reference: str = ""  # the hop that it is compared with
    difference: float | None = None  # the largest, absolute
    answered: str = ""  # labels, or values
    detail: str = ""  # why it parted, or was not executed


def exact(noise: Mapping[str, float]) -> AnswerTolerance:
    """Nothing may change, but for `noise`: how far a runtime's own answers differ between batch sizes, by output name."""
    return AnswerTolerance(
        MAX_DIFFERENCE, {name: _MARGIN * difference for name, difference in noise.items()}
    )


def of_variant(execution: Execution, measured: float | None) -> AnswerTolerance:
    """What a variant may be off by; `measured` is the largest difference that its certificate saw, where there is one."""
    if execution.variant in ("fp32", "weights"):
        return exact({})
    return AnswerTolerance(None, {} if measured is None else {"value": _MARGIN * measured})


def compare(
    name: str,
    found: Answer,
    reference: str,
    expected: Answer,
    tolerance: AnswerTolerance,
    output: OutputContract,
) -> BackendResult:
    """The hop `name`, which answered `found`, against the hop `reference`."""
    main = output.kind
    shown = describe(found[main], output)
    if found[main].shape != expected[main].shape:
        return BackendResult(
            name,
            "parted",
            reference,
            None,
            shown,
            f"answers of shape {found[main].shape}, expected {expected[main].shape}",
        )
    difference = largest_difference(found[main], expected[main])
    problems = _beyond(found, expected, tolerance) + _flipped(
        found[main], expected[main], tolerance, output
    )
    return BackendResult(
        name, "parted" if problems else "equal", reference, difference, shown, "; ".join(problems)
    )


def largest_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Absolute; infinite where one is not finite, or the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    differences = np.abs(found.astype(np.float64) - expected)
    return float(np.where(np.isfinite(differences), differences, np.inf).max())


def describe(outputs: NDArray[np.float32], output: OutputContract) -> str:
    """The label or value of the first rows."""
    if outputs.ndim != 2 or outputs.shape[1] != max(1, len(output.labels)):
        return f"shape {outputs.shape}"
    rows = [
        output.labels[int(row.argmax())] if output.labels else f"{row[0]:.7g}"
        for row in outputs[:3]
    ]
    return ", ".join(rows) + (", ..." if len(outputs) > len(rows) else "")


def _beyond(found: Answer, expected: Answer, tolerance: AnswerTolerance) -> list[str]:
    problems = []
    for name in found:
        if name not in expected:
            continue
        if not np.isfinite(found[name]).all():
            problems.append(f"{name} is not finite")
        elif tolerance.relative is not None or name in tolerance.absolute:
            scale = (
                1.0 if name == "probabilities" else max(1.0, float(np.abs(expected[name]).max()))
            )
            most = (tolerance.relative or 0.0) * scale + tolerance.absolute.get(name, 0.0)
            difference = largest_difference(found[name], expected[name])
            if not difference <= most:
                problems.append(
                    f"the largest difference of {name} is {difference:.3g}, expected at most {most:.3g}"
                )
    return problems


def _flipped(
    found: NDArray[np.float32],
    expected: NDArray[np.float32],
    tolerance: AnswerTolerance,
    output: OutputContract,
) -> list[str]:
    if not output.labels:
        return []
    tie = (
        0.0
        if tolerance.relative is None
        else 2 * (tolerance.relative + tolerance.absolute.get("probabilities", 0.0))
    )
    problems = []
    for row in np.flatnonzero(found.argmax(axis=1) != expected.argmax(axis=1)):
        best, now = int(expected[row].argmax()), int(found[row].argmax())
        if not expected[row, best] - expected[row, now] <= tie:
            place = f"row {row}: " if len(found) > 1 else ""
            problems.append(
                f"{place}the label is {output.labels[now]!r}, was {output.labels[best]!r}"
            )
    return problems[:3]
