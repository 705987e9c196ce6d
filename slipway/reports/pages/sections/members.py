"""Builds the evaluation page's section on the members of an ensemble."""

from slipway.artifacts.bundle import Metric
from slipway.reports.console import interval, number, size
from slipway.reports.evaluation.members import (
    ENOUGH_KEPT,
    ENSEMBLE_NAME,
    MemberComparison,
    Speed,
    StudentScore,
)
from slipway.reports.pages.html_page import Html, paragraph, section, table


def members_section(found: MemberComparison) -> Html:
    """Show the ensemble's gain over each member, the best one first, and the disputed rows."""
    name = found.label
    best = found.members[0]
    rows = [
        [
            score.name,
            number(score.weight),
            number(score.measured),
            _gain(score.gain),
            score.verdict.removeprefix("the ensemble is "),
            size(score.bytes),
            *_speed(score.speed),
        ]
        for score in found.members
    ]
    num_bytes = sum(score.bytes for score in found.members)
    whole = [size(num_bytes), *_speed(found.speed)]
    rows.append([ENSEMBLE_NAME, "", number(found.ensemble), "", "", *whole])
    if student := found.student:
        own = [size(student.bytes), *_speed(student.speed)]
        rows.append([student.name, "", number(student.measured), "", "", *own])
    speed = ["one row", "rows/s"]
    columns = ["member", "weight", name, "gain of the ensemble", "it is", "size", *speed]
    note = (
        "The best on the validation rows comes first. The interval of the gain is paired: it is of "
        f"{best.gain.confidence * 100:g} %, on the same {best.gain.rows:,} test rows."
    )
    note += (
        " Size: of the weights. One row: the median time of a row in the fp32 graph, on the CPU of "
        "the machine that evaluated; rows/s: in batches of up to 64."
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
    numeric = ["weight", name, "gain of the ensemble", "it is", "size", *speed]
    parts = [verdict, table(columns, rows, numeric=numeric), *notes]
    return section("Members", *parts, *(_student(found, student, name) if student else []))


def _student(found: MemberComparison, student: StudentScore, name: str) -> list[Html]:
    """Compare the student with the best member and the ensemble: gain, kept fraction, latency."""
    best = found.members[0]
    measured = {best.name: best.measured, ENSEMBLE_NAME: found.ensemble}
    measured[student.name] = student.measured
    gains = {ENSEMBLE_NAME: best.gain, student.name: student.gain}
    kept = {student.name: "" if student.kept is None else f"{student.kept:.0%}"}
    speeds = {best.name: best.speed, ENSEMBLE_NAME: found.speed, student.name: student.speed}
    rows = [
        [
            f"{model}, served"
            if model == (student.name if student.is_served else ENSEMBLE_NAME)
            else model,
            number(value),
            _gain(gains[model]) if model in gains else "",
            kept.get(model, ""),
            _speed(speeds[model])[0],
        ]
        for model, value in measured.items()
    ]
    columns = ["model", name, "gain over the best member", "gain kept", "one row"]
    is_good = student.kept is not None and student.kept >= ENOUGH_KEPT
    return [
        paragraph(found.student_text(student), "good" if is_good else "soft"),
        table(columns, rows, numeric=[name, "gain over the best member", "gain kept", "one row"]),
    ]


def _gain(found: Metric) -> str:
    return f"{found.value:+.4g} ({interval(found)})"


def _speed(found: Speed) -> list[str]:
    return [f"{found.latency_ms:.3g} ms", f"{found.rows_per_second:,.0f}"]
