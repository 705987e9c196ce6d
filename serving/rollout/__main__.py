"""`python -m serving.rollout COMMAND`: puts another model in front of the callers, or takes it back. See docs/rollout.md.

It works on SLIPWAY_STATE, which has to be the service's, and waits until the workers have done what was asked.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from serving.rollout import commands
from serving.rollout.reports import read_reports
from serving.rollout.state import Allowed, Rollout, RolloutError, RolloutPlan, name_of, read_rollout
from serving.rollout.status import describe
from serving.settings import PREFIX, Settings, read_settings
from slipway.config.command import run_command
from slipway.system.broken_pipe import quiet_when_unread

_NICENESS = 10
_PROPOSING = ("deploy", "shadow", "canary")


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run one command. What is refused is one line on stderr and exit code 1."""
    options = _parser().parse_args(arguments)
    os.nice(_NICENESS)  # it shares the cores with the service
    run_command(lambda: _run(options, read_settings()))


def _run(options: argparse.Namespace, settings: Settings) -> None:
    _warn_where_nobody_follows(settings)
    if options.command == "status":
        print(
            json.dumps(
                {"state": str(settings.state)}
                | describe(read_rollout(settings.state), read_reports(settings.state)),
                indent=2,
            )
        )
        return
    if options.command in _PROPOSING:
        plan = _plan(options) if options.command == "canary" else RolloutPlan()
        proposed = commands.propose(
            settings,
            options.command,
            options.bundle,
            certificate=options.certificate,
            engine=options.engine,
            allowed=_allowed(options),
            plan=plan,
        )
    elif options.command == "rollback":
        proposed = commands.rollback(settings, options.version)
    else:
        proposed = {"promote": commands.promote, "abort": commands.abort, "reset": commands.reset}[
            options.command
        ](settings)
    _finish(settings, proposed, options.wait)


def _warn_where_nobody_follows(settings: Settings) -> None:
    """A command with another SLIPWAY_STATE than the service's does all that is asked, and no caller notices any of it."""
    if any(report.is_alive for report in read_reports(settings.state)):
        return
    named = "" if f"{PREFIX}STATE" in os.environ else f", the default: {PREFIX}STATE is not set"
    print(
        f"warning: no worker follows {settings.state}{named}. Nothing that runs is changed by this; "
        f"if the service runs, give this command the {PREFIX}STATE of the service, on its machine or in its container.",
        file=sys.stderr,
    )


def _finish(settings: Settings, proposed: Rollout, seconds: float) -> None:
    """Wait, and say what came of it; RolloutError unless it is what was asked for."""
    id_of_candidate = proposed.candidate.id if proposed.candidate else None
    rollout, late = commands.wait(settings, seconds)
    if rollout.candidate and rollout.candidate.phase == "preparing":
        raise RolloutError(
            f"after {seconds:g} s the workers still load {rollout.candidate.name}; `status` says where they are."
        )
    last = rollout.events[-1]
    if id_of_candidate is not None and last.what in ("refused", "rolled_back"):
        raise RolloutError(f"{last.model} was {last.what.replace('_', ' ')}: {last.reason}")
    if late:
        slow = "; ".join(
            f"worker {report.process} serves {report.serving}: {report.problem or 'not yet'}"
            for report in late
        )
        raise RolloutError(
            f"{name_of(rollout.stable)} is not served by every worker after {seconds:g} s: {slow}"
        )
    print(f"{last.model} {last.what.replace('_', ' ')}: {last.reason} (state: {settings.state})")


def _allowed(options: argparse.Namespace) -> Allowed:
    return Allowed(
        other_contract=options.allow_other_contract,
        metric_loss=None
        if options.allow_metric_loss == "any"
        else float(options.allow_metric_loss),
        disagreement=options.allow_disagreement,
        difference=options.allow_difference,
    )


def _plan(options: argparse.Namespace) -> RolloutPlan:
    default = RolloutPlan()
    return RolloutPlan(
        steps=options.steps or default.steps,
        hold_s=default.hold_s if options.hold_seconds is None else options.hold_seconds,
        hold_requests=options.hold_requests or default.hold_requests,
        slow_s=options.slow_ms / 1000 if options.slow_ms else None,
    )


def _percentages(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) / 100 for part in text.split(","))
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(text)
    return shares


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.rollout",
        description="Another model, under load. See docs/rollout.md.",
    )
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="for the workers"
    )
    shown = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    proposing = argparse.ArgumentParser(add_help=False)
    proposing.add_argument("bundle", type=Path, help="folder of the bundle; it is copied")
    proposing.add_argument(
        "--certificate", type=Path, help="default: certificate.json beside the bundle"
    )
    proposing.add_argument(
        "--engine", type=Path, help="default: engine beside the bundle, if there is one"
    )
    proposing.add_argument(
        "--allow-other-contract",
        action="store_true",
        help="other labels, or input that callers do not send yet",
    )
    proposing.add_argument(
        "--allow-metric-loss",
        default="0.01",
        metavar="LOSS",
        help="accuracy points, or growth of the RMSE; any: not compared",
    )
    proposing.add_argument(
        "--allow-disagreement",
        type=float,
        metavar="SHARE",
        help="of shadowed requests; default: what the metrics explain",
    )
    proposing.add_argument(
        "--allow-difference",
        type=float,
        metavar="UNITS",
        help="between values; default: the stable model's interval",
    )
    shown.add_parser(
        "deploy", parents=[proposing], help="swap as soon as every worker has checked it"
    )
    shown.add_parser("shadow", parents=[proposing], help="answer copies of live requests")
    canary = shown.add_parser(
        "canary", parents=[proposing], help="answer a growing share of the live requests"
    )
    canary.add_argument(
        "--steps", type=_percentages, metavar="PERCENT,...", help="default: 1,5,25,50,100"
    )
    canary.add_argument(
        "--hold-seconds",
        type=float,
        metavar="SECONDS",
        help="that a step takes at least, default: 60",
    )
    canary.add_argument(
        "--hold-requests",
        type=int,
        metavar="REQUESTS",
        help="of the candidate that a step takes at least, default: 300",
    )
    canary.add_argument(
        "--slow-ms",
        type=float,
        metavar="MS",
        help="default: twice the stable model's 95th percentile",
    )
    shown.add_parser("promote", help="make the candidate the stable model now")
    shown.add_parser("abort", help="end the candidate; the stable model serves on")
    rollback = shown.add_parser("rollback", help="end the candidate, or return to the model before")
    rollback.add_argument(
        "version", nargs="?", help="that is to be left; refused if it is not served any more"
    )
    shown.add_parser("reset", help="return to SLIPWAY_BUNDLE")
    shown.add_parser("status", help="as JSON")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
