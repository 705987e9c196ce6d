"""Formats the console output of `evaluate`."""

from collections.abc import Mapping

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Calibration, OODThreshold
from slipway.kinds.registry import kind_of
from slipway.metrics.scores import why_absent
from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.evaluation.reference_comparison import ReferenceComparison
from slipway.reports.evaluation.slice_scores import SliceScores
from slipway.reports.evaluation.uncertainty import UncertaintyReport

_MAX_SLICES = 3
_VACUOUS = (
    "These are too few rows for that coverage: use a larger validation split, "
    "or lower evaluate.coverage."
)


def evaluation_text(evaluation: Evaluation, top_k: int | None) -> str:
    """Format headline metrics, warnings, the worst slice and the reference, one per line."""
    task, report = evaluation.task, evaluation.uncertainty
    target, without_leaked = kind_of(task).target, evaluation.without_leaked
    own = [metric.name for metric in evaluation.user_metrics]
    shown = {name: evaluation.metrics[name] for name in [*target.summary_metrics, *own]}
    if target.headline in without_leaked:
        shown[f"{target.headline}_without_leaked"] = without_leaked[target.headline]
    absent = why_absent(task, evaluation.targets, len(evaluation.classes), top_k)
    if top_k is None:
        absent.pop("top_k_accuracy", None)  # as requested
    metrics = [_metric(name, shown[name], evaluation.baseline) for name in shown]
    lines = ["; ".join(metrics + [f"no {name}: {reason}" for name, reason in absent.items()])]
    if report and (cost := report.metrics.get("cost")):
        found = f"cost of a row {number(cost.value)} ({interval(cost)})"
        lines.append(" ".join([f"{found};", *_decision_sentences(report)]))
    warnings = _warnings(report) if report else []
    if warnings:
        lines.append(f"WARNING: {' '.join(warnings)}")
    if evaluation.slices:
        lines += _slices(evaluation.slices)
    if evaluation.reference:
        lines.append(_reference(evaluation.reference))
    if evaluation.members:
        lines.append(evaluation.members.gain_text())
        if student := evaluation.members.student:
            lines.append(evaluation.members.student_text(student))
    return "\n".join(f"  {line}" for line in lines)


def _metric(name: str, metric: Metric, baseline: Mapping[str, float]) -> str:
    compared = f", baseline {number(baseline[name])}" if name in baseline else ""
    return f"{name} {number(metric.value)} ({interval(metric)}){compared}"


def _slices(scores: SliceScores) -> list[str]:
    num_small = len(scores.too_small)
    if not scores.judged:
        return [f"all {num_small} slices have too few rows to be judged"] if num_small else []
    worst = [
        f"{score.title}: {_metric(scores.metric, score.metric, {})}"
        for score in scores.worse[:_MAX_SLICES]
    ]
    return [
        f"{len(scores.worse)} of {len(scores.judged)} slices are worse than the other rows; "
        + "; ".join([*worst, f"{num_small} have too few rows"])
    ]


def _reference(reference: ReferenceComparison) -> str:
    found = reference.difference
    left_out = reference.refused + (reference.known or 0)
    return (
        f"against reference model {reference.version}: {found.metric} {number(found.before)} -> "
        f"{number(found.after)}, difference {found.difference:+.4g} "
        f"({found.low:+.4g} to {found.high:+.4g}), p = {reference.p_value:.3g}, "
        f"{found.rows} rows, {left_out} left out; {reference.knowledge}"
    )


def _warnings(report: UncertaintyReport) -> list[str]:
    vacuous, ood = report.calibration.conformal.is_vacuous, report.calibration.ood
    return [*report.warnings, *[_VACUOUS] * vacuous, *[_no_ood(ood)] * (ood.threshold is None)]


def uncertainty_text(report: UncertaintyReport) -> str:
    """Describe the fitted parameters, and say if the validation rows were too few for them."""
    conformal, ood = report.calibration.conformal, report.calibration.ood
    if report.before is not None:
        form = (
            f"Logits are divided by {temperature_text(report.calibration)}; "
            '"before" is without it. A set has every label with a probability of at least '
            f"{number(conformal.threshold or 0.0)}, and always the best"
        )
    elif conformal.threshold is not None:
        form = f"An interval is the value +/- {number(conformal.threshold)}"
    else:
        form = "There are no intervals"
    sentences = [
        f"{form}, fitted on {conformal.rows} validation rows "
        f"for a coverage of {conformal.coverage:g}."
    ]
    if conformal.is_vacuous:
        sentences.append(_VACUOUS)
    sentences += _decision_sentences(report)
    if ood.threshold is None:
        sentences.append(_no_ood(ood))
    else:
        sentences.append(
            f"At most {ood.fraction:.1%} of ordinary rows have an OOD score above "
            f"{number(ood.threshold)} and are flagged."
        )
    return " ".join(sentences)


def _decision_sentences(report: UncertaintyReport) -> list[str]:
    rule, thresholds = report.calibration.decision, report.calibration.thresholds
    if rule is None or thresholds is None:
        return []
    aim = "has the largest F1" if rule.costs is None else "costs least"
    found = [
        f"The answer is {rule.positive!r} from the probability "
        f"{number(thresholds[rule.place])} on, which {aim} on {rule.rows} validation rows."
    ]
    if rule.abstain_between:
        low, high = map(number, rule.abstain_between)
        found.append(f"From {low} to below {high} it is left to a person.")
    if (constant := report.cheapest_constant) is not None:
        found.append(f"The cheapest answer that never changes costs {number(constant)} a row.")
    return found


def temperature_text(calibration: Calibration) -> str:
    """Return the temperature as text, or the range of the labels' temperatures."""
    factor = calibration.temperature
    if isinstance(factor, float):
        return f"the temperature {number(factor)}"
    return f"a temperature for each label, {number(min(factor))} to {number(max(factor))}"


def _no_ood(ood: OODThreshold) -> str:
    return f"Too few rows for evaluate.ood_fraction {ood.fraction:g}: no row is flagged as OOD."
