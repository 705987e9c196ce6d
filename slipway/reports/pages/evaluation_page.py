"""`reports/evaluate.html`: an evaluation on one page, from the headline to the worst errors and the least certain rows."""

from collections.abc import Sequence

import numpy as np

from slipway.artifacts.bundle import Metric
from slipway.artifacts.gates import GateResult, not_passed
from slipway.artifacts.input_contract import InputContract
from slipway.data.store.packed import Inputs
from slipway.inputs.columns import ColumnContract
from slipway.reports.console import baseline_cells, interval, number
from slipway.reports.evaluation.record import Evaluation, baseline_words, headlines
from slipway.reports.pages.cells import read_cells
from slipway.reports.pages.charts import Series, histogram, line_chart, residuals, scatter
from slipway.reports.pages.html_page import (
    Html,
    Section,
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
from slipway.reports.pages.slices_page import slices_section
from slipway.reports.pages.uncertainty_section import calibration_section

_CLASSIFICATION_METHOD = "Wilson's for shares of right rows, by bootstrap for the others, which leaves a perfect score no width"
_REGRESSION_METHOD = "by bootstrap"
_NUM_SHOWN = 12  # rows in a gallery
_ID_DIGITS = 8  # enough to find a row in predictions.parquet by
_MOST_CLASSES = 30  # in a heat map with readable numbers
_MOST_ROWS = 50  # in the table of classes
_MOST_PAIRS = 10
_MOST_DOTS = 3000


def evaluation_page(
    evaluation: Evaluation,
    gates: Sequence[GateResult],
    inputs: Inputs,
    contract: InputContract,
    curves: dict[str, list[Series]],
    about: str,
) -> str:
    """The whole page. `inputs` (N, ...) are the test rows in the evaluation's order, as `contract` says.

    `curves` are the lines of training by the name of what they show; `about` says in one line what was evaluated.
    """
    sections = [
        _headline(evaluation),
        *_leaks(evaluation),
        _gates(gates),
        *_released(evaluation),
        *_slices(evaluation),
        *([calibration_section(evaluation.worth)] if evaluation.worth else []),
        *_where_it_goes_wrong(evaluation),
        _worst(evaluation, inputs, contract),
        *_least_certain(evaluation, inputs, contract),
    ]
    return page(
        "Evaluation on the test split",
        about,
        [*sections, _training(curves), _all_metrics(evaluation)],
    )


def _headline(evaluation: Evaluation) -> Section:
    named = [(name, evaluation.metrics[name]) for name in headlines(evaluation.task)]
    first = named[0][1]
    intervals = f"{first.confidence * 100:g} % interval, {_CLASSIFICATION_METHOD if evaluation.is_classification else _REGRESSION_METHOD}"
    note = f"{first.rows} test rows, each counted once. Below each number its {intervals}."
    note += f" Baseline: {baseline_words(evaluation.task)}." if evaluation.baseline else ""
    boxes = tiles(
        [
            (_words(name), number(metric.value), _beside(evaluation, name, metric))
            for name, metric in named
        ]
    )
    return Section("Headline", join([boxes, paragraph(note, "note")]))


def _beside(evaluation: Evaluation, name: str, metric: Metric) -> str:
    baseline = evaluation.baseline.get(name)
    return interval(metric) + ("" if baseline is None else f"; baseline {number(baseline)}")


def _leaks(evaluation: Evaluation) -> list[Section]:
    if not evaluation.num_leaked:
        return []
    shared = "have a near duplicate or their group in another split, or are not later than it"
    leaked = f"{evaluation.num_leaked} of {len(evaluation.targets)} test rows {shared}"
    if not evaluation.without_leaked:
        return [
            Section(
                "Without leaked rows",
                paragraph(f"{leaked}; too few are left to measure without them.", "bad"),
            )
        ]
    rows = [
        [
            _words(name),
            number(metric.value),
            interval(metric),
            number(evaluation.metrics[name].value),
        ]
        for name, metric in (
            (name, evaluation.without_leaked[name]) for name in headlines(evaluation.task)
        )
    ]
    columns = ["metric", "without them", "interval", "with them"]
    note = paragraph(
        f"{leaked}. reports/split.json says which splits share what. The gates judge the numbers with them.",
        "bad",
    )
    return [
        Section(
            "Without leaked rows",
            join([note, table(columns, rows, numeric=["without them", "with them"])]),
        )
    ]


def _gates(gates: Sequence[GateResult]) -> Section:
    if not gates:
        return Section(
            "Gates",
            paragraph(
                "None: evaluate.gates in params.yaml is empty, so nothing is required of this model.",
                "soft",
            ),
        )
    failed = not_passed(gates)
    lost = "The service will not be ready with this model."
    told = f"{len(failed)} of {len(gates)} missed or unjudged. {lost}"
    verdict = (
        paragraph(told, "bad")
        if failed
        else paragraph(f"{len(gates)} of {len(gates)} passed", "good")
    )
    shown = [gate for gate in gates if not (gate.outcome == "passed" and gate.is_of_slice)]
    hidden = len(gates) - len(shown)
    columns = ["result", "metric", "of", "measured", "required", "interval", "rows"]
    rows = (
        table(columns, [_gate_row(gate) for gate in shown], numeric=["measured", "rows"])
        if shown
        else Html("")
    )
    note = (
        [
            paragraph(
                f"The {hidden} gates on slices that passed are not listed; the slices are below.",
                "note",
            )
        ]
        if hidden
        else []
    )
    return Section("Gates", join([verdict, rows, *note]))


def _gate_row(gate: GateResult) -> list[str]:
    found = gate.measured
    value, bounds, rows = (
        (number(found.value), interval(found), str(found.rows)) if found else ("", gate.remark, "")
    )
    outcome = f"{'✓' if gate.outcome == 'passed' else '✗'} {gate.outcome}"
    return [
        outcome,
        _words(gate.name),
        gate.where or "all test rows",
        value,
        gate.requirement,
        bounds,
        rows,
    ]


def _released(evaluation: Evaluation) -> list[Section]:
    released = evaluation.released
    if released is None:
        return []
    found = released.difference
    name = _words(found.metric)
    boxes = tiles(
        [
            (f"{name}, released", number(found.before), f"{released.folder}, {released.version}"),
            (f"{name}, now", number(found.after), f"on the same {found.rows} rows"),
            (
                "Difference",
                f"{found.difference:+.4g}",
                f"{number(found.low)} to {number(found.high)}, p = {released.p_value:.3g}",
            ),
        ]
    )
    left_out = (
        f" It does not take {released.refused} test rows, which are left out."
        if released.refused
        else ""
    )
    left_out += (
        f" The {released.known} test rows that it knows are left out." if released.known else ""
    )
    note = f"Both answered the same rows; the interval is of the difference. Of the released model: {released.knowledge}.{left_out}"
    return [Section("Against the released model", join([boxes, paragraph(note, "note")]))]


def _slices(evaluation: Evaluation) -> list[Section]:
    scores = evaluation.slices
    return [] if scores is None else [slices_section(scores, evaluation.metrics[scores.metric])]


def _where_it_goes_wrong(evaluation: Evaluation) -> list[Section]:
    return (
        [_classes(evaluation), _confusion(evaluation)]
        if evaluation.is_classification
        else [_values(evaluation), *_by_target(evaluation)]
    )


def _classes(evaluation: Evaluation) -> Section:
    scores, counts = evaluation.per_class, evaluation.confusion.sum(axis=1)
    order = (
        np.argsort(scores.f1, kind="stable")[:_MOST_ROWS]
        if len(evaluation.classes) > _MOST_ROWS
        else range(len(evaluation.classes))
    )
    rows = [
        [
            evaluation.classes[k],
            str(counts[k]),
            *(f"{values[k]:.4f}" for values in (scores.precision, scores.recall, scores.f1)),
        ]
        for k in order
    ]
    columns = ["class", "rows", "precision", "recall", "F1"]
    title = (
        "Classes"
        if len(evaluation.classes) <= _MOST_ROWS
        else f"The {_MOST_ROWS} weakest of {len(evaluation.classes)} classes"
    )
    return Section(
        title, beside([table(columns, rows, numeric=columns[1:]), _confused_pairs(evaluation)])
    )


def _confusion(evaluation: Evaluation) -> Section:
    matrix, classes = evaluation.confusion, evaluation.classes
    note = paragraph(
        "Row: the actual class. Column: the predicted class. The colour is the share of the row, on a square-root scale.",
        "note",
    )
    if len(classes) <= _MOST_CLASSES:
        picture = heat_map(matrix, classes)
    else:
        shares = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))
        picture = image(
            np.rint(255 * shares).astype(np.uint8), f"Confusion matrix of {len(classes)} classes"
        )
    return Section("Confusion matrix", join([picture, note]))


def _confused_pairs(evaluation: Evaluation) -> Html:
    errors = evaluation.confusion * ~np.eye(len(evaluation.classes), dtype=bool)
    actual, predicted = np.nonzero(errors)
    counts = errors[actual, predicted]
    if not len(counts):
        return paragraph("No row has a wrong label.", "good")
    order = np.argsort(-counts, kind="stable")[:_MOST_PAIRS]
    rows = [
        [evaluation.classes[actual[i]], evaluation.classes[predicted[i]], str(counts[i])]
        for i in order
    ]
    return table(["actual", "taken for", "rows"], rows, numeric=["rows"])


def _values(evaluation: Evaluation) -> Section:
    targets, values = evaluation.targets, evaluation.predictions
    shown = np.unique(np.linspace(0, len(targets) - 1, _MOST_DOTS).astype(np.int64))
    dots = figure(
        scatter(targets[shown], values[shown], "target", "prediction"),
        "Prediction against target",
        f"{len(shown)} of {len(targets)} rows; on the dashed line the prediction is right.",
    )
    errors = figure(
        histogram(values - targets, "prediction - target"),
        "Errors",
        f"All {len(targets)} rows; right of 0 the prediction is too large.",
    )
    trend = figure(
        residuals(targets[shown], values[shown] - targets[shown], "target", "prediction - target"),
        "Error against target",
        "A slope says that small targets are overestimated and large ones underestimated.",
    )
    return Section("Predictions", beside([dots, trend, errors]))


def _by_target(evaluation: Evaluation) -> list[Section]:
    if not evaluation.target_errors:
        return []
    rows = [
        [f"{number(entry.low)} to {number(entry.high)}", str(entry.rmse.rows)]
        + [
            cell
            for metric in (entry.mean_error, entry.mae, entry.rmse)
            for cell in (number(metric.value), interval(metric))
        ]
        for entry in evaluation.target_errors
    ]
    columns = [
        "target",
        "rows",
        "mean error",
        "its interval",
        "MAE",
        "its interval",
        "RMSE",
        "its interval",
    ]
    note = paragraph(
        "Ranges with about equal numbers of rows. A mean error above 0: predictions are too large.",
        "note",
    )
    return [
        Section(
            "Errors by target",
            join([table(columns, rows, numeric=["rows", "mean error", "MAE", "RMSE"]), note]),
        )
    ]


def _worst(evaluation: Evaluation, inputs: Inputs, contract: InputContract) -> Section:
    rows = evaluation.worst(_NUM_SHOWN)
    if not rows:
        return Section(
            "Worst errors", paragraph(f"None in {len(evaluation.targets)} rows.", "good")
        )
    if evaluation.is_classification:
        which = (
            f"{len(rows)} of {int((evaluation.predictions != evaluation.targets).sum())} wrong rows"
        )
    else:
        which = f"{len(rows)} of {len(evaluation.targets)} rows"
    note = (
        f"{which}, the largest loss first{_seen(contract)}. "
        f"Look for wrong {'labels' if evaluation.is_classification else 'targets'} here before you look for a better network."
    )
    return Section(
        "Worst errors", join([_shown(evaluation, inputs, contract, rows), paragraph(note, "note")])
    )


def _least_certain(
    evaluation: Evaluation, inputs: Inputs, contract: InputContract
) -> list[Section]:
    """Of classes alone: nothing says how certain a predicted number is."""
    rows = evaluation.least_certain(_NUM_SHOWN)
    if not rows:
        return []
    num_wrong = sum(evaluation.predictions[row] != evaluation.targets[row] for row in rows)
    note = (
        f"The {len(rows)} rows whose two best classes have the closest probabilities, right or wrong{_seen(contract)}; "
        f"{num_wrong} of them are wrong. To label more rows like these teaches a network more than others do."
    )
    return [
        Section(
            "Least certain",
            join([_shown(evaluation, inputs, contract, rows), paragraph(note, "note")]),
        )
    ]


def _seen(contract: InputContract) -> str:
    return "" if isinstance(contract, ColumnContract) else ", as the network sees them"


def _shown(
    evaluation: Evaluation, inputs: Inputs, contract: InputContract, rows: Sequence[int]
) -> Html:
    """Pictures, or the cells of a table's rows."""
    if not isinstance(contract, ColumnContract):
        return gallery(
            figure(image(inputs[row], evaluation.sources[row]), *_caption(evaluation, row))
            for row in rows
        )
    columns = [column.name for column in contract.columns]
    lines = []
    for row in rows:
        cells = read_cells(inputs[row], contract)
        lines.append(
            [
                _words_of_answer(evaluation, row),
                _name(evaluation, row),
                *(cells[name] for name in columns),
            ]
        )
    numbers = [column.name for column in contract.columns if column.kind == "number"]
    return table(["answer", "row", *columns], lines, numeric=numbers)


def _words_of_answer(evaluation: Evaluation, row: int) -> str:
    what, detail = _caption(evaluation, row)
    return f"{what}, {detail.partition(',')[0]}" if evaluation.is_classification else what


def _caption(evaluation: Evaluation, row: int) -> tuple[str, str]:
    target, prediction, name = (
        evaluation.targets[row],
        evaluation.predictions[row],
        _name(evaluation, row),
    )
    if not evaluation.is_classification:
        return f"{number(prediction)} instead of {number(target)}", name
    predicted, confidence = evaluation.classes[int(prediction)], evaluation.outputs[row].max()
    if target == prediction:
        second = int(np.argsort(-evaluation.outputs[row], kind="stable")[1])
        next_best = f"{evaluation.outputs[row, second]:.1%} for {evaluation.classes[second]}"
        return f"{predicted}, rightly", f"{confidence:.1%} against {next_best}, {name}"
    own = evaluation.outputs[row, int(target)]
    return (
        f"{evaluation.classes[int(target)]} taken for {predicted}",
        f"{own:.1%} against {confidence:.1%}, {name}",
    )


def _name(evaluation: Evaluation, row: int) -> str:
    return f"{evaluation.sources[row]} ({evaluation.ids[row][:_ID_DIGITS]})"


def _training(curves: dict[str, list[Series]]) -> Section:
    if not curves:
        return Section("Training", paragraph("No curves were logged.", "soft"))
    most_lines_first = sorted(curves.items(), key=lambda curve: (-len(curve[1]), curve[0]))
    return Section(
        "Training",
        beside(line_chart(lines, "epoch", _title(name, lines)) for name, lines in most_lines_first),
    )


def _title(name: str, lines: list[Series]) -> str:
    """A line alone has no legend, so the title says whether it is train or val."""
    alone = len(lines) == 1 and lines[0].name != name
    return (f"{lines[0].name} {name}" if alone else name).replace("_", " ")


def _all_metrics(evaluation: Evaluation) -> Section:
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
    return Section("All metrics", table(columns, rows, numeric=columns[1:]))


def _words(name: str) -> str:
    """`f1_macro` -> "F1, macro"; `rmse` -> "RMSE"; `log_loss` -> "Log loss"."""
    known = {
        "mse": "MSE",
        "rmse": "RMSE",
        "mae": "MAE",
        "r2": "R²",
        "roc_auc": "ROC-AUC",
        "top_k_accuracy": "Top-k accuracy",
        "rmse growth": "RMSE growth",
    }
    first, *averaged = name.split("_")
    is_averaged = averaged in (["macro"], ["micro"], ["weighted"])
    return known.get(name) or (", " if is_averaged else " ").join([first, *averaged]).capitalize()
