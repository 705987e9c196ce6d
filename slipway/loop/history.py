"""`slipway history`: lists the models that a service served, when, and who decided it."""

import hashlib
import json
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from slipway.serving.rollout.records.database import Recorded, read_recorded
from slipway.serving.rollout.records.entries import Entry, Served, entry_at, in_time, serving_at
from slipway.serving.rollout.reports import iso
from slipway.serving.rollout.state import RolloutError, name_of
from slipway.serving.settings import read_settings
from slipway.system import files
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.command_run import run_command


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run `slipway history`."""
    options = _parser().parse_args(arguments)
    if options.html and options.at is not None:
        _parser().error("--html shows all of the history, expected no --at with it")
    if options.html:
        run_command(lambda: _write_page(read_settings().state, options.html))
    else:
        run_command(lambda: _print(read_settings().state, options.at, as_json=options.json))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway history",
        description="Print what was served when, and who decided it. See docs/how-to/rollout.md.",
    )
    parser.add_argument(
        "--at",
        type=_moment,
        metavar="TIME",
        help="what was served then: ISO 8601, such as 2026-11-26T15:00; UTC without an offset",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, with the decisions of the loop"
    )
    return parser


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a time, expected one such as 2026-11-26T15:00"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _write_page(state: Path, out: Path) -> None:
    from slipway.loop.history_page import history_page  # imported only here: it needs more packages

    recorded = _checked(state)
    page = history_page(state, recorded.entries, _last_digest(recorded), time.time())
    files.write_text(out, page)
    print(f"wrote {out}")


def _print(state: Path, moment: float | None, *, as_json: bool) -> None:
    recorded = _checked(state)
    entries = recorded.entries
    if moment is not None:
        ordered = in_time(entries)
        entry = entry_at(ordered, moment)
        if entry is None:
            raise RolloutError(
                f"the history begins at {iso(ordered[0].time)}, after {iso(moment)}. Name a later "
                "time."
            )
        print(
            entry.model_dump_json(indent=2)
            if as_json
            else _described(ordered[: ordered.index(entry) + 1])
        )
    elif as_json:
        print(json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2))
    else:
        print("\n".join(map(_in_one_line, entries)))
        digest = _last_digest(recorded)
        print(f"each line follows the one before; digest of the last: {digest}")


def _checked(state: Path) -> Recorded:
    """Return the history; RolloutError if it has no entries, or if the last ones are missing."""
    recorded = read_recorded(state)
    if not recorded.entries:
        raise RolloutError(
            f"there is no history in {recorded.source}. A service writes it when it starts; give "
            "this command the SLIPWAY_STATE and SLIPWAY_DATABASE_URL of the service."
        )
    num_events = recorded.rollout.num_events
    if missing := num_events - max(entry.event or 0 for entry in recorded.entries):
        raise RolloutError(
            f"{recorded.source} lacks the last {missing} of {num_events} events that the rollout's "
            "state counts: it was cut, or could not be written. The next change of the rollout "
            "adds the events that are still known."
        )
    return recorded


def _last_digest(recorded: Recorded) -> str:
    """Return the SHA-256 of the last line, in hex."""
    return hashlib.sha256(recorded.lines[-1]).hexdigest()


def _described(entries: Sequence[Entry]) -> str:
    """Describe the model that was served after the last of `entries`, and who proposed it."""
    last = entries[-1]
    stable = last.stable or Served(version=name_of(None))
    lines = [("served", stable.version)]
    if last.candidate:
        lines.append(("candidate", f"{last.candidate}, {100 * last.fraction:g} % of the requests"))
    lines += [("served by", f"{name}, {version}") for name, version in serving_at(entries).items()]
    lines.append(("last entry", _in_one_line(last)))
    for entry in reversed(entries):
        if (entry.what, entry.model) == ("proposed", stable.version):
            lines.append(("proposed by", f"{entry.by or 'unknown'}, {entry.reason}"))
            break
    code = stable.git_revision or "unknown"
    lines += [
        ("gates", stable.gates or "unknown"),
        ("certificate", stable.certificate or "unknown"),
        ("data", stable.data or "unknown"),
        ("code", f"{code} with local changes" if stable.git_dirty else code),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _in_one_line(entry: Entry) -> str:
    what, by = entry.what.replace("_", " "), f" by {entry.by}" if entry.by else ""
    at = f" on {entry.service}" if entry.service else ""
    return f"{iso(entry.time)}  {entry.model} {what}{at}{by}: {entry.reason}"
