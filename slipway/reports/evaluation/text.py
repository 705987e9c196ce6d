"""What `evaluate` prints: headline numbers, the slices that are worse, and how far from the released model."""

from slipway.metrics.scores import why_absent
from slipway.reports.console import baseline_cells, interval, number, text_table
from slipway.reports.evaluation.record import Evaluation, baseline_words, headlines
from slipway.reports.evaluation.reference_comparison import ReleasedComparison
from slipway.reports.evaluation.slice_scores import SliceScores
from slipway.reports.evaluation.uncertainty import UncertaintyReport

_MOST_SHOWN = 5


def evaluation_text(evaluation: Evaluation, top_k: int) -> str:
    """Lines that begin with two spaces, those too that tell which metrics the rows do not define, and why."""
    absent = why_absent(evaluation.task, evaluation.targets, len(evaluation.classes), top_k)
    first = [(name, evaluation.metrics[name]) for name in headlines(evaluation.task)]
    first += evaluation.worth.metrics.items() if evaluation.worth else ()
    first += [
        (f"{name}_without_leaked", evaluation.without_leaked[name])
        for name in headlines(evaluation.task)
        if name in evaluation.without_leaked
    ]
    rows = [
        [
            name,
            number(metric.value),
            interval(metric),
            str(metric.rows),
            *baseline_cells(metric, evaluation.baseline.get(name)),
        ]
        for name, metric in first
    ]
    lines = [
        text_table(["metric", "value", "interval", "rows", "baseline", "difference"], rows, "  ")
    ]
    lines += [f"  baseline: {baseline_words(evaluation.task)}"] if evaluation.baseline else []
    lines += [f"  {uncertainty_text(evaluation.worth)}"] if evaluation.worth else []
    lines += (
        [f"  WARNING: {doubt}" for doubt in evaluation.worth.doubts] if evaluation.worth else []
    )
    lines += [f"  no {name}: {reason}" for name, reason in absent.items()]
    lines += _slices(evaluation.slices) if evaluation.slices else []
    lines += _released(evaluation.released) if evaluation.released else []
    return "\n".join(lines)


def _slices(scores: SliceScores) -> list[str]:
    worse = scores.worse
    if not scores.judged:
        return (
            [f"  no slice has enough rows to be judged; {len(scores.too_small)} have too few"]
            if scores.too_small
            else []
        )
    lines = [
        f"  {len(worse)} of {len(scores.judged)} slices are worse than the other rows; {len(scores.too_small)} have too few rows"
    ]
    rows = [
        [
            score.title,
            number(score.metric.value),
            interval(score.metric),
            str(score.metric.rows),
            f"{score.p_value:.3g}",
        ]
        for score in worse[:_MOST_SHOWN]
    ]
    return (
        [
            *lines,
            text_table(["slice", scores.metric, "interval", "rows", "adjusted p"], rows, "    "),
        ]
        if rows
        else lines
    )


def _released(released: ReleasedComparison) -> list[str]:
    found = released.difference
    left_out = released.refused + (released.known or 0)
    return [
        f"  against released {released.version}: {found.metric} {number(found.before)} -> {number(found.after)}, difference "
        f"{found.difference:+.4g} ({found.low:+.4g} to {found.high:+.4g}), p = {released.p_value:.3g}, {found.rows} rows, "
        f"{left_out} left out",
        f"  of the released model: {released.knowledge}",
    ]


def uncertainty_text(worth: UncertaintyReport) -> str:
    """What was fitted and on how many rows, and what they were too few for."""
    conformal, outlier = worth.calibration.conformal, worth.calibration.outlier
    if worth.before is not None:
        made = f'Logits are divided by the temperature {number(worth.calibration.temperature)}; "before" is without it'
        made += f". A set has every label with a probability of at least {number(conformal.threshold or 0.0)}, and always the best"
    elif conformal.threshold is not None:
        made = f"An interval is the value +/- {number(conformal.threshold)}"
    else:
        made = "There are no intervals"
    asked = f"{made}, fitted on {conformal.rows} validation rows for a coverage of {conformal.coverage:g}."
    if conformal.is_vacuous:
        asked += " So few rows say nothing for that coverage: use a larger validation split, or ask for less in evaluate.coverage."
    if outlier.threshold is None:
        return f"{asked} Too few rows for evaluate.ood_fraction {outlier.share:g}: no row is called an outlier."
    return f"{asked} Of ordinary rows at most {outlier.share:.1%} score above {number(outlier.threshold)} and are called outliers."
