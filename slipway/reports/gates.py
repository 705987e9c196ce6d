"""Gates: what is required of the test split as a whole, of every slice, and against the released model. One that is missed fails the stage.

The measured value itself is judged; its interval and its rows are told beside it, since few rows reach or miss a bound by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipway.artifacts.bundle import Metric
from slipway.config.sections import Gate
from slipway.metrics.scores import Resampling
from slipway.reports.console import interval, number
from slipway.reports.slice_scores import RowAnswers, SliceScores
from slipway.system.errors import GateMissedError, MetricError


@dataclass(frozen=True)
class GateResult:
    """One gate, what it asks for and what was measured."""

    name: str  # of the metric
    required: Gate
    measured: Metric
    where: str = ""  # the slice, or the comparison; "" for all test rows
    is_of_slice: bool = False
    remark: str = ""  # what else is to be known of the measurement

    @property
    def passed(self) -> bool:
        """Whether the measured value itself is within the bounds, both included; the interval is not judged."""
        least, most = self.required.min, self.required.max
        return (least is None or self.measured.value >= least) and (most is None or self.measured.value <= most)

    @property
    def requirement(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.required.min), ("at most", self.required.max))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def apply_gates(gates: dict[str, Gate], metrics: dict[str, Metric]) -> list[GateResult]:
    """Compare each gate with its metric; `slipway.config.params` has already refused names that are no metric.

    MetricError where the test rows do not define a metric that is asked for: such a gate is neither reached nor missed.
    """
    undefined = [name for name in gates if name not in metrics]
    if undefined:
        raise MetricError(
            f"evaluate.gates asks for {', '.join(undefined)}, which these test rows do not define: docs/metrics.md says when. "
            "Remove the gate, or use other test rows."
        )
    return [GateResult(name, gate, metrics[name]) for name, gate in gates.items()]


def apply_slice_gates(gates: dict[str, Gate], scores: SliceScores, answers: RowAnswers, resampling: Resampling) -> list[GateResult]:
    """Every gate on every slice that is judged, but where it does not define the metric (an area under a curve needs two classes).

    MetricError where no slice can be judged by a gate: it is neither reached nor missed.
    """
    if not gates:
        return []
    measured = [(score.title, answers.measure(score.members, list(gates), resampling)) for score in scores.judged]
    results = [
        GateResult(name, gate, metrics[name], where, is_of_slice=True)
        for name, gate in gates.items()
        for where, metrics in measured
        if name in metrics
    ]
    unjudged = sorted(set(gates).difference(result.name for result in results))
    if unjudged:
        raise MetricError(
            f"evaluate.slice_gates asks for {', '.join(unjudged)}, which none of {len(measured)} slices defines that have "
            "evaluate.slice_min_rows rows. Lower that, use more test rows, or remove the gate."
        )
    return results


def raise_missed(results: Sequence[GateResult]) -> None:
    """GateMissedError that names every missed gate."""
    missed = [result for result in results if not result.passed]
    if missed:
        raise GateMissedError(
            f"{len(missed)} of {len(results)} gates in evaluate missed:\n"
            + "\n".join(f"  {_line(gate)}" for gate in missed)
            + "\nreports/evaluate.html shows where it goes wrong. Train better, or ask for less in params.yaml."
        )


def _line(gate: GateResult) -> str:
    place = f" in {gate.where}" if gate.where else ""
    remark = f"; {gate.remark}" if gate.remark else ""
    return (
        f"{gate.name}{place} is {number(gate.measured.value)} ({gate.measured.confidence * 100:g} % interval {interval(gate.measured)}, "
        f"{gate.measured.rows} rows), required {gate.requirement}{remark}"
    )
