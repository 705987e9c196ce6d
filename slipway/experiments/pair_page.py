"""The page of `slipway compare A B --html`: charts of two experiments side by side."""

import numpy as np

from slipway.experiments.answers import ExperimentAnswers
from slipway.experiments.pair import ExperimentPair
from slipway.experiments.records import ExperimentRecord
from slipway.kinds.registry import kind_of
from slipway.metrics.class_scores import class_scores, confusion_matrix, count_classes
from slipway.reports.pages.charts import BarGroup, Series, bar_groups, line_chart, scatter
from slipway.reports.pages.html_page import (
    Html,
    beside,
    figure,
    page,
    paragraph,
    section,
    table,
)
from slipway.reports.pages.intervals import IntervalRow, interval_chart
from slipway.reports.pages.sections.classes import confusion_picture

_MAX_POINTS = 200  # drawn of a curve
_MAX_DOTS = 2000
_MAX_BARS = 20  # classes


def pair_page(pair: ExperimentPair) -> str:
    """Return the HTML page; charts of predictions or curves that are not stored are left out."""
    first, second = pair.answers
    sections: list[Html | None] = [_results(pair), _params(pair), _curves(pair)]
    if first and second and (first.task, first.classes) == (second.task, second.classes):
        target = kind_of(first.task).target
        build = _class_sections if target.has_classes else _number_sections
        if not target.several:
            sections += build(pair, first, second)
    return page(f"{pair.first.name} and {pair.second.name}", "Two experiments", sections)


def _results(pair: ExperimentPair) -> Html:
    rows = {}
    for record in (pair.first, pair.second):
        if record.results and record.results.metric:
            is_bad = record.results.gates in ("missed", "unjudged")
            rows[record.name] = IntervalRow(record.results.metric, is_bad, record.results.baseline)
    columns, cells = pair.cells()
    facts = [[record.name, record.ended, *_facts(record)] for record in (pair.first, pair.second)]
    return section(
        "Results",
        interval_chart(rows, "the trivial baseline on the same rows") if rows else None,
        table(columns, cells, numeric=[columns[1], columns[3], "difference", "paired interval"]),
        paragraph(pair.note, "note"),
        table(["experiment", "status", "seconds", "gates", "certificate"], facts, ["seconds"]),
    )


def _facts(record: ExperimentRecord) -> list[str]:
    results = record.results
    seconds = "" if record.seconds is None else f"{record.seconds:.0f}"
    return [seconds, *([results.gates, results.certificate] if results else ["", ""])]


def _params(pair: ExperimentPair) -> Html:
    if not pair.changed:
        return section("Changed params", paragraph("Both have the same params.", "soft"))
    return section("Changed params", table(["param", *pair.names], pair.changed))


def _curves(pair: ExperimentPair) -> Html | None:
    """Draw the validation curves of both experiments in one chart."""
    lines: dict[str, list[Series]] = {}
    for name, found in zip(pair.names, pair.answers, strict=True):
        for metric, curves in (found.curves if found else {}).items():
            lines.setdefault(metric, []).extend(
                Series(name, curve.x, curve.y) for curve in curves if curve.name == "val"
            )
    charts = [
        line_chart(curves, "epoch", f"val {metric}".replace("_", " "))
        for metric, curves in lines.items()
        if curves
    ]
    return section("Training", beside(charts)) if charts else None


def _class_sections(
    pair: ExperimentPair, first: ExperimentAnswers, second: ExperimentAnswers
) -> list[Html]:
    classes, both = first.classes, (first, second)
    matrices = [confusion_matrix(found.targets, found.predicted, len(classes)) for found in both]
    old, new = (class_scores(count_classes(matrix)).f1 for matrix in matrices)
    rows = [
        [name, f"{old[k]:.4f}", f"{new[k]:.4f}", f"{new[k] - old[k]:+.4f}"]
        for k, name in enumerate(classes)
    ]
    largest = np.argsort(-np.abs(new - old), kind="stable")
    groups = [
        BarGroup(classes[k], dict(zip(pair.names, (old[k], new[k]), strict=True)), rows[k][-1])
        for k in largest[:_MAX_BARS]
    ]
    columns = ["class", *pair.names, "difference"]
    note = "F1 of each class, the largest difference first; the table has the order of the classes."
    pictures = [
        figure(confusion_picture(matrix, classes), name, "Row: actual class. Column: predicted.")
        for name, matrix in zip(pair.names, matrices, strict=True)
    ]
    curves = [
        Series(name, *_accuracy_curve(found)) for name, found in zip(pair.names, both, strict=True)
    ]
    return [
        section(
            "Classes",
            bar_groups(groups, pair.names, "F1 of each class in both experiments"),
            table(columns, rows, numeric=columns[1:]),
            paragraph(note, "note"),
        ),
        section("Confusion matrices", beside(pictures)),
        section(
            "Rejecting uncertain rows",
            line_chart(curves, "fraction of rows answered", "accuracy"),
            paragraph("Accuracy of the most confident rows.", "note"),
        ),
    ]


def _accuracy_curve(found: ExperimentAnswers) -> tuple[list[float], list[float]]:
    order = np.argsort(-found.outputs.max(axis=1), kind="stable")
    is_right = (found.predicted == found.targets)[order]
    accuracies = is_right.cumsum() / np.arange(1, len(order) + 1)
    first = max(len(order) // 100, 1) - 1
    places = np.unique(np.linspace(first, len(order) - 1, _MAX_POINTS).astype(np.int64))
    return ((places + 1) / len(order)).tolist(), accuracies[places].tolist()


def _number_sections(
    pair: ExperimentPair, first: ExperimentAnswers, second: ExperimentAnswers
) -> list[Html]:
    charts = []
    for name, found in zip(pair.names, (first, second), strict=True):
        step = max(len(found.ids) // _MAX_DOTS, 1)
        values = found.outputs[::step, 0].astype(np.float64)
        charts.append(
            figure(
                scatter(found.targets[::step], values, "target", "prediction"),
                name,
                f"{len(values):,} of {len(found.ids):,} test rows",
            )
        )
    return [section("Predictions against targets", beside(charts))]
