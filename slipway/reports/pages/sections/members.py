"""Builds the evaluation page's section on the members of an ensemble."""

from slipway.reports.console import interval, number, size
from slipway.reports.evaluation.members import MemberComparison, MemberScore
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
    return section("Members", verdict, table(columns, rows, numeric=numeric), *notes)


def _total(scores: list[MemberScore]) -> int:
    return sum(score.bytes for score in scores)
