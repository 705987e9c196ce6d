"""Builds the evaluation page's section on uncertainty."""

import numpy as np
from numpy.typing import NDArray

from slipway.reports.console import interval, number
from slipway.reports.evaluation.text import uncertainty_text
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.reports.pages.charts import Series, line_chart
from slipway.reports.pages.html_page import Html, beside, figure, paragraph, section, tiles

_NAMES = {
    "coverage": "Coverage of the {form}s",
    "set_size": "Labels per set",
    "calibration_error": "Calibration error",
    "calibration_error_before": "Calibration error before",
    "log_loss_before": "Log loss before",
    "cost": "Cost of a row",
    "abstained": "Left to a person",
    "ood_fraction": "Flagged as OOD",
}


def uncertainty_section(report: UncertaintyReport) -> Html:
    """Show the metrics, the reliability diagram of classes, and the error by rejection rate."""
    form = "interval" if report.before is None else "set"
    boxes = tiles(
        [
            (_NAMES[name].format(form=form), number(metric.value), interval(metric))
            for name, metric in report.metrics.items()
        ]
    )
    warnings = [paragraph(warning, "bad") for warning in report.warnings]
    charts = [_rejection(report)]
    if report.before is not None:
        charts.insert(0, _reliability(report, report.before))
    note = paragraph(uncertainty_text(report), "note")
    return section("Uncertainty", boxes, *warnings, note, beside(charts))


def _reliability(report: UncertaintyReport, before: NDArray[np.float32]) -> Html:
    lines = [Series("ideal", [0.0, 1.0], [0.0, 1.0])]
    for name, probabilities in (("before", before), ("after", report.answers.outputs)):
        bins = report.reliability_bins(probabilities)
        confidences, accuracies = [one.confidence for one in bins], [one.accuracy for one in bins]
        lines.append(Series(name, confidences, accuracies))
    detail = "Below the ideal line the network is overconfident, above it underconfident."
    return figure(line_chart(lines, "confidence", "accuracy"), "Reliability", detail)


def _rejection(report: UncertaintyReport) -> Html:
    doubts: dict[str, NDArray[np.floating]] = {"score": report.answers.scores}
    if report.before is None:
        error, order = "mean absolute error", "Rows with the lowest OOD score come first."
    else:
        doubts["confidence"] = -report.certainty
        error, order = (
            "error rate",
            "The most confident rows, or those with the lowest OOD score, come first.",
        )
    lines = []
    for name, doubt in doubts.items():
        fractions, risks = report.risk_curve(doubt)
        lines.append(Series(name, fractions.tolist(), risks.tolist()))
    chart = line_chart(lines, "fraction of rows answered", error)
    detail = f"Error of the answered rows if the model rejects the rest. {order}"
    return figure(chart, "Rejecting uncertain rows", detail)
