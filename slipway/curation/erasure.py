"""`slipway dataset erase`: removes one person's rows, and lists the models trained on them.

Shows the rows and asks before anything is removed. The report is written before the first row is
removed, so a call that is killed and repeated ends with the same report. See
docs/how-to/erase.md.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from slipway.artifacts.bundle import load_bundle
from slipway.config.params import load_params
from slipway.config.sections import DataParams
from slipway.config.stage_graph import read_pipeline
from slipway.curation.models_of_rows import ModelOfRows, RowSearch, RowSelection, models_of
from slipway.data.erasure.request_rows import RequestContents
from slipway.data.erasure.rows import FoundRows, named_files, raw_tables, remove
from slipway.experiments.repository import tracked_files
from slipway.inputs.contract import InputContract
from slipway.loop.journal import FOLDER, JOURNAL, LoopError, cycles, read_journal
from slipway.loop.lease import loop_lock
from slipway.loop.steps import DATA
from slipway.system import files
from slipway.system.command_line import CommandParser
from slipway.system.command_run import run_command
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import DataError, SchemaError
from slipway.traffic import erasure
from slipway.traffic.collect import add_service_paths, input_cells
from slipway.traffic.label_queue import QUEUE, LabelQueue
from slipway.traffic.monitoring_records import DATABASE
from slipway.traffic.request_log import (
    DamagedLine,
    LoggedRequest,
    RequestRows,
    has_row,
    read_requests,
)
from slipway.traffic.selection import Content, content_digest, request_contents

REPORTS = "erasures"  # subfolder of the state folder
_COLLECTED = Path("data/collected.parquet")  # the default input of `slipway dataset merge`
_MAX_SHOWN = 5


class RemovedRows(Contract):
    """The number of rows that an erasure removes from one place."""

    place: str
    what: str
    count: int


class ErasureReport(Contract):
    """The report of an erasure; it does not contain the name of the person."""

    format_version: Literal[1]
    selection: str  # SHA-256 of the selection, which identifies a repeated call
    created: str  # ISO 8601, UTC
    removed: list[RemovedRows]
    left: list[str]  # rows and records that stay, each with the reason
    models: list[ModelOfRows]
    stages: list[str]  # stages that run again because their data changed
    next: list[str]  # commands that the user has to run to remove further copies


@dataclass
class Erasure:
    """The rows that were found, and the steps that remove them.

    Raw data is removed first and the request log last, because a repeated call needs the log to
    find the rows.
    """

    report: ErasureReport
    steps: list[Callable[[], object]] = field(default_factory=list)

    def add(self, place: Path, what: str, count: int, step: Callable[[], object]) -> None:
        """Add the step that removes `count` rows from a place; does nothing for 0 rows."""
        if count:
            self.report.removed.append(RemovedRows(place=str(place), what=what, count=count))
            self.steps.append(step)


def main(arguments: list[str]) -> None:
    """Run `slipway dataset erase`."""
    options = _parser().parse_args(arguments)
    run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    folder = options.state / REPORTS
    files.make_private_directory(folder)
    with (
        files.lock(folder / "erase.lock", "`slipway dataset erase`"),
        loop_lock(options.state),
    ):
        _require_closed_loop(options.state)
        erasure_of_rows = find(options)
        report = erasure_of_rows.report
        pending = _pending(report, options.state)
        if pending.exists():
            report = _joined(_read(pending), report)
        if not report.removed:
            raise DataError(
                "no row of the selection was found, expected at least one in the data or in the "
                f"records of the service ({options.state}). Check the spelling: groups, ids and "
                "names are compared as a whole. If they were erased before, the report is in "
                f"{folder}."
            )
        if not options.json:
            print(text_of(report))
        if not (options.yes or _is_confirmed(as_json=options.json)):
            if options.json:
                print(files.canonical_json(report.model_dump(mode="json")), end="")
            print("nothing was removed; --yes removes these rows", file=sys.stderr)
            return
        out = carry_out(erasure_of_rows, report, options.state, options.report)
        if options.json:
            print(files.canonical_json(report.model_dump(mode="json")), end="")
        else:
            print(f"removed; the report is {out}")


def carry_out(found: Erasure, report: ErasureReport, state: Path, out: Path | None) -> Path:
    """Remove the rows, and return the path of the report.

    A pending report is written before the first step, for a call that is killed and repeated.
    """
    pending = _pending(report, state)
    _write(pending, report)
    for step in found.steps:
        step()
    path = out or state / REPORTS / f"{report.created.replace(':', '')}.json"
    _write(path, report)
    pending.unlink()
    return path


def _pending(report: ErasureReport, state: Path) -> Path:
    return state / REPORTS / f"{report.selection[:16]}.pending.json"


def find(options: argparse.Namespace) -> Erasure:
    """Find the selected rows in the data and in the service's records, without removing any."""
    data = load_params().data
    selection = _selection(options)
    if selection.groups and data.group_column is None:
        raise DataError(
            "--group needs the column of the groups, but data.group_column of params.yaml is null. "
            "Set it to the column that names a person, or give --request-id or --file."
        )
    report = ErasureReport(
        format_version=1,
        selection=selection.digest,
        created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        removed=[],
        left=[],
        models=[],
        stages=[],
        next=[],
    )
    found, raw = Erasure(report), raw_tables(data)
    contents = _contents(options, selection, report)
    search = RowSearch(data, selection, contents, raw)
    searched = {path: search.rows_of(path) for path in _tables(options, raw)}
    changed: list[Path] = []
    for path, rows in searched.items():
        if rows is not None:
            report.left.extend(_left_in(rows))
            step = partial(remove, rows, data)
            found.add(path, "rows", rows.num_rows, step)
            found.add(path.parent, "image files", len(rows.images), lambda: None)
            changed += [path] * bool(rows.num_rows)
    named = named_files(data, selection.names)
    found.add(Path(data.path), "files", len(named), partial(_unlink, named))
    changed += named
    _add_records(options, selection, found)
    report.models.extend(models_of(search, changed, options.bundle, options.state))
    _add_advice(report, data, changed)
    return found


def text_of(report: ErasureReport) -> str:
    """Describe a report for the console."""
    width = max(len(one.place) for one in report.removed)
    lines = [f"{one.place:<{width}}  {one.count} {one.what}" for one in report.removed]
    if report.left:
        lines += ["left:", *(f"  {text}" for text in report.left)]
    if report.models:
        lines += ["models with these rows in their data:"]
        lines += [f"  {one.text}" for one in report.models]
    if report.stages:
        lines += [f"stages that run again: {', '.join(report.stages)}"]
    return "\n".join([*lines, *(f"then: {text}" for text in report.next)])


def _selection(options: argparse.Namespace) -> RowSelection:
    ids = list(options.request_id)
    for path in options.request_ids:
        if not path.is_file():
            raise DataError(
                f"--request-ids {path} is not a file, expected one with an id per line. Check its "
                "path."
            )
        ids += [line.strip() for line in path.read_text().splitlines() if line.strip()]
    requests: dict[str, frozenset[int] | None] = {}
    for name, item in options.request_item:
        requests[name] = (requests.get(name) or frozenset()) | {_item_number(name, item)}
    requests |= dict.fromkeys(ids)
    if not (options.group or requests or options.file):
        raise DataError(
            "no row is selected, expected --group, --request-id, --request-ids, --request-item or "
            "--file. See `slipway dataset erase --help`."
        )
    return RowSelection(frozenset(options.group), requests, tuple(options.file))


def _item_number(request_id: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise DataError(
            f"--request-item {request_id} {text} names no row, expected the number that feedback "
            "has as `item`: 0 for the first row of the request, 1 for the second."
        )
    return int(text)


def _tables(options: argparse.Namespace, raw: Sequence[Path]) -> list[Path]:
    """Return the paths of all tables that may hold the person's rows.

    These are the raw tables, those in `--also`, and those that `slipway dataset collect`, `slipway
    dataset merge` and `slipway loop` have written.
    """
    if missing := [path for path in options.also if not path.is_file()]:
        raise DataError(f"--also {missing[0]} is not a file, expected a table. Check its path.")
    written = [_COLLECTED, *sorted(DATA.glob("*/*.parquet")), *options.also]
    found = [*raw, *(path for path in written if path.is_file())]
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def _contents(
    options: argparse.Namespace, selection: RowSelection, report: ErasureReport
) -> RequestContents:
    """Return the contents of the selected rows that occur in no other logged row."""
    rows = selection.requests
    if not rows or options.request_log is None:
        return RequestContents({})
    own: list[LoggedRequest] = []
    manifest = load_bundle(options.bundle).manifest
    contents: dict[str, Content] = {}
    for request in erasure.logged_requests(options.request_log, rows):
        own.append(request)
        for item, content in _items(request, manifest.input):
            if has_row(rows, request.request_id, item):
                contents[content_digest(content)] = content
    _require_items(own, rows)
    _require_single(own, rows, reused=options.reused_ids, several=options.whole_requests)
    if contents:
        for other in read_requests(options.request_log):
            if isinstance(other, DamagedLine):
                continue
            for item, content in _items(other, manifest.input):
                is_other = not has_row(rows, other.request_id, item)
                if is_other and contents.pop(content_digest(content), None) is not None:
                    report.left.append(
                        f"collected rows equal to row {item} of {other.request_id}, which is not "
                        "selected"
                    )
    left = list(contents.values())
    images = [content for content in left if isinstance(content, bytes)]
    return RequestContents(input_cells(left, manifest), images)


def _items(request: LoggedRequest, contract: InputContract) -> Iterable[tuple[int, Content]]:
    try:
        return request_contents(request, contract).items()
    except ValueError:  # a request to another kind of model
        return ()


def _require_items(requests: Sequence[LoggedRequest], rows: RequestRows) -> None:
    """Raise DataError if a logged request has no row of a selected number."""
    for request in requests:
        beyond = [item for item in rows[request.request_id] or () if item >= request.num_rows]
        if beyond:
            raise DataError(
                f"the request {request.request_id} has {request.num_rows} rows, expected numbers "
                f"from 0 to {request.num_rows - 1}, not {beyond[0]}. Correct --request-item."
            )


def _require_single(
    requests: Sequence[LoggedRequest], rows: RequestRows, *, reused: bool, several: bool
) -> None:
    """Raise DataError if an id names several requests or rows: they may concern several people."""
    times: dict[str, list[str]] = {}
    for request in requests:
        times.setdefault(request.request_id, []).append(f"{request.time:%Y-%m-%d %H:%M:%S}")
    for request in requests:
        if request.num_rows > 1 and rows[request.request_id] is None and not several:
            raise DataError(
                f"the request {request.request_id} has {request.num_rows} rows, expected one: they "
                f"may be of several people. --request-item {request.request_id} 0 removes the "
                "first row, --whole-requests removes all of them."
            )
    for name, found in times.items():
        if len(found) > 1 and not reused:
            raise DataError(
                f"{len(found)} requests have the id {name} ({', '.join(found[:_MAX_SHOWN])}), "
                "expected one: callers may reuse an id for another person. Check them with "
                f"`slipway replay {name}`; --reused-ids removes all of them."
            )


def _left_in(rows: FoundRows) -> Iterator[str]:
    for number in rows.unclear[:_MAX_SHOWN]:
        yield f"row {number} of {rows.path}, which is malformed and contains the group: check it"
    for image in rows.shared[:_MAX_SHOWN]:
        yield f"{image}, which a row of another group names as well"


def _add_records(options: argparse.Namespace, selection: RowSelection, found: Erasure) -> None:
    """Add the steps that remove the service's records; the request log comes last."""
    rows, state, left = selection.requests, options.state, found.report.left
    if selection.groups:
        left.append(
            "requests of the groups in the records of the service: requests have no group, name "
            "them with --request-id"
        )
    if not rows:
        return
    counts = erasure.count_records(state, rows)
    erase = partial(erasure.erase_records, state, rows)
    for table, count in counts.items():
        found.add(state / DATABASE, table, count, erase)
    if (state / QUEUE).is_file():
        queue = LabelQueue(state / QUEUE)
        count = sum(has_row(rows, *row.key[:2]) for row in queue.rows())
        found.add(state / QUEUE, "rows to label", count, partial(queue.remove, rows))
    left.append("sums over many rows, without ids: drift windows, measured quality, metrics")
    left += [
        f"{path}, a damaged database that the service deletes by its age"
        for path in sorted(state.glob(f"{DATABASE}.*Z"))
    ]
    whole = {name: items for name, items in rows.items() if items is None}
    if options.access_log is not None:
        step = partial(erasure.erase_lines, options.access_log, whole)
        count = erasure.count_lines(options.access_log, whole)
        found.add(options.access_log, "requests", count, step)
        if len(whole) < len(rows):
            left.append("lines of the access log on requests of other rows, too: they hold no row")
    if options.request_log is not None:
        step = partial(erasure.erase_lines, options.request_log, rows)
        what = "requests" if len(whole) == len(rows) else "requests with these rows"
        found.add(options.request_log, what, erasure.count_lines(options.request_log, rows), step)
    if options.request_log is None:
        left.append("the request log: --request-log or SLIPWAY_REQUEST_LOG_DIRECTORY is not set")


def _add_advice(report: ErasureReport, data: DataParams, changed: Sequence[Path]) -> None:
    """Add the stages that run again, and the commands that remove further copies of the rows."""
    if not changed:
        return
    root = Path(data.path)
    is_raw = any(path == root or path.is_relative_to(root) for path in changed)
    if is_raw:
        pipeline = read_pipeline()
        first = [name for name, deps in pipeline.deps.items() if data.path in deps]
        report.stages.extend(
            name
            for name in pipeline.outs
            if name in first or set(first) & set(pipeline.before(name))
        )
        if Path(f"{data.path}.dvc").exists():
            report.next.append(f"dvc add {data.path}")
        report.next.append("slipway run   # packed rows, reports and the model are made again")
    if data.checksums is not None:
        report.next.append(f"write {data.checksums} again: data.checksums has the old digests")
    if data.split_file is not None:
        report.next.append(f"remove the rows from {data.split_file}, if it names them")
    report.next.append(
        "dvc gc --workspace   # older versions in DVC's cache, of all experiments; with --cloud in "
        "its remote"
    )
    report.next.extend(
        f"remove {path} from the history of git, such as with git filter-repo"
        for path in tracked_files(changed)
    )


def _joined(before: ErasureReport, now: ErasureReport) -> ErasureReport:
    """Return the report of a killed call, with what only this call found."""
    known = {(one.place, one.what) for one in before.removed}
    versions = {one.version for one in before.models}
    return before.model_copy(
        update={
            "removed": [
                *before.removed,
                *(one for one in now.removed if (one.place, one.what) not in known),
            ],
            "models": [*before.models, *(one for one in now.models if one.version not in versions)],
        }
    )


def _require_closed_loop(state: Path) -> None:
    last = next(reversed(cycles(read_journal(state / FOLDER / JOURNAL))), None)
    if last is not None and last.is_open and last.has("collected"):
        raise LoopError(
            f"cycle {last.number} of the loop is open and has collected rows, expected none whose "
            "data could change. End it: slipway loop stop --reason erasure"
        )


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _is_confirmed(*, as_json: bool) -> bool:
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input("Remove these rows? [y/N] ").strip().lower() in ("y", "yes")


def _read(path: Path) -> ErasureReport:
    fix = "Remove the file; the report of the killed call is lost then."
    return parse_record(ErasureReport, path, path.read_bytes(), SchemaError, fix)


def _write(path: Path, report: ErasureReport) -> None:
    files.write_text(path, files.canonical_json(report.model_dump(mode="json")), files.PRIVATE)


def _parser() -> CommandParser:
    """Return the parser of the command's arguments."""
    parser = CommandParser(
        prog="slipway dataset erase",
        description="Remove one person's rows from the data and from the records of the service. "
        "Shows them and asks; without a terminal nothing is removed unless --yes is given. See "
        "docs/how-to/erase.md.",
    )
    for name, kind, metavar, text in (
        ("--group", str, "VALUE", "rows with this value in data.group_column"),
        ("--request-id", str, "ID", "a request"),
        ("--request-ids", Path, "FILE", "a file with one id per line"),
        ("--file", str, "NAME", "a file of data.path, such as cat/1.png"),
        ("--also", Path, "TABLE", "a further table to search"),
    ):
        parser.add_argument(
            name, type=kind, metavar=metavar, help=text, action="append", default=[]
        )
    parser.add_argument(
        "--request-item",
        nargs=2,
        metavar=("ID", "ITEM"),
        action="append",
        default=[],
        help="one row of a request, counted from 0 as in feedback",
    )
    parser.add_argument(
        "--reused-ids", action="store_true", help="remove all requests of an id that names several"
    )
    parser.add_argument(
        "--whole-requests", action="store_true", help="remove requests of several rows"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="the report to write")
    add_service_paths(parser, "--request-log", "--access-log", "--state", "--bundle")
    return parser
