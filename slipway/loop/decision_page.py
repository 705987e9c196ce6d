"""The page of a decision request: compares candidate and served model, and shows the commands.

The page has no buttons, because without a login it cannot know who presses them. Decisions are made
by commands, with a name or a signature (slipway/loop/decisions.py).
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import read_certificate
from slipway.artifacts.gates import GateResult
from slipway.loop.decisions import REQUEST, DecisionRequest, moment, read_request
from slipway.reports.console import interval, number
from slipway.reports.evaluation.reference_comparison import ReferenceComparison
from slipway.reports.pages.html_page import (
    Html,
    commands,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from slipway.reports.pages.intervals import IntervalRow, interval_bars
from slipway.system import files
from slipway.traffic.monitoring_records import JudgedWindow

PAGE = "request.html"  # beside request.json
_CERTIFICATE = "certificate.json"
_NUM_WINDOWS = 10
_PAIRED = (
    "Both models answered the same rows, so the intervals are of the paired difference, candidate "
    "less served. The thin line is no difference; a change for the worse has another colour."
)
_NO_BUTTONS = (
    "This page cannot decide, because it cannot know who reads it. A decision is a command, and "
    "the service takes it for exactly this request."
)


def decision_page(place: Path, windows: Sequence[JudgedWindow]) -> str:
    """Return the HTML page of the request in `place`, the folder of a cycle.

    Args:
        windows: drift windows of the served model, the oldest first.
    """
    request = read_request(place / REQUEST)
    about = f"Cycle {request.cycle}, requested at {moment(request.created)}"
    sections = [
        awaited(request),
        section("Cause", *_cause(request, windows)),
        section("Candidate and served model", *_comparison(request)),
        section("Gates", *_gates(request, place / _CERTIFICATE)),
        section("Labels", *_labels(request)),
        section("Decide", *_commands(request, place)),
        section("Digests", _digests(request, place)),
    ]
    return page(f"Decision on {request.version}", about, sections)


def awaited(request: DecisionRequest, *parts: Html) -> Html:
    """Return the section that summarises the request, followed by `parts`."""
    boxes = [
        ("candidate", request.version, f"experiment {request.experiment}"),
        ("would replace", request.replaces, "the served model"),
        ("gates", request.gates, "on the test rows"),
        ("decide before", moment(request.expires)[:10], moment(request.expires)[11:]),
    ]
    return section("A decision is awaited", tiles(boxes), paragraph(request.why, "note"), *parts)


def _cause(request: DecisionRequest, windows: Sequence[JudgedWindow]) -> list[Html]:
    parts = [paragraph(reason) for reason in request.reasons]
    known = [window for window in windows if window.closed <= request.created][-_NUM_WINDOWS:]
    if known:
        rows = [
            [
                moment(window.opened),
                moment(window.closed),
                window.model.partition("/")[2],
                ", ".join(sorted(window.drifted_features)) or "none",
            ]
            for window in known
        ]
        parts.append(table(["window from", "until", "variant", "drifted features"], rows))
    return parts


def _comparison(request: DecisionRequest) -> list[Html]:
    found = request.comparison
    parts: dict[str, ReferenceComparison | None] = {
        "recent rows": found.recent,
        "newer half of the recent rows": found.latest,
        "old test rows": found.old,
        **{f"recent rows without key {key}": rest for key, rest in found.without.items()},
        **{f"newer half without key {key}": rest for key, rest in found.latest_without.items()},
    }
    compared = {name: part for name, part in parts.items() if part is not None}
    if not compared:
        return [paragraph("There were too few rows to compare on.", "bad")]
    rows, drawn = [], []
    for name, part in compared.items():
        one = part.difference
        change = Metric(
            value=one.difference,
            low=one.low,
            high=one.high,
            confidence=one.confidence,
            rows=one.rows,
        )
        numbers = [number(value) for value in (one.before, one.after)]
        rows.append(
            [
                *(name, *numbers, f"{one.difference:+.4g}", interval(change)),
                *(f"{one.rows:,}", f"{part.p_value:.2g}"),
            ]
        )
        drawn.append(IntervalRow(change, is_bad=part.loss.low > 0, line=0.0))
    metric = next(iter(compared.values())).difference.metric
    columns = [metric, "served", "candidate", "change", "interval", "rows", "p"]
    missing = [name for name, part in parts.items() if part is None]
    few = paragraph(f"Too few rows to compare: {', '.join(missing)}.", "note") if missing else None
    pieces = [table(columns, rows, columns[1:], last=interval_bars(drawn)), few]
    return [*(piece for piece in pieces if piece is not None), paragraph(_PAIRED, "note")]


def _gates(request: DecisionRequest, certificate: Path) -> list[Html]:
    """Return the table of quality gates, or a warning if the certificate is gone or changed."""
    verdict = "" if request.gates == "passed" else "bad"
    parts = [paragraph(f"The verdict of the certificate is: {request.gates}.", verdict)]
    if not certificate.is_file():
        return [*parts, paragraph("The candidate's certificate was removed.", "note")]
    if files.sha256_file(certificate) != request.certificate_digest:
        text = "The certificate was changed after the request: reject the candidate."
        return [*parts, paragraph(text, "bad")]
    results = read_certificate(certificate).gate_results
    if not results:
        return [*parts, paragraph("params.yaml sets no gate (evaluate.gates).", "note")]
    columns = ["metric", "on", "required", "measured", "interval", "outcome"]
    return [*parts, table(columns, [_gate_cells(one) for one in results])]


def _gate_cells(gate: GateResult) -> list[str]:
    measured = [number(gate.measured.value), interval(gate.measured)] if gate.measured else ["", ""]
    return [gate.name, gate.where or "all test rows", gate.requirement, *measured, gate.outcome]


def _labels(request: DecisionRequest) -> list[Html]:
    found = request.comparison
    rows = [[key, f"{count:,}"] for key, count in found.keys.items()]
    parts = [table(["API key", "recent test rows"], rows, ["recent test rows"])]
    parts += [paragraph(f"Not used, {text}", "bad") for text in found.refused]
    parts += [paragraph(f"Contradicted, {one.text}", "bad") for one in found.contradicted]
    return parts


def _commands(request: DecisionRequest, place: Path) -> list[Html]:
    version, path = request.version, shlex.quote(str(place.absolute() / REQUEST))
    signed = "    --sign KEY.pem --request request.json --out decision.json"
    return [
        paragraph(_NO_BUTTONS),
        paragraph("In the project's folder, with the SLIPWAY_ variables of the service:", "soft"),
        commands(
            f"slipway loop approve {version} --by NAME --reason TEXT",
            f"slipway loop reject {version} --by NAME --reason TEXT",
        ),
        paragraph(
            "On another machine, with a copy of the request. If params.yaml has loop.approvers, "
            "a decision without the signature of one of their keys is refused:",
            "soft",
        ),
        commands(
            f"scp SERVICE:{path} request.json",
            f"slipway loop approve {version} --by NAME --reason TEXT \\",
            signed,
            "scp decision.json SERVICE:PROJECT",
            "slipway loop decide decision.json   # on the machine of the service",
        ),
    ]


def _digests(request: DecisionRequest, place: Path) -> Html:
    rows = [
        ["request.json", files.sha256_file(place / REQUEST)],
        ["bundle.json", request.bundle_digest],
        [_CERTIFICATE, request.certificate_digest],
        ["data", request.data_digest],
    ]
    return table(["of", "digest"], rows)
