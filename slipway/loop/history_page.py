"""The page of `slipway history`: served models, decisions, rollbacks and the pending request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipway.loop.decision_page import PAGE, awaited
from slipway.loop.decisions import moment, read_request
from slipway.loop.journal import FOLDER, JOURNAL, Cycle, cycles, read_journal
from slipway.reports.pages.html_page import Html, commands, page, paragraph, section, table, tiles
from slipway.serving.rollout.records.entries import Entry, Served, in_time
from slipway.serving.rollout.state import name_of

_DIGITS = 12  # shown of a digest; `slipway history --at TIME` prints it in full
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_UNKNOWN = Served(version=name_of(None))
_CHAIN = (
    "Each line of both files has the SHA-256 of the line before it. All lines were checked when "
    "this page was written; a changed, removed or added line would have stopped it. Whoever may "
    "write to SLIPWAY_STATE could write all lines again. So compare the digest of the last line "
    "with one that was noted elsewhere."
)


@dataclass(frozen=True)
class ServedPeriod:
    """A period in which one model was the stable model."""

    served: Served
    begin: Entry
    proposed: Entry | None  # None: the service started with it
    end: float | None  # seconds since 1970; None: until now


def history_page(state: Path, entries: Sequence[Entry], last_digest: str, now: float) -> str:
    """Return the HTML page of the history.

    Args:
        entries: the checked entries of the history, at least one.
        last_digest: SHA-256 of the line of the last entry, in hex.
        now: seconds since 1970.

    Raises:
        LoopError: the journal of the loop is damaged; the message names the line.
    """
    folder = state / FOLDER
    steps = read_journal(folder / JOURNAL)
    done = cycles(steps)
    entries = in_time(entries)
    last, periods = entries[-1], served_periods(entries)
    numbers = [
        ("serves", periods[-1].served.version, f"since {moment(periods[-1].begin.time)}"),
        ("candidate", last.candidate or "none", f"{100 * last.fraction:g} % of the requests"),
        ("history", _lines(len(entries)), "unbroken"),
        ("loop", _lines(len(steps)), "unbroken" if steps else "no journal"),
    ]
    sections = [
        section(
            "Now",
            tiles(numbers),
            paragraph(_CHAIN, "note"),
            paragraph(f"Last line of the history: {last_digest}", "note"),
        ),
        _waiting(folder, done[-1], now) if done else None,
        section("Served models", _served(periods), _origins(periods)),
        section("Decisions", _decisions(done)) if done else None,
        section("All events", _events(entries)),
    ]
    return page("History of the service", f"{state.absolute()}, {moment(now)}", sections)


def served_periods(entries: Sequence[Entry]) -> list[ServedPeriod]:
    """Return one period for each stable model in turn, the oldest first."""
    periods: list[ServedPeriod] = []
    for place, entry in enumerate(entries):
        served = entry.stable or _UNKNOWN
        before = periods[-1] if periods else None
        if entry.what == "stopped":
            continue
        if before and before.served == _UNKNOWN and entry.what == "started":
            periods[-1] = replace(before, served=served)  # the model has a name only once it runs
            continue
        if before and before.served.version == served.version:
            continue
        if before:
            periods[-1] = replace(before, end=entry.time)
        proposed = None
        if entry.what != "started":
            earlier = reversed(entries[: place + 1])
            proposed = next((one for one in earlier if one.what == "proposed"), None)
        periods.append(ServedPeriod(served, entry, proposed, None))
    return periods


def _waiting(folder: Path, cycle: Cycle, now: float) -> Html | None:
    """Return the section of the cycle's request; None if no decision on it is possible now."""
    if not cycle.is_open or not cycle.has("requested") or cycle.has("decided"):
        return None
    path = folder / cycle.detail("requested")["path"]
    request = read_request(path)
    if now >= request.expires:
        return None
    return awaited(
        request,
        paragraph("The page of the request has cause, comparison and commands:", "note"),
        commands(str(path.with_name(PAGE).absolute())),
    )


def _served(periods: Sequence[ServedPeriod]) -> Html:
    rows = []
    for period in reversed(periods):
        by = period.proposed or period.begin
        end = "now" if period.end is None else _time(period.end)
        begin = _time(period.begin.time)
        rows.append([period.served.version, begin, end, by.by or "the service", by.reason])
    return table(["model", "from (UTC)", "until", "by", "reason"], rows)


def _origins(periods: Sequence[ServedPeriod]) -> Html:
    """Return a table with the origin of each model, the latest first."""
    rows = {}
    for served in (period.served for period in reversed(periods)):
        code = (served.git_revision or "unknown")[:_DIGITS]
        rows[served.version] = [
            served.version,
            served.gates or "unknown",
            (served.certificate or "unknown")[:_DIGITS],
            (served.data or "unknown")[:_DIGITS],
            f"{code} with local changes" if served.git_dirty else code,
        ]
    return table(["model", "gates", "certificate", "data", "code"], list(rows.values()))


def _decisions(done: Sequence[Cycle]) -> Html:
    """Return a table of the loop's cycles and decisions, the latest first."""
    columns = ["cycle", "begun", "cause", "candidate", "compared", "decision", "outcome"]
    return table(columns, [_decision_cells(cycle) for cycle in reversed(done)])


def _decision_cells(cycle: Cycle) -> list[str]:
    def part(step: Any, write: Any) -> str:
        return write(cycle.detail(step)) if cycle.has(step) else ""

    return [
        str(cycle.number),
        moment(cycle.steps[0].time)[:10].replace("-", _HYPHEN),
        part("triggered", lambda detail: "; ".join(detail["reasons"])),
        part("trained", lambda detail: detail["version"]),
        part("compared", lambda detail: detail["why"]),
        part("decided", _verdict),
        part("ended", lambda detail: detail["outcome"].replace("_", " ")) or "open",
    ]


def _verdict(decision: dict[str, Any]) -> str:
    signed = "signed" if decision["signature"] else "not signed"
    return f"{decision['verdict']} by {decision['by']} ({signed}): {decision['reason']}"


def _events(entries: Sequence[Entry]) -> Html:
    columns = ["line", "time (UTC)", "event", "model", "by", "reason", "fraction"]
    rows = [
        [
            str(entry.number),
            _time(entry.time),
            entry.what.replace("_", " "),
            entry.model,
            entry.by or entry.service or "the service",
            entry.reason,
            f"{100 * entry.fraction:g} %" if entry.candidate else "",
        ]
        for entry in reversed(entries)
    ]
    return table(columns, rows, ["line", "fraction"])


def _lines(number: int) -> str:
    return f"{number} line{'s' * (number != 1)}"


def _time(seconds: float) -> str:
    """Format a time for a column whose title says UTC."""
    return moment(seconds).removesuffix(" UTC")
