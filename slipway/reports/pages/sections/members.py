"""Builds the evaluation page's section on the members of an ensemble."""

from slipway.reports.console import interval, number, size
from slipway.reports.evaluation.members import (
    ENOUGH_KEPT,
    ENSEMBLE_NAME,
    MemberComparison,
    MemberScore,
    StudentScore,
)
from slipway.reports.pages.html_page import Html, paragraph, section, table


def members_section(found: MemberComparison) -> Html:
    """Show the gain over each member, the best one first, and the rows that they dispute."""
    name = {"rmse": "RMSE"}.get(found.metric, found.metric.replace("_", " "))
    best = found.members[0]
    rows = [
        [
            score.name,
            number(score.weight),
            number(score.measured),
            f"{score.gain.value:+.4g}",
            interval(score.gain),
            score.verdict,
            size(score.bytes),
        ]
        for score in found.members
    ]
    rows.append(["ensemble", "", number(found.ensemble), "", "", "", size(_total(found.members))])
    if student := found.student:
        rows.append([student.name, "", number(student.measured), "", "", "", size(student.bytes)])
    columns = ["member", "weight", name, "gain of the ensemble", "interval", "", "weights"]
    note = (
        "The best on the validation rows comes first. The interval of the gain is paired: it is of "
        f"{best.gain.confidence * 100:g} %, on the same {best.gain.rows:,} test rows."
    )
    notes = [paragraph(note, "note")]
    if dispute := found.dispute:
        text = (
            f"On the {dispute.disputed.rows:,} rows on which members differ most, the {name} is "
            f"{number(dispute.disputed.value)} ({interval(dispute.disputed)}), on all others "
            f"{number(dispute.others.value)} ({interval(dispute.others)})."
        )
        notes.append(paragraph(text, "note"))
    verdict = paragraph(found.gain_text(), "good" if best.gain.low > 0 else "soft")
    numeric = ["weight", name, "gain of the ensemble", "weights"]
    parts = [verdict, table(columns, rows, numeric=numeric), *notes]
    return section("Members", *parts, *(_student(found, student, name) if student else []))


def _student(found: MemberComparison, student: StudentScore, name: str) -> list[Html]:
    """Show the student beside the best member and the ensemble: gain, kept part, latency."""
    best = found.members[0]
    measured = {best.name: best.measured, ENSEMBLE_NAME: found.ensemble}
    measured[student.name] = student.measured
    gains = {ENSEMBLE_NAME: best.gain, student.name: student.gain}
    kept = {student.name: "" if student.kept is None else f"{student.kept:.0%}"}
    bytes_of = {best.name: best.bytes, ENSEMBLE_NAME: _total(found.members)}
    bytes_of[student.name] = student.bytes
    rows = [
        [
            f"{model}, served"
            if model == (student.name if student.is_served else ENSEMBLE_NAME)
            else model,
            number(value),
            f"{gains[model].value:+.4g}" if model in gains else "",
            interval(gains[model]) if model in gains else "",
            kept.get(model, ""),
            size(bytes_of[model]),
            f"{student.latency_ms[model]:.3g} ms",
        ]
        for model, value in measured.items()
    ]
    columns = [
        *("model", name, "gain over the best member", "interval", "gain kept", "weights"),
        "one row, p50",
    ]
    is_good = student.kept is not None and student.kept >= ENOUGH_KEPT
    note = "Latency: median of one row in the fp32 graph, on the CPU of the machine that evaluated."
    return [
        paragraph(found.student_text(student), "good" if is_good else "soft"),
        table(columns, rows, numeric=[name, "gain over the best member", "gain kept"]),
        paragraph(note, "note"),
    ]


def _total(scores: list[MemberScore]) -> int:
    return sum(score.bytes for score in scores)
