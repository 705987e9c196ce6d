"""Applies the quality gates: to the whole test split, every slice, and the reference comparison.

No gate fails a stage: the results go into a file of their own, and the certificate states whether
the model may be released. A gate compares the measured value with its bound. The interval and the
number of rows are recorded as well, because with few rows the outcome depends on chance.
"""

from collections.abc import Mapping

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import GateResult
from slipway.config.sections import EvaluateParams, Gate
from slipway.metrics.scores import Resampling, why_absent
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.evaluation.reference_comparison import reference_gate
from slipway.reports.evaluation.slice_scores import RowAnswers, SliceScores


def judge(
    evaluation: Evaluation, params: EvaluateParams, resampling: Resampling
) -> list[GateResult]:
    """Apply every gate in the params; the result of each is passed, missed or unjudged."""
    task, targets = evaluation.task, evaluation.targets
    absent = why_absent(task, targets, len(evaluation.classes), params.top_k)
    results = apply_gates(params.gates, evaluation.metrics, absent)
    if evaluation.slices is not None:
        answers = RowAnswers(
            task,
            targets,
            evaluation.outputs,
            params.top_k,
            evaluation.user_metrics,
            evaluation.thresholds,
        )
        results += apply_slice_gates(params.slice_gates, evaluation.slices, answers, resampling)
    if evaluation.reference:
        results.append(reference_gate(evaluation.reference, params.max_regression))
    return results


def apply_gates(
    gates: dict[str, Gate], metrics: dict[str, Metric], reasons: Mapping[str, str]
) -> list[GateResult]:
    """Compare each gate with its metric; `slipway.config.params` refuses unknown metrics.

    If a metric cannot be computed on the test rows, its gate is unjudged, with the reason.
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
            remark="" if name in metrics else reasons.get(name, "the test rows do not define it"),
        )
        for name, gate in gates.items()
    ]


def apply_slice_gates(
    gates: dict[str, Gate], scores: SliceScores, answers: RowAnswers, resampling: Resampling
) -> list[GateResult]:
    """Apply every gate to every judged slice on which its metric can be computed.

    An area under a curve, for example, needs two classes. A gate without any such slice is
    unjudged.
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
        results += [
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
            for where, metric, remark in found or [("slices", None, reason)]
        ]
    return results
