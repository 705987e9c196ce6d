"""Builds `reports/evaluate.html`: from the headline to the worst errors and least certain rows."""

from collections.abc import Sequence

import numpy as np

from slipway.artifacts.gates import GateResult, not_passed
from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.reports.console import baseline_cells, interval, number
from slipway.reports.evaluation.record import Evaluation, baseline_words, headlines
from slipway.reports.pages.charts import Series, histogram, line_chart, residuals, scatter
from slipway.reports.pages.html_page import (
    Html,
    PageSection,
    beside,
    figure,
    gallery,
    heat_map,
    image,
    join,
    page,
    paragraph,
    table,
    tiles,
)
from slipway.reports.pages.shown_cells import shown_cells
from slipway.reports.pages.slices_page import slices_section
from slipway.reports.pages.uncertainty_section import uncertainty_section

_CLASSIFICATION_METHOD = (
    "by Wilson's method for fractions of correct rows, by bootstrap for the others, "
    "which leaves a perfect score no width"
)
_REGRESSION_METHOD = "by bootstrap"
_METRIC_NAMES = {
    "mse": "MSE",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "roc_auc": "ROC-AUC",
    "top_k_accuracy": "Top-k accuracy",
    "rmse growth": "RMSE growth",
}
_NUM_SHOWN = 12  # rows in a gallery
_ID_DIGITS = 8  # enough to find a row in predictions.parquet
_MAX_CLASSES = 30  # in a heat map with readable numbers
_MAX_ROWS = 50  # in the table of classes
_MAX_PAIRS = 10
_MAX_DOTS = 3000


def evaluation_page(
    evaluation: Evaluation,
    gates: Sequence[GateResult],
    inputs: Inputs,
    contract: InputContract,
    curves: dict[str, list[Series]],
    about: str,
) -> str:
    """Build the page.

    Args:
        inputs: (N, ...) the test rows in the evaluation's order, as `contract` says.
        curves: lines of the training by name.
        about: one line that says what was evaluated.
    """
    sections = [_headline(evaluation), *_leaks(evaluation), _gates(gates), *_reference(evaluation)]
    if scores := evaluation.slices:
        sections.append(slices_section(scores, evaluation.metrics[scores.metric]))
    if evaluation.uncertainty:
        sections.append(uncertainty_section(evaluation.uncertainty))
    if evaluation.is_classification:
        sections += [_classes(evaluation), _confusion(evaluation)]
    else:
        sections += [_values(evaluation), *_by_target(evaluation)]
    sections += [
        _worst(evaluation, inputs, contract),
        *_least_certain(evaluation, inputs, contract),
        _training(curves),
        _all_metrics(evaluation),
    ]
    return page("Evaluation on the test split", about, sections)


def _headline(evaluation: Evaluation) -> PageSection:
    named = {name: evaluation.metrics[name] for name in headlines(evaluation.task)}
    baselines = {name: f"; baseline {number(value)}" for name, value in evaluation.baseline.items()}
    boxes = tiles(
        [
            (_words(name), number(metric.value), interval(metric) + baselines.get(name, ""))
            for name, metric in named.items()
        ]
    )
    first = next(iter(named.values()))
    method = _CLASSIFICATION_METHOD if evaluation.is_classification else _REGRESSION_METHOD
    note = (
        f"{first.rows} test rows, each counted once. Below each number is its "
        f"{first.confidence * 100:g} % interval, {method}."
    )
    if evaluation.baseline:
        note += f" Baseline: {baseline_words(evaluation.task)}."
    return PageSection("Headline", join([boxes, paragraph(note, "note")]))


def _leaks(evaluation: Evaluation) -> list[PageSection]:
    if not evaluation.num_leaked:
        return []
    title, without = "Without leaked rows", evaluation.without_leaked
    leaked = (
        f"{evaluation.num_leaked} of {len(evaluation.targets)} test rows have a near duplicate or "
        "their group in another split, or are not later than it"
    )
    if not without:
        text = f"{leaked}; too few are left to measure without them."
        return [PageSection(title, paragraph(text, "bad"))]
    rows = [
        [
            _words(name),
            number(without[name].value),
            interval(without[name]),
            number(evaluation.metrics[name].value),
        ]
        for name in headlines(evaluation.task)
    ]
    columns = ["metric", "without them", "interval", "with them"]
    text = (
        f"{leaked}. reports/split.json says which splits share what. "
        "The gates judge the numbers with them."
    )
    shown = table(columns, rows, numeric=["without them", "with them"])
    return [PageSection(title, join([paragraph(text, "bad"), shown]))]


def _gates(gates: Sequence[GateResult]) -> PageSection:
    if not gates:
        text = "None: evaluate.gates in params.yaml is empty, so nothing is required of this model."
        return PageSection("Gates", paragraph(text, "soft"))
    failed = not_passed(gates)
    if failed:
        text = (
            f"{len(failed)} of {len(gates)} missed or unjudged. "
            "The service will not be ready with this model."
        )
        parts = [paragraph(text, "bad")]
    else:
        parts = [paragraph(f"{len(gates)} of {len(gates)} passed", "good")]
    shown = [gate for gate in gates if not (gate.outcome == "passed" and gate.is_of_slice)]
    columns = ["result", "metric", "of", "measured", "required", "interval", "rows"]
    if shown:
        rows = [_gate_row(gate) for gate in shown]
        parts.append(table(columns, rows, numeric=["measured", "rows"]))
    if num_hidden := len(gates) - len(shown):
        text = f"The {num_hidden} gates on slices that passed are not listed; see the slices below."
        parts.append(paragraph(text, "note"))
    return PageSection("Gates", join(parts))


def _gate_row(gate: GateResult) -> list[str]:
    found = gate.measured
    return [
        f"{'✓' if gate.outcome == 'passed' else '✗'} {gate.outcome}",
        _words(gate.name),
        gate.where or "all test rows",
        number(found.value) if found else "",
        gate.requirement,
        interval(found) if found else gate.remark,
        str(found.rows) if found else "",
    ]


def _reference(evaluation: Evaluation) -> list[PageSection]:
    reference = evaluation.reference
    if reference is None:
        return []
    found, name = reference.difference, _words(reference.difference.metric)
    bounds = f"{number(found.low)} to {number(found.high)}, p = {reference.p_value:.3g}"
    place = f"{reference.folder}, {reference.version}"
    boxes = tiles(
        [
            (f"{name}, reference model", number(found.before), place),
            (f"{name}, now", number(found.after), f"on the same {found.rows} rows"),
            ("Difference", f"{found.difference:+.4g}", bounds),
        ]
    )
    note = (
        "Both models answered the same rows; the interval is that of the difference. "
        f"Reference model: {reference.knowledge}."
    )
    if reference.refused:
        note += f" It does not take {reference.refused} test rows, which are left out."
    if reference.known:
        note += f" The {reference.known} test rows that it knows are left out."
    return [PageSection("Against the reference model", join([boxes, paragraph(note, "note")]))]


def _classes(evaluation: Evaluation) -> PageSection:
    scores, counts = evaluation.per_class, evaluation.confusion.sum(axis=1)
    title, order = "Classes", np.arange(len(evaluation.classes))
    if len(order) > _MAX_ROWS:
        title = f"The {_MAX_ROWS} weakest of {len(order)} classes"
        order = np.argsort(scores.f1, kind="stable")[:_MAX_ROWS]
    rows = [
        [
            evaluation.classes[k],
            str(counts[k]),
            *(f"{values[k]:.4f}" for values in (scores.precision, scores.recall, scores.f1)),
        ]
        for k in order
    ]
    columns = ["class", "rows", "precision", "recall", "F1"]
    shown = table(columns, rows, numeric=columns[1:])
    return PageSection(title, beside([shown, _confused_pairs(evaluation)]))


def _confused_pairs(evaluation: Evaluation) -> Html:
    errors = evaluation.confusion * ~np.eye(len(evaluation.classes), dtype=bool)
    actual, predicted = np.nonzero(errors)
    counts = errors[actual, predicted]
    if not len(counts):
        return paragraph("No row has a wrong label.", "good")
    rows = [
        [evaluation.classes[actual[i]], evaluation.classes[predicted[i]], str(counts[i])]
        for i in np.argsort(-counts, kind="stable")[:_MAX_PAIRS]
    ]
    return table(["actual", "predicted as", "rows"], rows, numeric=["rows"])


def _confusion(evaluation: Evaluation) -> PageSection:
    matrix, classes = evaluation.confusion, evaluation.classes
    note = (
        "Row: the actual class. Column: the predicted class. "
        "The colour is the fraction of the row, on a square-root scale."
    )
    if len(classes) <= _MAX_CLASSES:
        picture = heat_map(matrix, classes)
    else:
        fractions = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))
        pixels = np.rint(255 * fractions).astype(np.uint8)
        picture = image(pixels, f"Confusion matrix of {len(classes)} classes")
    return PageSection("Confusion matrix", join([picture, paragraph(note, "note")]))


def _values(evaluation: Evaluation) -> PageSection:
    targets, values = evaluation.targets, evaluation.predictions
    shown = np.unique(np.linspace(0, len(targets) - 1, _MAX_DOTS).astype(np.int64))
    some, errors = targets[shown], values - targets
    predictions = figure(
        scatter(some, values[shown], "target", "prediction"),
        "Prediction against target",
        f"{len(shown)} of {len(targets)} rows; predictions on the dashed line are correct.",
    )
    trend = figure(
        residuals(some, errors[shown], "target", "prediction - target"),
        "Error against target",
        "A slope means that small targets are overestimated and large ones underestimated.",
    )
    distribution = figure(
        histogram(errors, "prediction - target"),
        "Errors",
        f"All {len(targets)} rows; right of 0 the prediction is too large.",
    )
    return PageSection("Predictions", beside([predictions, trend, distribution]))


def _by_target(evaluation: Evaluation) -> list[PageSection]:
    if not evaluation.target_errors:
        return []
    rows = []
    for entry in evaluation.target_errors:
        row = [f"{number(entry.low)} to {number(entry.high)}", str(entry.rmse.rows)]
        for metric in (entry.mean_error, entry.mae, entry.rmse):
            row += [number(metric.value), interval(metric)]
        rows.append(row)
    numeric = ["rows", "mean error", "MAE", "RMSE"]
    columns = ["target", "rows"]
    for name in numeric[1:]:
        columns += [name, "its interval"]
    note = (
        "The ranges have about equal numbers of rows. "
        "If the mean error is above 0, predictions are too large."
    )
    shown = table(columns, rows, numeric=numeric)
    return [PageSection("Errors by target", join([shown, paragraph(note, "note")]))]


def _worst(evaluation: Evaluation, inputs: Inputs, contract: InputContract) -> PageSection:
    rows, num_rows = evaluation.worst(_NUM_SHOWN), len(evaluation.targets)
    if not rows:
        return PageSection("Worst errors", paragraph(f"None in {num_rows} rows.", "good"))
    which, what = f"{len(rows)} of {num_rows} rows", "targets"
    if evaluation.is_classification:
        num_wrong = int((evaluation.predictions != evaluation.targets).sum())
        which, what = f"{len(rows)} of {num_wrong} wrong rows", "labels"
    note = (
        f"{which}, the largest loss first{_as_seen(contract)}. "
        f"Look for wrong {what} here before you look for a better network."
    )
    shown = _exhibits(evaluation, inputs, contract, rows)
    return PageSection("Worst errors", join([shown, paragraph(note, "note")]))


def _least_certain(
    evaluation: Evaluation, inputs: Inputs, contract: InputContract
) -> list[PageSection]:
    rows = evaluation.least_certain(_NUM_SHOWN)
    if not rows:
        return []
    num_wrong = sum(evaluation.predictions[row] != evaluation.targets[row] for row in rows)
    note = (
        f"The {len(rows)} rows whose two best classes have the closest probabilities, "
        f"right or wrong{_as_seen(contract)}; {num_wrong} of them are wrong. "
        "Labelling more rows like these improves a network more than labelling others."
    )
    shown = _exhibits(evaluation, inputs, contract, rows)
    return [PageSection("Least certain", join([shown, paragraph(note, "note")]))]


def _as_seen(contract: InputContract) -> str:
    return ", as the network sees them" if input_kind(contract.kind).has_pixels else ""


def _exhibits(
    evaluation: Evaluation, inputs: Inputs, contract: InputContract, rows: Sequence[int]
) -> Html:
    """Show images with captions, or the cells of a table's rows."""
    captions = {row: _caption(evaluation, row) for row in rows}
    names = {row: f"{evaluation.sources[row]} ({evaluation.ids[row][:_ID_DIGITS]})" for row in rows}
    if input_kind(contract.kind).has_pixels:
        return gallery(
            figure(
                image(inputs[row], evaluation.sources[row]),
                answer,
                f"{certainty}, {names[row]}" if certainty else names[row],
            )
            for row, (answer, certainty) in captions.items()
        )
    columns, cells, numbers = shown_cells(contract, [inputs[row] for row in rows])
    lines = []
    for (row, (answer, certainty)), texts in zip(captions.items(), cells, strict=True):
        text = f"{answer}, {certainty}" if certainty else answer
        lines.append([text, names[row], *texts])
    return table(["answer", "row", *columns], lines, numeric=numbers)


def _caption(evaluation: Evaluation, row: int) -> tuple[str, str]:
    """Describe the answer to a row, and its certainty if it is a class."""
    target, prediction = evaluation.targets[row], evaluation.predictions[row]
    if not evaluation.is_classification:
        return f"{number(prediction)} instead of {number(target)}", ""
    classes, outputs = evaluation.classes, evaluation.outputs[row]
    predicted, confidence = classes[int(prediction)], outputs.max()
    if target == prediction:
        second = int(np.argsort(-outputs, kind="stable")[1])
        certainty = f"{confidence:.1%} against {outputs[second]:.1%} for {classes[second]}"
        return f"{predicted}, correct", certainty
    answer = f"{classes[int(target)]} predicted as {predicted}"
    return answer, f"{outputs[int(target)]:.1%} against {confidence:.1%}"


def _training(curves: dict[str, list[Series]]) -> PageSection:
    if not curves:
        return PageSection("Training", paragraph("No curves were logged.", "soft"))
    most_lines_first = sorted(curves.items(), key=lambda curve: (-len(curve[1]), curve[0]))
    charts = (line_chart(lines, "epoch", _title(name, lines)) for name, lines in most_lines_first)
    return PageSection("Training", beside(charts))


def _title(name: str, lines: list[Series]) -> str:
    """Name a chart. A single line has no legend, so its title says if it is train or val."""
    is_single = len(lines) == 1 and lines[0].name != name
    return (f"{lines[0].name} {name}" if is_single else name).replace("_", " ")


def _all_metrics(evaluation: Evaluation) -> PageSection:
    columns = ["metric", "value", "low", "high", "rows", "baseline", "difference"]
    rows = [
        [
            _words(name),
            *map(number, (metric.value, metric.low, metric.high)),
            str(metric.rows),
            *baseline_cells(metric, evaluation.baseline.get(name)),
        ]
        for name, metric in evaluation.metrics.items()
    ]
    return PageSection("All metrics", table(columns, rows, numeric=columns[1:]))


def _words(name: str) -> str:
    """Name a metric: "f1_macro" -> "F1, macro", "rmse" -> "RMSE", "log_loss" -> "Log loss"."""
    first, *averaged = name.split("_")
    is_averaged = averaged in (["macro"], ["micro"], ["weighted"])
    words = (", " if is_averaged else " ").join([first, *averaged]).capitalize()
    return _METRIC_NAMES.get(name, words)
