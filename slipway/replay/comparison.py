"""Compares two answers to the same rows, by the certificate's rules adapted to a few rows.

Exact backends (fp32 against torch, the logged answer against the same runtime now) must agree
within 1e-5, like `verify.max_difference` on the test rows. Other variants must predict the same
labels; a numeric value may differ by twice its largest difference on the test rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.certificate import Execution

MAX_DIFFERENCE = 1e-5
_MARGIN = 2.0  # factor for differences that were measured on other rows or batches
Answer = Mapping[str, NDArray[np.float32]]  # (rows, ...) by output name


@dataclass(frozen=True)
class AnswerTolerance:
    """Largest allowed difference between two answers.

    `relative` bounds the difference of probabilities. For values and scores it is multiplied by the
    largest expected number if that is above 1. `absolute`, by output name, is added. If `relative`
    is None, only outputs in `absolute` are bounded. Labels must be equal unless the two best
    probabilities are within twice the sum of both.
    """

    relative: float | None
    absolute: Mapping[str, float]


@dataclass(frozen=True)
class BackendResult:
    """Status of one backend, and its largest difference from the reference."""

    name: str  # "decode", "torch", "onnxruntime/cpu/fp16", "tensorrt/fp16", "recorded", "service"
    status: Literal["reference", "equal", "diverged", "not_executed"]
    reference: str = ""  # the backend it is compared with
    difference: float | None = None  # largest, absolute
    answered: str = ""  # the labels or values in words
    detail: str = ""  # reason of a divergence, or of not running


def exact(noise: Mapping[str, float]) -> AnswerTolerance:
    """Allow MAX_DIFFERENCE plus `noise`: a runtime's own variation with the batch size."""
    return AnswerTolerance(
        MAX_DIFFERENCE, {name: _MARGIN * difference for name, difference in noise.items()}
    )


def of_variant(execution: Execution, measured: float | None) -> AnswerTolerance:
    """Return a variant's tolerance; `measured` is the largest difference in its certificate."""
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
    """Compare the backend `name`, which answered `found`, with the backend `reference`."""
    main = output.kind
    shown = describe(found[main], output)
    if found[main].shape != expected[main].shape:
        return BackendResult(
            name,
            "diverged",
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
        name, "diverged" if problems else "equal", reference, difference, shown, "; ".join(problems)
    )


def largest_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest absolute difference; infinite for non-finite numbers or other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    differences = np.abs(found.astype(np.float64) - expected)
    return float(np.where(np.isfinite(differences), differences, np.inf).max())


def describe(outputs: NDArray[np.float32], output: OutputContract) -> str:
    """Format the label or value of the first rows."""
    if outputs.ndim != 2 or outputs.shape[1] != max(1, len(output.labels)):
        return f"shape {outputs.shape}"
    rows = [_described(row, output) for row in outputs[:3]]
    return ", ".join(rows) + (", ..." if len(outputs) > len(rows) else "")


def _described(row: NDArray[np.float32], output: OutputContract) -> str:
    """Format the label with the largest probability, or the value."""
    if not output.labels:
        return f"{row[0]:.7g}"
    best = int(row.argmax())
    several = output.kind == "label_probabilities"
    return f"{output.labels[best]} {row[best]:.7g}" if several else output.labels[best]


def _beyond(found: Answer, expected: Answer, tolerance: AnswerTolerance) -> list[str]:
    problems = []
    for name in found:
        if name not in expected:
            continue
        if not np.isfinite(found[name]).all():
            problems.append(f"{name} is not finite")
        elif tolerance.relative is not None or name in tolerance.absolute:
            scale = (
                1.0
                if name.endswith("probabilities")
                else max(1.0, float(np.abs(expected[name]).max()))
            )
            most = (tolerance.relative or 0.0) * scale + tolerance.absolute.get(name, 0.0)
            difference = largest_difference(found[name], expected[name])
            if not difference <= most:
                problems.append(
                    f"the largest difference of {name} is {difference:.3g}, "
                    f"expected at most {most:.3g}"
                )
    return problems


def _flipped(
    found: NDArray[np.float32],
    expected: NDArray[np.float32],
    tolerance: AnswerTolerance,
    output: OutputContract,
) -> list[str]:
    # Multi-label thresholds differ between variants, so only probabilities are compared.
    if output.kind != "probabilities":
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
