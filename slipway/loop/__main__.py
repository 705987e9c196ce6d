"""`slipway loop`: takes every step of the loop that is possible now, then exits.

Run it regularly, by a timer, cron or CI, in the project's folder and with the SLIPWAY_ variables of
the service. See docs/how-to/loop.md.
"""

import argparse
import getpass
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipway.config.params import load_params
from slipway.loop.decision_page import PAGE
from slipway.loop.decisions import (
    REQUEST,
    PersonDecision,
    check_decision,
    moment,
    read_decision,
    read_request,
    signed,
)
from slipway.loop.journal import (
    FOLDER,
    JOURNAL,
    Cycle,
    LoopError,
    append_step,
    cycles,
    read_journal,
)
from slipway.loop.lease import lease, loop_lock
from slipway.loop.machine import NextStep, next_step
from slipway.loop.steps import DONE, LoopProject
from slipway.serving.request_log.logger import RequestLogSettings
from slipway.serving.settings import read_settings
from slipway.system import files
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.command_run import run_command
from slipway.system.errors import LockedError, SlipwayError

_CLOCK_S = 60.0  # the clock may go back by up to this many seconds between two calls


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run `slipway loop`."""
    options = _parser().parse_args(arguments)
    run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.command in ("approve", "reject") and options.request is not None:
        decision = _decision(options, files.sha256_file(options.request), options.request)
        _write(decision, options.out)
        return
    project = open_project()
    if options.command is None and not options.status:
        print(_line(advance(project)))
        return
    if options.status:
        print(status(project, as_json=options.json))
        return
    with loop_lock(project.settings.state):
        print(_command(project, options))


def open_project() -> LoopProject:
    """Open the project in the working directory.

    Raises LoopError if params.yaml has no section `loop`, or if the request log is not set.
    """
    params = load_params()
    if params.loop is None:
        raise LoopError(
            "params.yaml has no section loop, so the loop is off; expected its triggers and "
            "limits. Copy the section from docs/how-to/loop.md"
        )
    settings = read_settings([RequestLogSettings])
    request_log = settings.section(RequestLogSettings).request_log_directory
    if request_log is None:
        raise LoopError(
            "SLIPWAY_REQUEST_LOG_DIRECTORY is not set, expected the folder of the service's "
            "request log: without it there are no rows to train on. Give this command the "
            "SLIPWAY_ variables of the service."
        )
    return LoopProject(params, settings, request_log)


def advance(project: LoopProject, clock: Callable[[], float] = time.time) -> NextStep:
    """Take all steps that are possible now, and return the step that has to wait.

    If a step fails, its error is recorded in the journal and raised; the next call tries the step
    again. Raises LockedError while another process runs the loop, or if the database that several
    services share belongs to the loop of another SLIPWAY_STATE.
    """
    state = project.settings.state
    with loop_lock(state), lease(state) as require_lease:
        path = project.folder / JOURNAL
        while True:
            steps = read_journal(path)
            now = clock()
            if steps and now < steps[-1].time - _CLOCK_S:
                raise LoopError(
                    f"the clock says {moment(now)}, before the last step at "
                    f"{moment(steps[-1].time)}; expected a later time. Set the clock."
                )
            project.require_own_copy()
            last = next(reversed(cycles(steps)), None)
            step = next_step(last, project.facts(last, now), project.loop)
            if step.action == "wait":
                return step
            cycle = _cycle_of(step, last)
            require_lease()
            try:
                detail = project.take(step, cycle, now)
            except LockedError:
                raise
            except SlipwayError as error:
                if step.action not in ("trigger", "end"):
                    failed = {"step": step.action, "reason": str(error)}
                    append_step(path, cycle.number, "failed", failed, clock())
                raise
            require_lease()
            append_step(path, cycle.number, DONE[step.action], detail, clock())
            print(f"cycle {cycle.number}: {DONE[step.action]}{_because(step)}", flush=True)


def status(project: LoopProject, *, as_json: bool) -> str:
    """Describe the last cycle, the pending request and the next step, as text or as JSON."""
    steps = read_journal(project.folder / JOURNAL)
    last = next(reversed(cycles(steps)), None)
    facts = project.facts(last, time.time())
    step = next_step(last, facts, project.loop)
    request = _pending(project, last)
    if as_json:
        content = {
            "cycle": last.number if last else None,
            "steps": [one.model_dump(mode="json") for one in last.steps] if last else [],
            "request": request.model_dump(mode="json") if request else None,
            "next": {"action": step.action, "why": step.why},
        }
        return json.dumps(content, indent=2)
    lines = [f"state: {project.folder}"]
    if last:
        lines += [f"cycle {last.number}:"]
        lines += [f"  {moment(one.time)}  {_described(one.what, one.detail)}" for one in last.steps]
    if request is not None and last is not None:
        comparison = request.comparison
        lines += [
            f"a decision is awaited until {moment(request.expires)}:",
            f"  candidate {request.version} would replace {request.replaces}",
            f"  because: {'; '.join(request.reasons)}",
            f"  compared: {request.why}",
            "  recent labels by key: "
            + ", ".join(f"{key} {count}" for key, count in comparison.keys.items()),
            *(f"  labels not used, of {refused}" for refused in comparison.refused),
            f"  gates {request.gates}, experiment {request.experiment}, data "
            f"{request.data_digest}, certificate {request.certificate_digest[:12]}",
            f"  request: {project.folder / last.detail('requested')['path']}",
            f"  page: {(project.folder / last.detail('requested')['path']).with_name(PAGE)}",
            f"  slipway loop approve {request.version} --reason TEXT",
            f"  slipway loop reject {request.version} --reason TEXT",
        ]
    return "\n".join([*lines, _line(step)])


def decide(project: LoopProject, decision: PersonDecision, now: float) -> str:
    """Check a decision, record it in the journal, and return a line for the console.

    The caller must hold the loop's lock. Raises LoopError if the decision is not valid.
    """
    path = project.folder / JOURNAL
    last = next(reversed(cycles(read_journal(path))), None)
    approvers, listed = project.loop.approvers, project.settings.signer_list
    request = check_decision(decision, last, project.folder, now, approvers, listed)
    append_step(path, request.cycle, "decided", decision.model_dump(mode="json"), now)
    return (
        f"{decision.version} is {decision.verdict} by {decision.by}. The next `slipway loop` acts "
        "on it."
    )


def _command(project: LoopProject, options: argparse.Namespace) -> str:
    now = time.time()
    if options.command == "decide":
        return decide(project, read_decision(options.decision), now)
    last = next(reversed(cycles(read_journal(project.folder / JOURNAL))), None)
    if options.command == "stop":
        return _stop(project, last, options, now)
    digest = last.detail("requested")["digest"] if last and last.has("requested") else ""
    return decide(project, _decision(options, digest, None), now)


def _stop(project: LoopProject, last: Cycle | None, options: argparse.Namespace, now: float) -> str:
    if last is None or not last.is_open:
        raise LoopError("no cycle is open, expected one to stop. Nothing was changed.")
    step = NextStep("end", f"stopped by {options.by}: {options.reason}", "stopped")
    detail = project.take(step, last, now)
    append_step(project.folder / JOURNAL, last.number, "ended", detail, now)
    return f"cycle {last.number} is stopped"


def _decision(options: argparse.Namespace, digest: str, request: Path | None) -> PersonDecision:
    if request is not None and read_request(request).version != options.version:
        raise LoopError(
            f"{request} is about {read_request(request).version}, expected {options.version}. Name "
            "the version that you decided on."
        )
    decision = PersonDecision(
        format_version=1,
        request=digest,
        version=options.version,
        verdict="approved" if options.command == "approve" else "rejected",
        by=options.by,
        reason=options.reason,
        time=time.time(),
    )
    return signed(decision, options.sign) if options.sign else decision


def _write(decision: PersonDecision, out: Path | None) -> None:
    if out is None:
        raise LoopError("--request is given without --out, expected a file for the decision.")
    files.write_text(out, files.canonical_json(decision.model_dump(mode="json")))
    print(f"wrote {out}. On the machine of the service: slipway loop decide {out.name}")


def _pending(project: LoopProject, last: Cycle | None) -> Any:
    if last is None or not last.is_open or not last.has("requested") or last.has("decided"):
        return None
    return read_request(project.folder / last.detail("requested")["path"])


def _cycle_of(step: NextStep, last: Cycle | None) -> Cycle:
    if step.action == "trigger":
        return Cycle(last.number + 1 if last else 1, [])
    assert last is not None
    return last


def _because(step: NextStep) -> str:
    outcome = f" {step.outcome}" if step.outcome else ""
    return f"{outcome}: {step.why}" if step.why else outcome


def _line(step: NextStep) -> str:
    return f"next: {step.action}{_because(step)}"


def _described(what: str, detail: dict[str, Any]) -> str:
    """Describe a finished step in one line."""
    words: dict[str, Callable[[], str]] = {
        "triggered": lambda: "; ".join(detail["reasons"]),
        "collected": lambda: f"{detail['rows']} labelled rows",
        "merged": lambda: f"{len(detail['keys'])} new rows to {detail['base_rows']}",
        "trained": lambda: f"{detail['version']}, experiment {detail['experiment']}",
        "compared": lambda: detail["why"],
        "requested": lambda: f"decision on {detail['version']}",
        "decided": lambda: f"{detail['verdict']} by {detail['by']}: {detail['reason']}",
        "ended": lambda: f"{detail['outcome']}: {detail['why']}",
        "failed": lambda: f"{detail['step']}: {detail['reason']}",
    }
    text = words[what]() if what in words else ""
    return f"{what}: {text}" if text else what


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway loop",
        description="Take the steps from the service's traffic to the next model that are possible "
        f"now. See docs/how-to/loop.md. The journal is SLIPWAY_STATE/{FOLDER}/{JOURNAL}.",
    )
    parser.add_argument("--status", action="store_true", help="describe the loop; change nothing")
    parser.add_argument("--json", action="store_true", help="with --status: print JSON")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND")
    by = CommandParser(add_help=False)
    by.add_argument(
        "--by",
        default=f"{getpass.getuser()}@{socket.gethostname()}",
        metavar="NAME",
        help="who decides; default: user and machine",
    )
    by.add_argument("--reason", required=True, metavar="TEXT", help="why; for the history")
    for name, text in (("approve", "let the candidate become a canary"), ("reject", "end it")):
        verb = verbs.add_parser(name, parents=[by], help=text)
        verb.add_argument("version", help="of the candidate")
        verb.add_argument("--sign", type=Path, metavar="KEY", help="private key (PEM)")
        verb.add_argument(
            "--request", type=Path, metavar="FILE", help=f"a copy of {REQUEST}, on another machine"
        )
        verb.add_argument(
            "--out", type=Path, metavar="FILE", help="with --request: the decision to write"
        )
    decided = verbs.add_parser("decide", help="take a decision that was written elsewhere")
    decided.add_argument("decision", type=Path, metavar="FILE")
    verbs.add_parser("stop", parents=[by], help="end the open cycle without a decision")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
