"""Training profile for a terminal and as a page: the parts of a step, bottleneck, proposal."""

from collections.abc import Mapping
from typing import Any

from slipway.reports.console import text_table
from slipway.reports.pages.html_page import (
    Html,
    PageSection,
    figure,
    join,
    page,
    paragraph,
    table,
    tiles,
)
from slipway.reports.pages.stacked_bars import Bar, stacked_bars

_PARTS = {
    "data": "waiting for the batch",
    "copy": "copy to the device",
    "forward": "forward and loss",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "other": "loop and ends of epochs",
}
Report = Mapping[str, Any]


def profile_text(report: Report) -> str:
    """Render the content of `reports/profile.json` for a terminal."""
    step, bottleneck = report["account"]["step_ms"], report["bottleneck"]
    blocks = [
        f"step       {_ms(step['median'])} ({_range(step)}), {report['account']['rows_per_second']:,.0f} rows/s, {report['runs_as']}",
        text_table(["part", "ms", "lowest", "highest", "share"], _part_rows(report), "  "),
        f"bottleneck {bottleneck['name']}: {bottleneck['text']}",
        text_table(
            ["loader processes", "ms for a batch", "ms of the trainer, at best"],
            _loader_rows(report),
            "  ",
        ),
    ]
    if report["trials"]:
        blocks.append(
            text_table(
                ["trial", "compute time", "expected gain", "note"], _trial_rows(report), "  "
            )
        )
    blocks += [f"data       {line}" for line in _raw_lines(report["raw"])]
    blocks += [_proposal_text(report)]
    if proof := report["proof"]:
        gain = proof["measured_gain"]
        measured = f"measured {gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
        blocks.append(f"proof      expected {proof['expected_gain']:.2f} times as fast, {measured}")
    blocks += [f"note       {note}" for note in report["notes"]]
    return "\n".join(blocks)


def profile_page(report: Report) -> str:
    """Render the content of `reports/profile.json` as HTML."""
    sections = [_account_section(report), _proposal_section(report), _loader_section(report)]
    if report["trials"]:
        sections.append(PageSection("Trials", _trials(report)))
    if report["raw"]:
        sections.append(_raw_section(report["raw"]))
    sections.append(
        PageSection(
            "How to read this",
            join(paragraph(note, "soft") for note in [*report["notes"], _PRECISION]),
        )
    )
    return page("Training profile", f"{report['runs_as']}; {report['machine']}", sections)


_PRECISION = "Times are medians over rounds, with the lowest and the highest. A gain is how many times as fast a step becomes."


def _account_section(report: Report) -> PageSection:
    account, bottleneck = report["account"], report["bottleneck"]
    step = account["step_ms"]
    numbers = tiles(
        [
            ("step", _ms(step["median"]), f"{_range(step)}, {account['rounds']} rounds"),
            ("rows per second", f"{account['rows_per_second']:,.0f}", ""),
            ("bottleneck", bottleneck["name"], f"{bottleneck['share']:.0%} of a step"),
        ]
    )
    columns = ["part", "ms", "lowest", "highest", "share"]
    parts = table(columns, _part_rows(report), numeric=columns[1:])
    return PageSection(
        "A training step",
        join([numbers, paragraph(bottleneck["text"] + ".", "note"), _bars(report), parts]),
    )


def _bars(report: Report) -> Html:
    bars = [Bar("present", _medians(report["account"]))]
    if report["proposal"]:
        bars.append(Bar("expected", {"": report["proposal"]["expected_step_ms"]}))
    if report["proof"]:
        bars.append(Bar("measured", _medians(report["proof"]["account"])))
    return figure(
        stacked_bars(bars, "ms"),
        "Where a step's time goes",
        "Expected and measured are with the proposal below.",
    )


def _medians(account: Report) -> dict[str, float]:
    return {_PARTS[part]: spread["median"] for part, spread in account["parts_ms"].items()}


def _proposal_section(report: Report) -> PageSection:
    proposal, proof = report["proposal"], report["proof"]
    if not proposal:
        return PageSection(
            "Proposal",
            paragraph(
                "None: nothing that was measured would make a step shorter by a twentieth.", "good"
            ),
        )
    rows = [[place, _value(value)] for place, value in proposal["changes"].items()]
    parts = [
        table(["params.yaml", "value"], rows),
        *(paragraph(reason + ".") for reason in proposal["reasons"]),
    ]
    boxes = [
        (
            "expected",
            f"{proposal['expected_gain']:.2f} x",
            f"{_ms(proposal['expected_step_ms'])} a step",
        )
    ]
    if proof:
        gain = proof["measured_gain"]
        boxes.append(
            ("measured", f"{gain['median']:.2f} x", f"{gain['low']:.2f} to {gain['high']:.2f}")
        )
    return PageSection("Proposal", join([tiles(boxes), *parts]))


def _loader_section(report: Report) -> PageSection:
    columns = ["loader processes", "ms for a batch", "ms of the trainer, at best"]
    loader = report["loader"]
    detail = (
        f"In the trainer's process a batch takes {loader['processor_ms']:.2f} ms of processor time; reading its stored rows takes "
        f"{loader['read_ms']:.2f} ms, of which {loader['read_processor_ms']:.2f} ms are processor time."
    )
    return PageSection(
        "The loader by itself",
        join([table(columns, _loader_rows(report), numeric=columns), paragraph(detail, "note")]),
    )


def _trials(report: Report) -> Html:
    columns = ["trial", "compute time", "expected gain", "note"]
    return table(columns, _trial_rows(report), numeric=columns[1:3])


def _raw_section(raw: Report) -> PageSection:
    return PageSection(
        "The data before the packed store", join(paragraph(line) for line in _raw_lines(raw))
    )


def _raw_lines(raw: Report | None) -> list[str]:
    if raw is None:
        return []
    if raw["times"] is None:
        return [f"precompute was {raw['note']}"]
    times = raw["times"]
    parts = {name: times[f"{name}_ms"] for name in ("read", "decode", "transform", "resize")}
    largest = max(parts, key=lambda name: parts[name])
    named = ", ".join(
        f"{name} {value:.2f} ms" for name, value in parts.items() if value or name != "transform"
    )
    lines = [
        f"an image before it is packed: {named}; most of it is {_RAW[largest]} ({times['rows']} images)"
    ]
    workers = raw["num_workers"] or "one per core"
    lines.append(
        f"precompute of {raw['num_images']:,} images is expected to take {raw['expected_seconds']:.1f} s, once (num_workers: {workers})"
    )
    if raw["better_num_workers"]:
        better = f"precompute.num_workers: {raw['better_num_workers']} would make it {raw['better_seconds']:.1f} s"
        lines.append(
            f"{better}, {raw['expected_seconds'] / raw['better_seconds']:.2f} times as fast"
        )
    return lines


_RAW = {
    "read": "reading it from the disk",
    "decode": "decoding it",
    "transform": "your transform",
    "resize": "fitting it to its size",
}


def _part_rows(report: Report) -> list[list[str]]:
    parts = report["account"]["parts_ms"]
    total = sum(spread["median"] for spread in parts.values()) or 1.0
    return [
        [
            _PARTS[part],
            *(f"{spread[key]:.2f}" for key in ("median", "low", "high")),
            f"{spread['median'] / total:.0%}",
        ]
        for part, spread in parts.items()
    ]


def _loader_rows(report: Report) -> list[list[str]]:
    handover = report["loader"]["handover_ms"]
    rows = []
    for number, milliseconds in report["loader"]["batch_ms"].items():
        rows.append(
            [
                str(number),
                f"{milliseconds:.2f}",
                f"{milliseconds if str(number) == '0' else handover:.2f}",
            ]
        )
    return rows


def _trial_rows(report: Report) -> list[list[str]]:
    rows = []
    for trial in report["trials"]:
        ratio = trial["ratio"]
        time = (
            f"{ratio['median']:.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})"
            if ratio
            else "not tried"
        )
        gain = f"{trial['expected_gain']:.2f} x" if trial["expected_gain"] else ""
        rows.append(
            [
                trial["name"],
                time,
                gain,
                trial["note"].splitlines()[-1].strip() if trial["note"] else "",
            ]
        )
    return rows


def _proposal_text(report: Report) -> str:
    proposal = report["proposal"]
    if not proposal:
        return "proposal   none: nothing that was measured would make a step shorter by a twentieth"
    lines = [f"proposal   {place}: {_value(value)}" for place, value in proposal["changes"].items()]
    lines += [f"           {reason}" for reason in proposal["reasons"]]
    lines.append(
        f"           expected: {_ms(proposal['expected_step_ms'])} a step, {proposal['expected_gain']:.2f} times as fast"
    )
    return "\n".join(lines)


def _value(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _range(spread: Report) -> str:
    return f"{spread['low']:.1f} to {spread['high']:.1f} ms"
