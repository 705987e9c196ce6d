"""Builds `reports/evaluate.html`: from the headline to the worst errors and least certain rows."""

from collections.abc import Sequence
from typing import Any

from slipway.artifacts.gates import GateResult, not_passed
from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind, kind_of
from slipway.reports.console import baseline_cells, interval, number
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.evaluation.reference_comparison import ReferenceComparison
from slipway.reports.pages.charts import Series, line_chart
from slipway.reports.pages.exhibits import exhibits
from slipway.reports.pages.html_page import (
    Html,
    beside,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from slipway.reports.pages.sections.importance import importance_section
from slipway.reports.pages.sections.members import members_section
from slipway.reports.pages.sections.slices import slices_section
from slipway.reports.pages.sections.threshold import threshold_section
from slipway.reports.pages.sections.uncertainty import uncertainty_section

_METRIC_NAMES = {
    "mse": "MSE",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "roc_auc": "ROC-AUC",
    "top_k_accuracy": "Top-k accuracy",
    "rmse growth": "RMSE growth",
}
_NUM_SHOWN = 12  # rows shown in a gallery
_ID_DIGITS = 8  # digits shown of an id, enough to find the row in predictions.parquet


def evaluation_page(
    evaluation: Evaluation,
    gates: Sequence[GateResult],
    inputs: Inputs,
    contract: InputContract,
    curves: dict[str, list[Series]],
    about: str,
) -> str:
    """Return the HTML page of an evaluation.

    Args:
        inputs: (N, ...) encoded test rows of `contract`, in the order of the evaluation.
        curves: training curves, lists of lines by name.
        about: a line that describes the evaluated model.
    """
    scores, uncertainty = evaluation.slices, evaluation.uncertainty
    sections = [
        _headline(evaluation),
        _leaks(evaluation) if evaluation.num_leaked else None,
        _gates(gates),
        _reference(evaluation.reference) if evaluation.reference else None,
        members_section(evaluation.members) if evaluation.members else None,
        slices_section(scores, evaluation.metrics[scores.metric]) if scores else None,
        *(
            [uncertainty_section(uncertainty), threshold_section(uncertainty)]
            if uncertainty
            else []
        ),
    ]
    sections += _of_target(evaluation).sections(evaluation)
    if evaluation.importance:
        metric = kind_of(evaluation.task).target.headline
        sections.append(
            importance_section(evaluation.importance, _METRIC_NAMES.get(metric, metric))
        )
    sections += [
        _worst(evaluation, inputs, contract),
        *_least_certain(evaluation, inputs, contract),
        _training(curves),
        _all_metrics(evaluation),
    ]
    return page("Evaluation on the test split", about, sections)


def _of_target(evaluation: Evaluation) -> Any:
    return kind_of(evaluation.task).target.load_part("sections")


def _headline(evaluation: Evaluation) -> Html:
    named = {name: evaluation.metrics[name] for name in evaluation.shown_metrics}
    baselines = {name: f"; baseline {number(value)}" for name, value in evaluation.baseline.items()}
    boxes = tiles(
        [
            (_words(name), number(metric.value), interval(metric) + baselines.get(name, ""))
            for name, metric in named.items()
        ]
    )
    first = next(iter(named.values()))
    method = _of_target(evaluation).INTERVAL_METHOD
    note = (
        f"{first.rows} test rows, each counted once. Below each number is its "
        f"{first.confidence * 100:g} % interval, {method}."
    )
    if evaluation.baseline:
        note += f" Baseline: {kind_of(evaluation.task).target.baseline_rule}."
    return section("Headline", boxes, paragraph(note, "note"))


def _leaks(evaluation: Evaluation) -> Html:
    title, without = "Without leaked rows", evaluation.without_leaked
    leaked = (
        f"{evaluation.num_leaked} of {len(evaluation.targets)} test rows have a near duplicate or "
        "their group in another split, or are not later than it"
    )
    if not without:
        text = f"{leaked}; too few are left to measure without them."
        return section(title, paragraph(text, "bad"))
    rows = [
        [
            _words(name),
            number(without[name].value),
            interval(without[name]),
            number(evaluation.metrics[name].value),
        ]
        for name in evaluation.shown_metrics
        if name in without
    ]
    columns = ["metric", "without them", "interval", "with them"]
    text = (
        f"{leaked}. reports/split.json says which splits share what. "
        "The gates judge the numbers with them."
    )
    shown = table(columns, rows, numeric=["without them", "with them"])
    return section(title, paragraph(text, "bad"), shown)


def _gates(gates: Sequence[GateResult]) -> Html:
    if not gates:
        text = "None: evaluate.gates in params.yaml is empty, so nothing is required of this model."
        return section("Gates", paragraph(text, "soft"))
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
    return section("Gates", *parts)


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


def _reference(reference: ReferenceComparison) -> Html:
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
    return section("Against the reference model", boxes, paragraph(note, "note"))


def _worst(evaluation: Evaluation, inputs: Inputs, contract: InputContract) -> Html:
    rows, num_rows = evaluation.worst(_NUM_SHOWN), len(evaluation.targets)
    if not rows:
        return section("Worst errors", paragraph(f"None in {num_rows} rows.", "good"))
    num_wrong = int(evaluation.is_wrong.sum())
    column = kind_of(evaluation.task).target.column
    note = (
        f"{len(rows)} of {num_wrong} rows with an error, the largest loss first"
        f"{_as_seen(contract)}. Look for wrong {column}s here before you look for a better network."
    )
    shown = _exhibits(evaluation, inputs, contract, rows)
    return section("Worst errors", shown, paragraph(note, "note"))


def _least_certain(evaluation: Evaluation, inputs: Inputs, contract: InputContract) -> list[Html]:
    rows = evaluation.least_certain(_NUM_SHOWN)
    if not rows:
        return []
    num_wrong = int(evaluation.is_wrong[rows].sum())
    several = kind_of(evaluation.task).target.several
    which = (
        "in which a label is closest to its threshold"
        if several
        else "whose two best classes have the closest probabilities"
    )
    note = (
        f"The {len(rows)} rows {which}, "
        f"right or wrong{_as_seen(contract)}; {num_wrong} of them are wrong. "
        "Labelling more rows like these improves a network more than labelling others."
    )
    shown = _exhibits(evaluation, inputs, contract, rows)
    return [section("Least certain", shown, paragraph(note, "note"))]


def _as_seen(contract: InputContract) -> str:
    return ", as the network sees them" if input_kind(contract.kind).has_pixels else ""


def _exhibits(
    evaluation: Evaluation, inputs: Inputs, contract: InputContract, rows: Sequence[int]
) -> Html:
    of_target = _of_target(evaluation)
    texts = []
    for row in rows:
        name = f"{evaluation.sources[row]} ({evaluation.ids[row][:_ID_DIGITS]})"
        texts.append((row, [*of_target.answer_cells(evaluation, row), name]))
    columns = [*of_target.ANSWER_COLUMNS, "row"]
    return exhibits(inputs, contract, columns, texts)


def _training(curves: dict[str, list[Series]]) -> Html:
    if not curves:
        return section("Training", paragraph("No curves were logged.", "soft"))
    most_lines_first = sorted(curves.items(), key=lambda curve: (-len(curve[1]), curve[0]))
    charts = (line_chart(lines, "epoch", _title(name, lines)) for name, lines in most_lines_first)
    return section("Training", beside(charts))


def _title(name: str, lines: list[Series]) -> str:
    """Return a chart's title; for a single line, which has no legend, it names the split."""
    is_single = len(lines) == 1 and lines[0].name != name
    return (f"{lines[0].name} {name}" if is_single else name).replace("_", " ")


def _all_metrics(evaluation: Evaluation) -> Html:
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
    return section("All metrics", table(columns, rows, numeric=columns[1:]))


def _words(name: str) -> str:
    """Spell out a metric: "f1_macro" -> "F1, macro", "rmse" -> "RMSE", "log_loss" -> "Log loss"."""
    first, *averaged = name.split("_")
    is_averaged = averaged in (["macro"], ["micro"], ["weighted"])
    words = (", " if is_averaged else " ").join([first, *averaged]).capitalize()
    return _METRIC_NAMES.get(name, words)
