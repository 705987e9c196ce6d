"""The section of the evaluation page on what answers are worth: reliability, sets or intervals, outliers, and what is left to a person."""

from slipway.artifacts.bundle import Metric
from slipway.reports.console import interval, number
from slipway.reports.evaluation.text import uncertainty_text
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
        join([boxes, *marks, paragraph(uncertainty_text(worth), "note"), beside(charts)]),
    )


def _tile(worth: UncertaintyReport, name: str, metric: Metric) -> tuple[str, str, str]:
    what = "interval" if worth.before is None else "set"
    return _NAMES[name].format(what=what), number(metric.value), interval(metric)


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
