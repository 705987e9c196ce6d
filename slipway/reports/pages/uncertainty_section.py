"""The section of the evaluation page on what answers are worth: reliability, sets or intervals, outliers, and what is left to a person."""

from slipway.artifacts.bundle import Metric
from slipway.reports.console import interval, number
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.reports.pages.charts import Series, line_chart
from slipway.reports.pages.html_page import Html, Section, beside, figure, join, paragraph, tiles

_NAMES = {
    "coverage": "Truth in the {what}",
    "set_size": "Labels in a set",
    "calibration_error": "Calibration error",
    "calibration_error_before": "Calibration error before",
    "log_loss_before": "Log loss before",
    "outliers": "Called outliers",
}


def calibration_section(worth: UncertaintyReport) -> Section:
    """Tiles, the reliability diagram of classes, and the error among the rows that are answered first."""
    boxes = tiles([_tile(worth, name, metric) for name, metric in worth.metrics.items()])
    marks = [paragraph(doubt, "bad") for doubt in worth.doubts]
    charts = [_risk(worth)] if worth.before is None else [_reliability(worth), _risk(worth)]
    return Section(
        "What the answers are worth",
        join([boxes, *marks, paragraph(in_words(worth), "note"), beside(charts)]),
    )


def _tile(worth: UncertaintyReport, name: str, metric: Metric) -> tuple[str, str, str]:
    what = "interval" if worth.before is None else "set"
    return _NAMES[name].format(what=what), number(metric.value), interval(metric)


def in_words(worth: UncertaintyReport) -> str:
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
        return f"{asked} Too few rows for evaluate.outlier_share {outlier.share:g}: no row is called an outlier."
    return f"{asked} Of ordinary rows at most {outlier.share:.1%} score above {number(outlier.threshold)} and are called outliers."


def _reliability(worth: UncertaintyReport) -> Html:
    assert worth.before is not None
    lines = [Series("ideal", [0.0, 1.0], [0.0, 1.0])]
    for name, probabilities in (("before", worth.before), ("after", worth.answers.outputs)):
        confidence, accuracy = worth.reliability(probabilities)
        lines.append(Series(name, confidence.tolist(), accuracy.tolist()))
    chart = line_chart(lines, "confidence", "accuracy")
    return figure(
        chart,
        "Reliability",
        "Below the ideal line the network is too sure of itself, above it too modest.",
    )


def _risk(worth: UncertaintyReport) -> Html:
    lines = [Series("score", *(axis.tolist() for axis in worth.risk_curve(worth.answers.scores)))]
    if worth.before is not None:
        lines.append(
            Series(
                "confidence",
                *(axis.tolist() for axis in worth.risk_curve(-worth.answers.outputs.max(axis=1))),
            )
        )
    what = "error rate" if worth.before is not None else "mean absolute error"
    first = "those with the lowest outlier score first"
    if len(lines) > 1:
        first = "the most confident first, or " + first
    chart = line_chart(lines, "share of rows answered", what)
    return figure(
        chart,
        "If the rest goes to a person",
        f"The error among the rows that are answered, {first}.",
    )
