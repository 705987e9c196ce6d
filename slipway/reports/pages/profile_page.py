"""Shows a training profile, for a terminal and as a page: parts of a step, bottleneck, proposal."""

from collections.abc import Mapping
from typing import Any

from slipway.reports.console import text_table
from slipway.reports.pages.charts import StackedBar, stacked_bars
from slipway.reports.pages.html_page import Html, figure, page, paragraph, section, table, tiles

_PARTS = {
    "data": "waiting for the batch",
    "copy": "copy to the device",
    "forward": "forward and loss",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "other": "loop and ends of epochs",
}
_RAW_PARTS = {
    "read": "reading it from the disk",
    "decode": "decoding it",
    "transform": "your transform",
    "resize": "fitting it to its size",
}
_PART_COLUMNS = ["part", "ms", "lowest", "highest", "fraction"]
_LOADER_COLUMNS = ["loader processes", "ms for a batch", "ms of the trainer, at best"]
_TRIAL_COLUMNS = ["trial", "compute time", "expected gain", "note"]
_NO_PROPOSAL = "nothing that was measured would make a step shorter by a twentieth"
_METHOD = (
    "Times are medians over rounds, with the lowest and the highest. "
    "A gain is how many times as fast a step becomes."
)
Report = Mapping[str, Any]


def profile_text(report: Report) -> str:
    """Format the content of `reports/profile.json` for a terminal."""
    step, bottleneck = report["account"]["step_ms"], report["bottleneck"]
    blocks = [
        f"step       {_ms(step['median'])} ({_range(step)}), "
        f"{report['account']['rows_per_second']:,.0f} rows/s, {report['runs_as']}",
        text_table(_PART_COLUMNS, _part_rows(report), "  "),
        f"bottleneck {bottleneck['name']}: {bottleneck['text']}",
        *(f"compute    {line}" for line in _utilisation_lines(report["utilisation"])),
        text_table(_LOADER_COLUMNS, _loader_rows(report), "  "),
    ]
    if report["trials"]:
        blocks.append(text_table(_TRIAL_COLUMNS, _trial_rows(report), "  "))
    blocks += [f"data       {line}" for line in _raw_lines(report["raw"])]
    if proposal := report["proposal"]:
        changes = proposal["changes"].items()
        blocks += [f"proposal   {place}: {_value(value)}" for place, value in changes]
        blocks += [f"           {reason}" for reason in proposal["reasons"]]
        blocks.append(
            f"           expected: {_ms(proposal['expected_step_ms'])} a step, "
            f"{proposal['expected_gain']:.2f} times as fast"
        )
    else:
        blocks.append(f"proposal   none: {_NO_PROPOSAL}")
    if proof := report["proof"]:
        gain = proof["measured_gain"]
        measured = f"measured {gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
        blocks.append(f"proof      expected {proof['expected_gain']:.2f} times as fast, {measured}")
    blocks += [f"note       {note}" for note in report["notes"]]
    return "\n".join(blocks)


def profile_page(report: Report) -> str:
    """Return the HTML page of the content of `reports/profile.json`."""
    sections = [_account(report), _proposal(report), _loader(report)]
    if report["trials"]:
        shown = table(_TRIAL_COLUMNS, _trial_rows(report), numeric=_TRIAL_COLUMNS[1:3])
        sections.append(section("Trials", shown))
    if report["raw"]:
        lines = map(paragraph, _raw_lines(report["raw"]))
        sections.append(section("The data before the packed store", *lines))
    notes = (paragraph(note, "soft") for note in [*report["notes"], _METHOD])
    sections.append(section("How to read this", *notes))
    return page("Training profile", f"{report['runs_as']}; {report['machine']}", sections)


def _account(report: Report) -> Html:
    account, bottleneck = report["account"], report["bottleneck"]
    step = account["step_ms"]
    numbers = [
        ("step", _ms(step["median"]), f"{_range(step)}, {account['rounds']} rounds"),
        ("rows per second", f"{account['rows_per_second']:,.0f}", ""),
        ("bottleneck", bottleneck["name"], f"{bottleneck['fraction']:.0%} of a step"),
    ]
    if used := report["utilisation"]:
        fraction = f"{used['fraction']['median']:.0%}"
        numbers.append(("of the rate of matrix products", fraction, used["dtype"]))
    bars = [StackedBar("present", _medians(account))]
    if report["proposal"]:
        bars.append(StackedBar("expected", {"": report["proposal"]["expected_step_ms"]}))
    if report["proof"]:
        bars.append(StackedBar("measured", _medians(report["proof"]["account"])))
    chart = figure(
        stacked_bars(bars, "ms"),
        "Where a step's time goes",
        "Expected and measured are with the proposal below.",
    )
    return section(
        "A training step",
        tiles(numbers),
        paragraph(bottleneck["text"] + ".", "note"),
        *(paragraph(line + ".", "note") for line in _utilisation_lines(report["utilisation"])),
        chart,
        table(_PART_COLUMNS, _part_rows(report), numeric=_PART_COLUMNS[1:]),
    )


def _utilisation_lines(used: Report | None) -> list[str]:
    if used is None:
        return []
    fraction, number = used["fraction"], used["num_devices"]
    speed = used["rates"][used["dtype"]] * number * fraction["median"]
    multiply = f"{number} GPUs multiply" if number > 1 else "the machine multiplies"
    rates = ", ".join(f"{name} {_flop(rate)}/s" for name, rate in used["rates"].items())
    return [
        f"{_flop(used['step_flop'])} a step, {_flop(speed)}/s: {fraction['median']:.0%} "
        f"({fraction['low']:.0%} to {fraction['high']:.0%}) of the rate at which {multiply} "
        f"matrices in {used['dtype']}",
        f"products of matrices {'on a GPU' if number > 1 else 'here'}: {rates}",
    ]


def _flop(value: float) -> str:
    """Format floating-point operations, such as "183.2 GFLOP"."""
    return f"{value / 1e12:,.4g} TFLOP" if value >= 1e12 else f"{value / 1e9:,.4g} GFLOP"


def _medians(account: Report) -> dict[str, float]:
    return {_PARTS[part]: spread["median"] for part, spread in account["parts_ms"].items()}


def _proposal(report: Report) -> Html:
    proposal, proof = report["proposal"], report["proof"]
    if not proposal:
        return section("Proposal", paragraph(f"None: {_NO_PROPOSAL}.", "good"))
    expected = f"{_ms(proposal['expected_step_ms'])} a step"
    boxes = [("expected", f"{proposal['expected_gain']:.2f} x", expected)]
    if proof:
        gain = proof["measured_gain"]
        bounds = f"{gain['low']:.2f} to {gain['high']:.2f}"
        boxes.append(("measured", f"{gain['median']:.2f} x", bounds))
    rows = [[place, _value(value)] for place, value in proposal["changes"].items()]
    reasons = (paragraph(reason + ".") for reason in proposal["reasons"])
    return section("Proposal", tiles(boxes), table(["params.yaml", "value"], rows), *reasons)


def _loader(report: Report) -> Html:
    loader = report["loader"]
    detail = (
        f"In the trainer's process a batch takes {loader['processor_ms']:.2f} ms of processor "
        f"time; reading its stored rows takes {loader['read_ms']:.2f} ms, "
        f"of which {loader['read_processor_ms']:.2f} ms are processor time."
    )
    shown = table(_LOADER_COLUMNS, _loader_rows(report), numeric=_LOADER_COLUMNS)
    return section("The loader by itself", shown, paragraph(detail, "note"))


def _raw_lines(raw: Report | None) -> list[str]:
    if raw is None:
        return []
    if raw["times"] is None:
        return [f"precompute was {raw['note']}"]
    times = raw["times"]
    parts = {name: times[f"{name}_ms"] for name in _RAW_PARTS}
    shown = {name: value for name, value in parts.items() if value or name != "transform"}
    named = ", ".join(f"{name} {value:.2f} ms" for name, value in shown.items())
    largest = _RAW_PARTS[max(parts, key=lambda name: parts[name])]
    workers = raw["num_workers"] or "one per core"
    lines = [
        f"an image before it is packed: {named}; most of it is {largest} ({times['rows']} images)",
        f"precompute of {raw['num_images']:,} images is expected to take "
        f"{raw['expected_seconds']:.1f} s, once (num_workers: {workers})",
    ]
    if better := raw["better_num_workers"]:
        gain = raw["expected_seconds"] / raw["better_seconds"]
        lines.append(
            f"precompute.num_workers: {better} would make it {raw['better_seconds']:.1f} s, "
            f"{gain:.2f} times as fast"
        )
    return lines


def _part_rows(report: Report) -> list[list[str]]:
    parts = report["account"]["parts_ms"]
    total = sum(spread["median"] for spread in parts.values()) or 1.0
    rows = []
    for part, spread in parts.items():
        times = [f"{spread[key]:.2f}" for key in ("median", "low", "high")]
        rows.append([_PARTS[part], *times, f"{spread['median'] / total:.0%}"])
    return rows


def _loader_rows(report: Report) -> list[list[str]]:
    handover = report["loader"]["handover_ms"]
    return [
        [str(number), f"{batch:.2f}", f"{batch if str(number) == '0' else handover:.2f}"]
        for number, batch in report["loader"]["batch_ms"].items()
    ]


def _trial_rows(report: Report) -> list[list[str]]:
    rows = []
    for trial in report["trials"]:
        time = "not tried"
        if ratio := trial["ratio"]:
            time = f"{ratio['median']:.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})"
        gain = f"{trial['expected_gain']:.2f} x" if trial["expected_gain"] else ""
        note = trial["note"].splitlines()[-1].strip() if trial["note"] else ""
        rows.append([trial["name"], time, gain, note])
    return rows


def _value(value: Any) -> str:
    """Format a value as in params.yaml."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _range(spread: Report) -> str:
    return f"{spread['low']:.1f} to {spread['high']:.1f} ms"
