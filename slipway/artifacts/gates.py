"""Quality gates: the result of each gate and the verdict over all of them.

`evaluate` writes them into `metrics/gates.json` and fails on none. `verify` copies them into the
certificate, where everything that serves, promotes, releases or packs a model reads them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from slipway.artifacts.bundle import Metric
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import SchemaError

Verdict = Literal["passed", "missed", "unjudged", "none"]  # none: params.yaml sets no gate


class GateResult(Contract):
    """One gate: its bounds, the measured value and the outcome."""

    name: str  # of the metric
    key: str  # in params.yaml: "evaluate.gates.accuracy"
    where: str  # the slice, or the comparison; "" for all test rows
    is_of_slice: bool
    min: float | None
    max: float | None
    measured: Metric | None  # null if the test rows do not define the metric
    remark: str  # a p-value, or the reason why nothing was measured

    @property
    def outcome(self) -> Literal["passed", "missed", "unjudged"]:
        """Outcome of the gate: "passed" if the measured value is within the bounds, ends included.

        The confidence interval does not count. Without a measured value, it is "unjudged".
        """
        if self.measured is None:
            return "unjudged"
        value = self.measured.value
        is_low = self.min is not None and value < self.min
        is_high = self.max is not None and value > self.max
        return "missed" if is_low or is_high else "passed"

    @property
    def requirement(self) -> str:
        """The bounds in words, such as "at least 0.9"."""
        bounds = (("at least", self.min), ("at most", self.max))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    @property
    def text(self) -> str:
        """The result as a line of text: metric, value, interval, bounds and key in params.yaml."""
        place = f" in {self.where}" if self.where else ""
        remark = f"; {self.remark}" if self.remark else ""
        required = f"required {self.requirement} ({self.key} in params.yaml){remark}"
        if self.measured is None:
            return f"{self.name}{place} is not defined, {required}"
        found = self.measured
        interval = f"{found.confidence * 100:g} % interval {found.low:.4g} to {found.high:.4g}"
        return (
            f"{self.name}{place} is {found.value:.4g} ({interval}, {found.rows} rows), {required}"
        )


class JudgedFile(Contract):
    """Name and digest of the metrics file whose numbers the gates judged."""

    path: str
    sha256: str


class GateReport(Contract):
    """The content of `metrics/gates.json`; DVC shows `gates` as a column and skips the lists."""

    gates: Verdict
    results: list[GateResult]
    judged: list[JudgedFile]

    @model_validator(mode="after")
    def _verdict_fits(self) -> Self:
        require_verdict(self.gates, self.results)
        return self


def verdict_of(results: Sequence[GateResult]) -> Verdict:
    """Return the worst outcome of all gates: "missed" before "unjudged" before "passed"."""
    outcomes = {result.outcome for result in results}
    for outcome in ("missed", "unjudged", "passed"):
        if outcome in outcomes:
            return outcome
    return "none"


def require_verdict(verdict: Verdict, results: Sequence[GateResult]) -> None:
    """Raise ValueError if a recorded verdict contradicts the recorded results."""
    if verdict != verdict_of(results):
        raise ValueError(f"gates is {verdict!r}, but the results say {verdict_of(results)!r}")


def not_passed(results: Sequence[GateResult]) -> list[GateResult]:
    """Return the gates that prevent a release: those that are missed or unjudged."""
    return [result for result in results if result.outcome != "passed"]


def gates_text(results: Sequence[GateResult]) -> str:
    """Return all gates as text for a terminal: one line, and one for each that did not pass."""
    if not results:
        return "  gates: none in params.yaml"
    failed = not_passed(results)
    lines = [f"  gates: {len(results) - len(failed)} of {len(results)} passed"]
    lines += [f"    {result.outcome}: {result.text}" for result in failed]
    if failed:
        lines.append(
            "  this model may be verified and compared; the service will not be ready with it"
        )
    return "\n".join(lines)


def write_gates(path: Path, results: Sequence[GateResult], judged: Path) -> None:
    """Write the results of gates on the numbers in `judged`."""
    judged_file = JudgedFile(path=judged.as_posix(), sha256=files.sha256_file(judged))
    report = GateReport(gates=verdict_of(results), results=list(results), judged=[judged_file])
    files.write_json(path, report.model_dump(mode="json"))


def read_gates(path: Path) -> GateReport:
    """Read `metrics/gates.json`. Raises SchemaError if it is missing or malformed."""
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro evaluate`.") from None
    return parse_record(GateReport, path, payload, SchemaError, "Run `dvc repro --force evaluate`.")
