"""`reports/verify.html`: the certificate on one page: how far each hop is off, which rows it answers otherwise, how fast it is.

It judges nothing: what agrees and why not is the certificate's word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import Certificate, Execution, Hop, first_fault
from slipway.artifacts.gates import not_passed
from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import Task, input_kind, is_classification
from slipway.reports.console import interval, number
from slipway.reports.pages.html_page import (
    Html,
    PageSection,
    figure,
    gallery,
    image,
    join,
    page,
    paragraph,
    table,
    tiles,
)
from slipway.reports.pages.log_bars import LogBar, log_bars
from slipway.reports.pages.shown_cells import shown_cells

_MOST_FLIPS = 12  # shown of one hop; all are counted, and named in the certificate


@dataclass(frozen=True)
class HopAnswers:
    """The test rows, and what the executed hops answered to them."""

    task: Task
    classes: list[str]  # in the order of the columns; empty for a numeric target
    ids: list[str]
    sources: list[str]
    targets: NDArray[np.float64]  # (rows,) class index, or the number itself
    inputs: Inputs  # (rows, ...) as the network takes them
    outputs: Mapping[
        str, NDArray[np.float32]
    ]  # by the hop's name: (rows, classes) probabilities or (rows, 1) values

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each row by its id."""
        return {row_id: place for place, row_id in enumerate(self.ids)}


def verify_page(certificate: Certificate, answered: HopAnswers, contract: InputContract) -> str:
    """The whole page; `contract` says what the inputs are."""
    hops = certificate.hops
    compared = [hop for hop in hops if hop.reference and hop.rows]
    sections = [
        _verdict(certificate, len(answered.ids), is_classification(answered.task)),
        _gates(certificate),
        PageSection("How far from the trained network", _difference_bars(compared)),
        _agreement(hops, answered.task),
        _changes(hops, certificate.metric),
        *_outliers(hops),
        *_flips(compared, answered, contract),
        _worst(compared, answered, contract),
        _speed(hops),
        *_batches(compared),
        _executions(hops),
        _bound(certificate),
    ]
    about = f"bundle {certificate.bundle_digest[:12]}, {answered.task.replace('_', ' ')}, {len(answered.ids)} test rows through every hop"
    return page("Certificate: from the trained network to live HTTP", about, sections)


def _verdict(certificate: Certificate, num_rows: int, has_labels: bool) -> PageSection:
    hops = certificate.hops
    executed = [hop for hop in hops if hop.actual is not None]
    agreeing, flipped = (
        sum(hop.status == "agrees" for hop in executed),
        {row for hop in hops for row in hop.flipped},
    )
    flips = ("Labels that flip", str(len(flipped)), f"of {num_rows} rows, in any hop")
    boxes = tiles(
        [
            ("Verdict", certificate.status, f"bundle {certificate.bundle_digest[:12]}"),
            (
                "Hops that agree",
                f"{agreeing} of {len(executed)}",
                f"{len(hops) - len(executed)} not executed here",
            ),
            flips if has_labels else ("Test rows", str(num_rows), "through each hop"),
            ("Largest difference", _largest(hops), "torch to ONNX fp32 on the CPU"),
        ]
    )
    fault = first_fault(hops)
    if fault is None:
        good = paragraph("No hop differs by more than verify allows.", "good")
        told = [
            paragraph(f"{hop.name} {hop.status}: {hop.reason}.", "note")
            for hop in executed
            if hop.reason
        ]
        return PageSection("Verdict", join([boxes, good, *told]))
    row = f" Worst row: {fault.worst_row}." if fault.worst_row else ""
    text = f"The first bad hop is {fault.name}, which {fault.status.replace('_', ' ')}: {fault.reason}.{row}"
    return PageSection("Verdict", join([boxes, paragraph(text, "bad")]))


def _gates(certificate: Certificate) -> PageSection:
    """Apart from the hops: they say that this is the trained network, gates whether that is good enough."""
    failed, total = not_passed(certificate.gate_results), len(certificate.gate_results)
    if not total:
        return PageSection(
            "Quality gates", paragraph("None: evaluate.gates in params.yaml is empty.", "soft")
        )
    if not failed:
        return PageSection("Quality gates", paragraph(f"{total} of {total} passed.", "good"))
    lines = [paragraph(f"{result.outcome}: {result.text}", "bad") for result in failed]
    note = (
        "It may be shadowed, replayed and compared, but not served, canaried, released or packed."
    )
    return PageSection("Quality gates", join([*lines, paragraph(note, "note")]))


def _largest(hops: Sequence[Hop]) -> str:
    found = [hop.max_difference for hop in hops if hop.name == "onnxruntime/cpu/fp32"]
    return _or_infinite(found[0]) if found else "none"


def _difference_bars(compared: Sequence[Hop]) -> Html:
    bars = [
        LogBar(
            hop.name,
            hop.max_difference,
            _or_infinite(hop.max_difference),
            _limit(hop),
            hop.status == "differs",
        )
        for hop in compared
    ]
    return log_bars(
        bars,
        "Largest difference of any answer from that of the hop it is compared with",
        "The mark is what is allowed.",
    )


def _limit(hop: Hop) -> float | None:
    return hop.allowed.max_difference if hop.allowed else None


def _or_infinite(value: float | None) -> str:
    return "not finite" if value is None else number(value)


def _agreement(hops: Sequence[Hop], task: Task) -> PageSection:
    rows = [_agreement_row(hop, task) for hop in hops if hop.actual is not None]
    columns = ["hop", "", "against", "rows", "largest", "mean", "of scores", "flipped"]
    note = (
        "Differences of the answers, the largest and the mean, and the largest of an outlier score."
    )
    return PageSection(
        "Agreement", join([table(columns, rows, numeric=columns[3:]), paragraph(note, "note")])
    )


def _outliers(hops: Sequence[Hop]) -> list[PageSection]:
    rows = [_outliers_row(hop, hop.outliers) for hop in hops if hop.outliers]
    if not rows:
        return []
    note = (
        "Outliers are the rows above the hop's own threshold; what the lower bound of their share may be is the trained network's upper "
        "bound and evaluate.ood_fraction. The order of the scores is their rank correlation with those of the hop before: far below 1, "
        "fewer strangers are found."
    )
    columns = ["hop", "called outliers", "interval", "allowed", "order of scores"]
    return [
        PageSection(
            "Outliers", join([table(columns, rows, numeric=columns[1:]), paragraph(note, "note")])
        )
    ]


def _outliers_row(hop: Hop, found: Metric) -> list[str]:
    most = hop.allowed.max_outliers if hop.allowed else None
    return [
        hop.name,
        f"{found.value:.1%}",
        f"{found.low:.1%} to {found.high:.1%}",
        f"{most:.1%}" if most is not None else "",
        f"{hop.score_rank:.4f}" if hop.score_rank is not None else "",
    ]


def _agreement_row(hop: Hop, task: Task) -> list[str]:
    return [
        hop.name,
        f"{'✓' if hop.status == 'agrees' else '✗'}\u00a0{hop.status}",
        hop.reference or "",
        str(hop.rows),
        _or_infinite(hop.max_difference) if hop.reference and hop.rows else "",
        number(hop.mean_difference) if hop.mean_difference is not None else "",
        number(hop.max_score_difference) if hop.max_score_difference is not None else "",
        str(len(hop.flipped)) if hop.reference and is_classification(task) else "",
    ]


def _changes(hops: Sequence[Hop], metric: str) -> PageSection:
    executed = [hop for hop in hops if hop.actual is not None]
    names = next((list(hop.metric_changes) for hop in hops if hop.metric_changes), [])
    rows = [
        [
            hop.name,
            number(hop.metric.value) if hop.metric else "",
            *(_change(hop.metric_changes.get(name)) for name in names),
        ]
        for hop in executed
    ]
    confidence = next((hop.metric.confidence for hop in hops if hop.metric), 0.95)
    note = (
        f"Change: the hop's number less the trained network's on the same rows, with its {confidence * 100:g} % interval over paired "
        f"resamples of the rows. The {'accuracy and the macro F1 are' if metric == 'accuracy' else 'RMSE is'} judged "
        "by the mild end of that interval: a loss that other test rows could undo is no proof."
    )
    shown = table(
        ["hop", metric, *(f"change of {name.replace('_', ' ')}" for name in names)],
        rows,
        numeric=[metric],
    )
    return PageSection("Metrics", join([shown, *_budgets(hops), paragraph(note, "note")]))


def _budgets(hops: Sequence[Hop]) -> list[Html]:
    budgets = {
        hop.requested.variant: hop.allowed.max_metric_loss
        for hop in hops
        if hop.allowed and hop.allowed.max_metric_loss is not None
    }
    if not budgets:
        return []
    return [
        paragraph(
            "May be lost: "
            + ", ".join(f"{variant} {number(budget)}" for variant, budget in budgets.items())
            + ".",
            "note",
        )
    ]


def _change(change: Metric | None) -> str:
    if change is None:
        return ""
    return f"{'+' if change.value > 0 else ''}{number(change.value)} ({interval(change)})"


def _flips(
    compared: Sequence[Hop], answered: HopAnswers, contract: InputContract
) -> list[PageSection]:
    if not is_classification(answered.task):
        return []
    hops = [hop for hop in compared if hop.flipped and _can_be_shown(hop, answered)]
    if not hops:
        return [
            PageSection(
                "Labels that flip",
                paragraph(
                    "None: every hop gives every row the label of the trained network.", "good"
                ),
            )
        ]
    return [
        PageSection(f"Labels that flip: {hop.name}", _flips_of(hop, answered, contract))
        for hop in hops
    ]


def _can_be_shown(hop: Hop, answered: HopAnswers) -> bool:
    return hop.name in answered.outputs and hop.reference in answered.outputs


def _flips_of(hop: Hop, answered: HopAnswers, contract: InputContract) -> Html:
    before, after = answered.outputs[str(hop.reference)], answered.outputs[hop.name]
    rows = np.array([answered.places[row] for row in hop.flipped])
    targets, old, new = (
        answered.targets[rows],
        before[rows].argmax(axis=1),
        after[rows].argmax(axis=1),
    )
    was, is_now = int((old == targets).sum()), int((new == targets).sum())
    lead = before[rows].max(axis=1) - before[rows, new]
    shown = rows[np.argsort(-lead, kind="stable")][:_MOST_FLIPS].tolist()
    note = (
        f"{len(rows)} of {hop.rows} rows: {was} had the right label with {hop.reference}, {is_now} have it here, "
        f"{int(((old != targets) & (new != targets)).sum())} neither way. The largest lead that was lost comes first"
        f"{f'; {len(shown)} are shown, the certificate has every id' if len(shown) < len(rows) else ''}."
    )
    captions = [
        (
            f"{_label(before[row], answered)} → {_label(after[row], answered)}",
            _both(row, hop, answered),
        )
        for row in shown
    ]
    return join([_exhibits(shown, captions, answered, contract), paragraph(note, "note")])


def _both(row: int, hop: Hop, answered: HopAnswers) -> str:
    """What the two hops think of the two labels, and which is right."""
    before, after = answered.outputs[str(hop.reference)][row], answered.outputs[hop.name][row]
    names = dict.fromkeys([int(before.argmax()), int(after.argmax())])
    thought = ", ".join(f"{answered.classes[k]} {before[k]:.2%} then {after[k]:.2%}" for k in names)
    return f"{thought}. Is {answered.classes[int(answered.targets[row])]}, {answered.sources[row]}"


def _label(outputs: NDArray[np.float32], answered: HopAnswers) -> str:
    return answered.classes[int(outputs.argmax())]


def _worst(compared: Sequence[Hop], answered: HopAnswers, contract: InputContract) -> PageSection:
    hops = [
        hop
        for hop in compared
        if hop.worst_row and hop.max_difference != 0 and _can_be_shown(hop, answered)
    ]
    if not hops:
        return PageSection(
            "Worst row of each hop",
            paragraph("None: the hops answer exactly as the ones before.", "good"),
        )
    rows = [answered.places[str(hop.worst_row)] for hop in hops]
    captions = [
        (hop.name, _worst_words(hop, row, answered)) for hop, row in zip(hops, rows, strict=True)
    ]
    note = "The row whose answer moved furthest: here one looks first. Both answers are those of the largest batch."
    return PageSection(
        "Worst row of each hop",
        join([_exhibits(rows, captions, answered, contract), paragraph(note, "note")]),
    )


def _worst_words(hop: Hop, row: int, answered: HopAnswers) -> str:
    before, after = (
        answered.outputs[str(hop.reference)][row].astype(np.float64),
        answered.outputs[hop.name][row].astype(np.float64),
    )
    moved = np.abs(after - before)
    column = int(np.where(np.isfinite(moved), moved, np.inf).argmax())
    if answered.classes:
        answers = f"{answered.classes[column]} {before[column]:.2%} then {after[column]:.2%}"
    else:
        answers = f"{number(before[column])} then {number(after[column])}"
    return f"{answers}, moved by {_or_infinite(hop.max_difference)}. {answered.sources[row]}"


def _exhibits(
    rows: Sequence[int],
    captions: Sequence[tuple[str, str]],
    answered: HopAnswers,
    contract: InputContract,
) -> Html:
    """Pictures with their captions, or a table's rows with them."""
    if not input_kind(contract.kind).has_pixels:
        inputs = [answered.inputs[row] for row in rows]
        names, cells, numbers = shown_cells(contract, inputs)
        lines = [[*caption, *texts] for caption, texts in zip(captions, cells, strict=True)]
        return table(["", "answers", *names], lines, numeric=numbers)
    return gallery(
        figure(image(answered.inputs[row], answered.sources[row]), *caption)
        for row, caption in zip(rows, captions, strict=True)
    )


def _speed(hops: Sequence[Hop]) -> PageSection:
    bars = [
        LogBar(hop.name, hop.latency_ms, f"{number(hop.latency_ms)} ms")
        for hop in hops
        if hop.latency_ms is not None
    ]
    rows = [
        [hop.name, number(hop.latency_ms), number(hop.rows_per_second)]
        for hop in hops
        if hop.latency_ms and hop.rows_per_second
    ]
    speeds = table(
        ["hop", "ms, one row", "rows per second"], rows, numeric=["ms, one row", "rows per second"]
    )
    note = paragraph(
        "Rows per second at the largest batch; over HTTP, one row in a request, 8 connections at a time.",
        "note",
    )
    return PageSection(
        "Latency", join([log_bars(bars, "Milliseconds for one row, the median"), speeds, note])
    )


def _batches(compared: Sequence[Hop]) -> list[PageSection]:
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
    if not rows:
        return []
    columns = ["hop", "rows in a batch", "rows", "largest difference", "flipped"]
    cut = any(check.rows < hop.rows for hop in compared for check in hop.batches)
    note = (
        paragraph("verify.batch_seconds left no time for all rows in the smaller batches.", "note")
        if cut
        else Html("")
    )
    return [PageSection("Batch sizes", join([table(columns, rows, numeric=columns[1:]), note]))]


def _executions(hops: Sequence[Hop]) -> PageSection:
    rows = [
        [
            hop.name,
            _words(hop.requested),
            _words(hop.actual) if hop.actual else "not executed",
            hop.reason,
        ]
        for hop in hops
    ]
    note = paragraph("What was not executed here is no pass: nothing is served through it.", "note")
    return PageSection(
        "Requested and actual", join([table(["hop", "requested", "actual", "why"], rows), note])
    )


def _words(execution: Execution) -> str:
    return " ".join(
        dict.fromkeys(
            [execution.backend, execution.provider, execution.precision, execution.variant]
        )
    )


def _bound(certificate: Certificate) -> PageSection:
    digests = {
        "bundle.json": certificate.bundle_digest,
        "engine_manifest.json": certificate.engine_digest or "no engine",
    }
    rows = [[path, digest] for path, digest in (digests | certificate.digests).items()]
    machine = [
        [name.replace("_", " "), value]
        for name, value in {**certificate.hardware, **certificate.versions}.items()
    ]
    note = paragraph(
        "SHA-256 of every file that was read. With any other byte in a graph, a manifest or the certificate nothing is served."
    )
    return PageSection(
        "What it is bound to",
        join([note, table(["file", "SHA-256"], rows), table(["made on", ""], machine)]),
    )
