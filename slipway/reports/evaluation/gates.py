"""Quality gates judged: requirements of the test split as a whole, of every slice, and against the released model.

No gate fails a stage: the results go into a file of their own, and the certificate says what may become of the model.
The measured value itself is judged; its interval and its rows stand beside it, because few rows reach or miss a bound by chance.
"""

from collections.abc import Mapping

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import GateResult
from slipway.config.sections import Gate
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.slice_scores import RowAnswers, SliceScores


def apply_gates(
    gates: dict[str, Gate], metrics: dict[str, Metric], why_absent: Mapping[str, str]
) -> list[GateResult]:
    """Compare each gate with its metric; `slipway.config.params` has already refused names of no metric.

    A metric that the test rows do not define leaves its gate unjudged, for the reason in `why_absent`.
    """
    return [
        GateResult(
            name=name,
            key=f"evaluate.gates.{name}",
            where="",
            is_of_slice=False,
            min=gate.min,
            max=gate.max,
            measured=metrics.get(name),
            remark=""
            if name in metrics
            else why_absent.get(name, "the test rows do not define it"),
        )
        for name, gate in gates.items()
    ]


def apply_slice_gates(
    gates: dict[str, Gate], scores: SliceScores, answers: RowAnswers, resampling: Resampling
) -> list[GateResult]:
    """Every gate on every judged slice that defines the metric (an area under a curve needs two classes).

    A gate that no slice can be judged by is unjudged.
    """
    if not gates:
        return []
    measured = [
        (score.title, answers.measure(score.members, list(gates), resampling))
        for score in scores.judged
    ]
    results = []
    for name, gate in gates.items():
        found: list[tuple[str, Metric | None, str]] = [
            (where, metrics[name], "") for where, metrics in measured if name in metrics
        ]
        reason = f"none of {len(measured)} slices with evaluate.slice_min_rows rows defines it"
        for where, metric, remark in found or [("slices", None, reason)]:
            results.append(
                GateResult(
                    name=name,
                    key=f"evaluate.slice_gates.{name}",
                    where=where,
                    is_of_slice=True,
                    min=gate.min,
                    max=gate.max,
                    measured=metric,
                    remark=remark,
                )
            )
    return results
