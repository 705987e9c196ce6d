"""Builds `reports/verify.html`: the certificate on one page, with pictures of the rows that differ.

The page shows which hops agree according to the certificate, and why the others do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import Certificate, Execution, Hop, first_fault
from slipway.artifacts.gates import not_passed
from slipway.artifacts.uncertainty import given_labels
from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import Task, kind_of
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.reports.console import interval, number
from slipway.reports.pages.charts import LogBar, log_bars
from slipway.reports.pages.exhibits import exhibits
from slipway.reports.pages.html_page import Html, page, paragraph, section, table, tiles

_MOST_FLIPS = 12  # shown for one hop; all are counted, and named in the certificate


@dataclass(frozen=True)
class HopAnswers:
    """The test rows, and the predictions of the executed hops."""

    task: Task
    classes: list[str]  # in the order of the columns; empty for a numeric target
    ids: list[str]
    sources: list[str]
    targets: NDArray[Any]  # (rows,) class index, or the number itself; (rows, labels) 0 or 1
    inputs: Inputs  # (rows, ...) as the network takes them
    # By the hop's name: (rows, classes) probabilities or (rows, 1) values.
    outputs: Mapping[str, NDArray[np.float32]]
    # By the hop's name: of the labels that it gives, if rows have several.
    thresholds: Mapping[str, Sequence[float] | None] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[str, int]:
        """Position of each row among the test rows, by id."""
        return {row_id: place for place, row_id in enumerate(self.ids)}

    def labels_of(self, name: str, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return the labels that a hop predicts for `rows`, (rows, classes): 1 or 0."""
        answers, own = self.outputs[name][rows], self.thresholds.get(name)
        if own is not None:
            return given_labels(answers, own).astype(np.int64)
        return np.asarray(np.eye(answers.shape[1], dtype=np.int64)[answers.argmax(axis=1)])

    def truth_of(self, row: int) -> NDArray[np.int64]:
        """Return the true labels of a row, (classes,): 1 or 0."""
        target = self.targets[row]
        if np.ndim(target):
            return np.asarray(target, np.int64)
        return np.asarray(np.eye(len(self.classes), dtype=np.int64)[int(target)])

    def named(self, labels: NDArray[np.int64]) -> str:
        """Return the names of the labels that are 1 in a row."""
        return ", ".join(self.classes[int(k)] for k in np.flatnonzero(labels)) or "no label"

    def of_both(self, hop: Hop, rows: int | Sequence[int]) -> tuple[NDArray[np.float64], ...]:
        """Return the predictions of the hop's reference, and of the hop itself, for `rows`."""
        names = (str(hop.reference), hop.name)
        before, after = (self.outputs[name][rows].astype(np.float64) for name in names)
        return before, after


def verify_page(certificate: Certificate, answered: HopAnswers, contract: InputContract) -> str:
    """Return the HTML page of a certificate; `contract` describes the inputs."""
    hops, has_classes = certificate.hops, kind_of(answered.task).target.has_classes
    compared = [hop for hop in hops if hop.reference and hop.rows]
    shown = [hop for hop in compared if {hop.name, hop.reference} <= answered.outputs.keys()]
    sections = [
        _verdict(certificate, len(answered.ids), has_classes),
        _gates(certificate),
        section("How far from the trained network", _difference_bars(compared)),
        _agreement(hops, has_classes),
        _changes(hops, certificate.metric),
        _flagged_rows(hops) if any(hop.ood_fraction for hop in hops) else None,
        *(_flips(shown, answered, contract) if has_classes else []),
        _worst(shown, answered, contract),
        _speed(hops),
        _batches(compared) if any(len(hop.batches) > 1 for hop in compared) else None,
        _executions(hops),
        _files_and_machine(certificate),
    ]
    about = (
        f"bundle {certificate.bundle_digest[:12]}, {answered.task.replace('_', ' ')}, "
        f"{len(answered.ids)} test rows through every hop"
    )
    return page("Certificate: from the trained network to live HTTP", about, sections)


def _verdict(certificate: Certificate, num_rows: int, has_classes: bool) -> Html:
    hops = certificate.hops
    executed = [hop for hop in hops if hop.actual is not None]
    num_agreeing = sum(hop.status == "agrees" for hop in executed)
    flipped = {row for hop in hops for row in hop.flipped}
    flips = ("Labels that flip", str(len(flipped)), f"of {num_rows} rows, in any hop")
    found = [hop.max_difference for hop in hops if hop.name == "onnxruntime/cpu/fp32"]
    largest = _or_infinite(found[0]) if found else "none"
    not_executed = f"{len(hops) - len(executed)} not executed here"
    boxes = tiles(
        [
            ("Verdict", certificate.status, f"bundle {certificate.bundle_digest[:12]}"),
            ("Hops that agree", f"{num_agreeing} of {len(executed)}", not_executed),
            flips if has_classes else ("Test rows", str(num_rows), "through each hop"),
            ("Largest difference", largest, "torch to ONNX fp32 on the CPU"),
        ]
    )
    fault = first_fault(hops)
    if fault is None:
        good = paragraph("No hop differs by more than verify allows.", "good")
        remarks = [f"{hop.name} {hop.status}: {hop.reason}." for hop in executed if hop.reason]
        return section("Verdict", boxes, good, *(paragraph(text, "note") for text in remarks))
    text = (
        f"The first bad hop is {fault.name}, which {fault.status.replace('_', ' ')}: "
        f"{fault.reason}."
    )
    if fault.worst_row:
        text += f" Worst row: {fault.worst_row}."
    return section("Verdict", boxes, paragraph(text, "bad"))


def _gates(certificate: Certificate) -> Html:
    """Show the quality gates, and explain how they differ from hops.

    Hops show that the bundle is the trained network; gates show that it is good enough.
    """
    failed, total = not_passed(certificate.gate_results), len(certificate.gate_results)
    if not total:
        text = "None: evaluate.gates in params.yaml is empty."
        return section("Quality gates", paragraph(text, "soft"))
    if not failed:
        return section("Quality gates", paragraph(f"{total} of {total} passed.", "good"))
    lines = [paragraph(f"{result.outcome}: {result.text}", "bad") for result in failed]
    note = (
        "It may be shadowed, replayed and compared, but not served, canaried, released or packed."
    )
    return section("Quality gates", *lines, paragraph(note, "note"))


def _difference_bars(compared: Sequence[Hop]) -> Html:
    bars = [
        LogBar(
            hop.name,
            hop.max_difference,
            _or_infinite(hop.max_difference),
            hop.allowed.max_difference if hop.allowed else None,
            hop.status == "differs",
        )
        for hop in compared
    ]
    unit = "Largest difference of any answer from the answer of the hop's reference"
    return log_bars(bars, unit, "The mark is the allowed difference.")


def _or_infinite(value: float | None) -> str:
    return "not finite" if value is None else number(value)


def _or_empty(value: float | None, text: str = "{}") -> str:
    return "" if value is None else text.format(number(value))


def _agreement(hops: Sequence[Hop], has_classes: bool) -> Html:
    rows = [
        [
            hop.name,
            f"{'✓' if hop.status == 'agrees' else '✗'}\u00a0{hop.status}",
            hop.reference or "",
            str(hop.rows),
            _or_infinite(hop.max_difference) if hop.reference and hop.rows else "",
            _or_empty(hop.mean_difference),
            _or_empty(hop.max_score_difference),
            str(len(hop.flipped)) if hop.reference and has_classes else "",
        ]
        for hop in hops
        if hop.actual is not None
    ]
    columns = ["hop", "", "against", "rows", "largest", "mean", "of scores", "flipped"]
    note = "The largest and the mean difference of the answers, and the largest of an OOD score."
    shown = table(columns, rows, numeric=columns[3:])
    return section("Agreement", shown, paragraph(note, "note"))


def _flagged_rows(hops: Sequence[Hop]) -> Html:
    rows = [_flagged_row(hop, hop.ood_fraction) for hop in hops if hop.ood_fraction]
    note = (
        "Rows above the hop's own threshold are flagged as OOD. The lower bound of their fraction "
        "may reach the trained network's upper bound plus evaluate.ood_fraction. The order of "
        "scores is the rank correlation with the reference: far below 1, the hop detects fewer "
        "unusual inputs."
    )
    columns = ["hop", "flagged as OOD", "interval", "allowed", "order of scores"]
    shown = table(columns, rows, numeric=columns[1:])
    return section("Out of distribution", shown, paragraph(note, "note"))


def _flagged_row(hop: Hop, found: Metric) -> list[str]:
    most = hop.allowed.max_ood_fraction if hop.allowed else None
    return [
        hop.name,
        f"{found.value:.1%}",
        f"{found.low:.1%} to {found.high:.1%}",
        "" if most is None else f"{most:.1%}",
        "" if hop.score_rank is None else f"{hop.score_rank:.4f}",
    ]


def _changes(hops: Sequence[Hop], metric: str) -> Html:
    names = next((list(hop.metric_changes) for hop in hops if hop.metric_changes), [])
    rows = [
        [
            hop.name,
            _or_empty(hop.metric.value if hop.metric else None),
            *(_change(hop.metric_changes.get(name)) for name in names),
        ]
        for hop in hops
        if hop.actual is not None
    ]
    columns = ["hop", metric, *(f"change of {name.replace('_', ' ')}" for name in names)]
    budgets = {
        hop.requested.variant: hop.allowed.max_metric_loss
        for hop in hops
        if hop.allowed and hop.allowed.max_metric_loss is not None
    }
    listed = ", ".join(f"{variant} {number(budget)}" for variant, budget in budgets.items())
    confidence = next((hop.metric.confidence for hop in hops if hop.metric), 0.95)
    is_error = metric in UNBOUNDED_METRICS
    judged = "RMSE is" if is_error else f"{metric.replace('_', ' ')} and the macro F1 are"
    note = (
        "Change: the hop's number less the trained network's on the same rows, with its "
        f"{confidence * 100:g} % interval over paired resamples of the rows. The {judged} judged "
        "by the mild end of that interval: a loss that other test rows could undo proves nothing."
    )
    return section(
        "Metrics",
        table(columns, rows, numeric=[metric]),
        paragraph(f"Allowed losses: {listed}.", "note") if budgets else None,
        paragraph(note, "note"),
    )


def _change(change: Metric | None) -> str:
    if change is None:
        return ""
    return f"{'+' if change.value > 0 else ''}{number(change.value)} ({interval(change)})"


def _flips(hops: Sequence[Hop], answered: HopAnswers, contract: InputContract) -> list[Html]:
    found = [_flips_of(hop, answered, contract) for hop in hops if hop.flipped]
    text = "None: every hop gives every row the label of the trained network."
    return found or [section("Labels that flip", paragraph(text, "good"))]


def _flips_of(hop: Hop, answered: HopAnswers, contract: InputContract) -> Html:
    rows = [answered.places[row] for row in hop.flipped]
    before, after = answered.of_both(hop, rows)
    old, new = (answered.labels_of(str(name), rows) for name in (hop.reference, hop.name))
    truth = np.array([answered.truth_of(row) for row in rows])
    was_right, is_right = ((labels == truth).all(axis=1) for labels in (old, new))
    moved = old != new
    lead = np.where(moved, np.abs(after - before), 0).max(axis=1)
    shown = np.argsort(-lead, kind="stable")[:_MOST_FLIPS].tolist()
    note = (
        f"{len(rows)} of {hop.rows} rows: {was_right.sum()} had the right label with "
        f"{hop.reference}, {is_right.sum()} have it here, "
        f"{(~was_right & ~is_right).sum()} neither way. "
        "The largest change of a probability comes first"
    )
    if len(shown) < len(rows):
        note += f"; {len(shown)} are shown, the certificate has every id"
    texts = []
    for place in shown:
        row = rows[place]
        probabilities = ", ".join(
            f"{answered.classes[column]} {before[place, column]:.2%} then "
            f"{after[place, column]:.2%}"
            for column in np.flatnonzero(moved[place])
        )
        caption = " → ".join(map(answered.named, (old[place], new[place])))
        truth_text = answered.named(answered.truth_of(row))
        detail = f"{probabilities}. Is {truth_text}, {answered.sources[row]}"
        texts.append((row, [caption, detail]))
    pictures = exhibits(answered.inputs, contract, ["", "answers"], texts)
    return section(f"Labels that flip: {hop.name}", pictures, paragraph(f"{note}.", "note"))


def _worst(shown: Sequence[Hop], answered: HopAnswers, contract: InputContract) -> Html:
    title = "Worst row of each hop"
    texts = [
        (answered.places[hop.worst_row], [hop.name, _worst_text(hop, hop.worst_row, answered)])
        for hop in shown
        if hop.worst_row and hop.max_difference != 0
    ]
    if not texts:
        return section(
            title, paragraph("None: all hops answer exactly as their reference.", "good")
        )
    note = "The row whose answer moved furthest. Both answers are those of the largest batch."
    rows = exhibits(answered.inputs, contract, ["", "answers"], texts)
    return section(title, rows, paragraph(note, "note"))


def _worst_text(hop: Hop, row_id: str, answered: HopAnswers) -> str:
    row = answered.places[row_id]
    before, after = answered.of_both(hop, row)
    moved = np.abs(after - before)
    column = int(np.where(np.isfinite(moved), moved, np.inf).argmax())
    if answered.classes:
        answers = f"{answered.classes[column]} {before[column]:.2%} then {after[column]:.2%}"
    else:
        answers = f"{number(before[column])} then {number(after[column])}"
    return f"{answers}, moved by {_or_infinite(hop.max_difference)}. {answered.sources[row]}"


def _speed(hops: Sequence[Hop]) -> Html:
    timed = [hop for hop in hops if hop.latency_ms is not None]
    bars = [LogBar(hop.name, hop.latency_ms, _or_empty(hop.latency_ms, "{} ms")) for hop in timed]
    rows = [[hop.name, _or_empty(hop.latency_ms), _or_empty(hop.rows_per_second)] for hop in timed]
    columns = ["hop", "ms, one row", "rows per second"]
    note = (
        "Rows per second at the largest batch; over HTTP, one row in a request, "
        "8 connections at a time."
    )
    return section(
        "Latency",
        log_bars(bars, "Milliseconds for one row, the median"),
        table(columns, rows, numeric=columns[1:]),
        paragraph(note, "note"),
    )


def _batches(compared: Sequence[Hop]) -> Html:
    rows = [
        [
            hop.name,
            str(check.batch_size),
            f"{check.rows} of {hop.rows}",
            _or_infinite(check.max_difference),
            str(check.flipped),
        ]
        for hop in compared
        if len(hop.batches) > 1
        for check in hop.batches
    ]
    columns = ["hop", "rows in a batch", "rows", "largest difference", "flipped"]
    text = "verify.batch_seconds left no time for all rows in the smaller batches."
    is_cut = any(check.rows < hop.rows for hop in compared for check in hop.batches)
    shown = table(columns, rows, numeric=columns[1:])
    return section("Batch sizes", shown, paragraph(text, "note") if is_cut else None)


def _executions(hops: Sequence[Hop]) -> Html:
    rows = [
        [
            hop.name,
            _describe(hop.requested),
            _describe(hop.actual) if hop.actual else "not executed",
            hop.reason,
        ]
        for hop in hops
    ]
    note = "A hop that was not executed here has not passed: nothing is served through it."
    shown = table(["hop", "requested", "actual", "why"], rows)
    return section("Requested and actual", shown, paragraph(note, "note"))


def _describe(execution: Execution) -> str:
    return " ".join(dict.fromkeys(execution.model_dump().values()))


def _files_and_machine(certificate: Certificate) -> Html:
    digests = [
        ["bundle.json", certificate.bundle_digest],
        ["engine_manifest.json", certificate.engine_digest or "no engine"],
        *map(list, certificate.digests.items()),
    ]
    machine = [
        [name.replace("_", " "), value]
        for name, value in (certificate.hardware | certificate.versions).items()
    ] + [["trained by", layout] for layout in certificate.training or ["unknown"]]
    own = [[code.key, code.name, code.sha256] for code in certificate.user_code]
    return section(
        "Files and machine",
        paragraph(
            "SHA-256 of every file that was read. If any byte of a graph, a manifest or the "
            "certificate changes, nothing is served."
        ),
        table(["file", "SHA-256"], digests),
        *([table(["user code", "name", "SHA-256"], own)] if own else []),
        table(["made on", ""], machine),
    )
