"""Formats the console output of `evaluate`."""

from slipway.metrics.scores import why_absent
from slipway.reports.console import baseline_cells, interval, number, text_table
from slipway.reports.evaluation.record import Evaluation, baseline_words, headlines
from slipway.reports.evaluation.reference_comparison import ReferenceComparison
from slipway.reports.evaluation.slice_scores import SliceScores
from slipway.reports.evaluation.uncertainty import UncertaintyReport

_MAX_SLICES = 5


def evaluation_text(evaluation: Evaluation, top_k: int) -> str:
    """Format headline metrics, worse slices and the reference comparison, indented by two spaces.

    Metrics that the rows do not define are named with the reason.
    """
    task, report = evaluation.task, evaluation.uncertainty
    names, without_leaked = headlines(task), evaluation.without_leaked
    shown = {name: evaluation.metrics[name] for name in names}
    shown |= report.metrics if report else {}
    shown |= {
        f"{name}_without_leaked": without_leaked[name] for name in names if name in without_leaked
    }
    rows = [
        [
            name,
            number(metric.value),
            interval(metric),
            str(metric.rows),
            *baseline_cells(metric, evaluation.baseline.get(name)),
        ]
        for name, metric in shown.items()
    ]
    columns = ["metric", "value", "interval", "rows", "baseline", "difference"]
    lines = [text_table(columns, rows, "  ")]
    if evaluation.baseline:
        lines.append(f"  baseline: {baseline_words(task)}")
    if report:
        lines.append(f"  {uncertainty_text(report)}")
        lines += [f"  WARNING: {warning}" for warning in report.warnings]
    absent = why_absent(task, evaluation.targets, len(evaluation.classes), top_k)
    lines += [f"  no {name}: {reason}" for name, reason in absent.items()]
    if evaluation.slices:
        lines += _slices(evaluation.slices)
    if evaluation.reference:
        lines += _reference(evaluation.reference)
    return "\n".join(lines)


def _slices(scores: SliceScores) -> list[str]:
    num_small = len(scores.too_small)
    if not scores.judged:
        return [f"  all {num_small} slices have too few rows to be judged"] if num_small else []
    line = (
        f"  {len(scores.worse)} of {len(scores.judged)} slices are worse than the other rows; "
        f"{num_small} have too few rows"
    )
    rows = [
        [
            score.title,
            number(score.metric.value),
            interval(score.metric),
            str(score.metric.rows),
            f"{score.p_value:.3g}",
        ]
        for score in scores.worse[:_MAX_SLICES]
    ]
    columns = ["slice", scores.metric, "interval", "rows", "adjusted p"]
    return [line, text_table(columns, rows, "    ")] if rows else [line]


def _reference(reference: ReferenceComparison) -> list[str]:
    found = reference.difference
    left_out = reference.refused + (reference.known or 0)
    return [
        f"  against reference model {reference.version}: {found.metric} {number(found.before)} -> "
        f"{number(found.after)}, difference {found.difference:+.4g} "
        f"({found.low:+.4g} to {found.high:+.4g}), p = {reference.p_value:.3g}, "
        f"{found.rows} rows, {left_out} left out",
        f"  reference model: {reference.knowledge}",
    ]


def uncertainty_text(report: UncertaintyReport) -> str:
    """Describe the fitted parameters, and say if the validation rows were too few for them."""
    conformal, ood = report.calibration.conformal, report.calibration.outlier
    if report.before is not None:
        form = (
            f"Logits are divided by the temperature {number(report.calibration.temperature)}; "
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
        sentences.append(
            "These are too few rows for that coverage: use a larger validation split, "
            "or lower evaluate.coverage."
        )
    if ood.threshold is None:
        sentences.append(
            f"Too few rows for evaluate.ood_fraction {ood.share:g}: no row is flagged as OOD."
        )
    else:
        sentences.append(
            f"At most {ood.share:.1%} of ordinary rows have an OOD score above "
            f"{number(ood.threshold)} and are flagged."
        )
    return " ".join(sentences)
