"""`slipway history`: lists the models that a service served, when, and who decided it."""

import hashlib
import json
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from slipway.config.command import run_command
from slipway.serving.rollout.history import (
    HISTORY,
    Entry,
    Served,
    complete_lines,
    entry_at,
    read_history,
)
from slipway.serving.rollout.reports import iso
from slipway.serving.rollout.state import FILE, RolloutError, name_of, read_rollout
from slipway.serving.settings import read_settings
from slipway.system import files
from slipway.system.arguments import CommandParser
from slipway.system.broken_pipe import quiet_when_unread


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

    entries = _checked(state)
    page = history_page(state, entries, _last_digest(state, entries), time.time())
    files.write_text(out, page)
    print(f"wrote {out}")


def _print(state: Path, moment: float | None, *, as_json: bool) -> None:
    entries = _checked(state)
    if moment is not None:
        entry = entry_at(entries, moment)
        if entry is None:
            raise RolloutError(
                f"the history begins at {iso(entries[0].time)}, after {iso(moment)}. Name a later "
                "time."
            )
        print(entry.model_dump_json(indent=2) if as_json else _described(entries[: entry.number]))
    elif as_json:
        print(json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2))
    else:
        print("\n".join(map(_in_one_line, entries)))
        digest = _last_digest(state, entries)
        print(f"each line follows the one before; digest of the last: {digest}")


def _checked(state: Path) -> list[Entry]:
    """Return all entries; RolloutError if there are none, or if the last ones are missing."""
    path = state / HISTORY
    entries, rollout = read_history(path), read_rollout(state)
    if not entries:
        raise RolloutError(
            f"there is no history in {state}. A service writes it when it starts; give this "
            "command the SLIPWAY_STATE of the service."
        )
    if missing := rollout.num_events - max(entry.event or 0 for entry in entries):
        raise RolloutError(
            f"{path} lacks the last {missing} of {rollout.num_events} events that {FILE} counts: "
            f"{HISTORY} was cut, or could not be written. The next change of the rollout adds the "
            "events that are still known."
        )
    return entries


def _last_digest(state: Path, entries: Sequence[Entry]) -> str:
    """Return the SHA-256 of the last entry's line; later lines of a running service are ignored."""
    return hashlib.sha256(complete_lines(state / HISTORY)[len(entries) - 1]).hexdigest()


def _described(entries: Sequence[Entry]) -> str:
    """Describe the model that was served after the last of `entries`, and who proposed it."""
    last = entries[-1]
    stable = last.stable or Served(version=name_of(None))
    lines = [("served", stable.version)]
    if last.candidate:
        lines.append(("candidate", f"{last.candidate}, {100 * last.share:g} % of the requests"))
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
    return f"{iso(entry.time)}  {entry.model} {what}{by}: {entry.reason}"
