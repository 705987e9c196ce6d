"""`python -m slipway.serving.rollout COMMAND`: rolls out a model, or rolls it back. See
docs/how-to/rollout.md.

SLIPWAY_STATE has to be that of the service. The command waits until the workers have finished.
"""

import argparse
import getpass
import json
import os
import socket
import sys
from pathlib import Path

from slipway.serving.rollout import commands
from slipway.serving.rollout.history import Author
from slipway.serving.rollout.reports import describe, read_reports
from slipway.serving.rollout.state import (
    Allowed,
    Rollout,
    RolloutError,
    RolloutPlan,
    name_of,
    read_rollout,
)
from slipway.serving.settings import PREFIX, Settings, read_settings
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.command_run import run_command
from slipway.system.errors import linked

_NICENESS = 10


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run one command. A refusal is printed in one line on stderr, with exit code 1."""
    options = _parser().parse_args(arguments)
    os.nice(_NICENESS)  # it shares the cores with the service
    run_command(lambda: _run(options, read_settings()))


def _run(options: argparse.Namespace, settings: Settings) -> None:
    if options.command == "cluster":
        _roll_out_on_cluster(options, settings)
        return
    _warn_without_workers(settings)
    if options.command == "status":
        status = describe(read_rollout(settings.state), read_reports(settings.state))
        print(json.dumps({"state": str(settings.state)} | status, indent=2))
        return
    author = Author(options.by, options.reason)
    if options.command in commands.BY_NAME:
        proposed = commands.BY_NAME[options.command](settings, author)
    elif options.command == "rollback":
        proposed = commands.rollback(settings, options.version, author=author)
    else:
        proposed = commands.propose(
            settings,
            options.command,
            options.bundle,
            certificate=options.certificate,
            engine=options.engine,
            allowed=_allowed(options),
            plan=_plan(options) if options.command == "canary" else None,
            author=author,
        )
    _finish(settings, proposed, options.wait)


def _roll_out_on_cluster(options: argparse.Namespace, settings: Settings) -> None:
    from slipway.serving.rollout.cluster import Cluster, roll_out

    cluster = Cluster(
        options.namespace,
        options.route,
        options.stable,
        options.candidate,
        options.prometheus.rstrip("/"),
    )
    author = Author(options.by, options.reason)
    last = roll_out(settings.state, cluster, _plan(options), author, options.every).events[-1]
    outcome = f"{last.model} {last.what.replace('_', ' ')}: {last.reason}"
    if last.what not in ("promoted", "swapped"):
        raise RolloutError(f"{outcome}. {options.stable} answers all requests")
    print(
        linked(
            f"{outcome}. {options.candidate} answers all requests. Give {options.stable} its "
            "image, then set the weights back: docs/how-to/rollout.md"
        )
    )


def _warn_without_workers(settings: Settings) -> None:
    """Print a warning if no worker uses this state: SLIPWAY_STATE may differ from the service's."""
    if any(report.is_alive for report in read_reports(settings.state)):
        return
    default = "" if f"{PREFIX}STATE" in os.environ else f", the default: {PREFIX}STATE is not set"
    print(
        f"warning: no worker follows {settings.state}{default}. "
        "This command changes no running service. If the service runs, give this command the "
        f"{PREFIX}STATE of the service, on its machine or in its container.",
        file=sys.stderr,
    )


def _finish(settings: Settings, proposed: Rollout, seconds: float) -> None:
    """Wait for the workers and print the outcome.

    Raises RolloutError if the model was refused or rolled back, or if `seconds` are not enough.
    """
    rollout, late = commands.wait(settings, seconds)
    if rollout.candidate and rollout.candidate.phase == "preparing":
        raise RolloutError(
            f"after {seconds:g} s the workers still load {rollout.candidate.name}; "
            "`status` shows their progress."
        )
    last = rollout.events[-1]
    outcome = f"{last.what.replace('_', ' ')}: {last.reason}"
    if proposed.candidate and last.what in ("refused", "rolled_back"):
        raise RolloutError(f"{last.model} was {outcome}")
    if late:
        slow = "; ".join(
            f"{report.name} serves {report.serving}: {report.problem or 'not yet'}"
            for report in late
        )
        raise RolloutError(
            f"{name_of(rollout.stable)} is not served by every worker after {seconds:g} s: {slow}"
        )
    print(f"{last.model} {outcome} (state: {settings.state})")


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
    default, slow_ms = RolloutPlan(), vars(options).get("slow_ms")
    return RolloutPlan(
        steps=options.steps or default.steps,
        hold_s=default.hold_s if options.hold_seconds is None else options.hold_seconds,
        hold_requests=options.hold_requests or default.hold_requests,
        slow_s=slow_ms / 1000 if slow_ms else None,
    )


def _percentages(text: str) -> tuple[float, ...]:
    try:
        percent = [float(part) for part in text.split(",")]
    except ValueError:
        percent = []
    is_rising = percent == sorted(set(percent))
    # Several steps of at most 1 % are fractions, as params.yaml has them: 0.5,1 means 50,100.
    if not percent or not is_rising or not 0 < percent[0] <= percent[-1] <= 100:
        fault = "expected rising percentages above 0 and at most 100"
    elif len(percent) > 1 and percent[-1] <= 1:
        fault = "whose last step is 1 % or less, expected percentages, not fractions"
    else:
        return tuple(each / 100 for each in percent)
    raise argparse.ArgumentTypeError(f"found {text!r}, {fault}, such as 1,5,25,50,100")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway rollout",
        description="Replace the model under load. See docs/how-to/rollout.md.",
    )
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="for the workers; default: 120"
    )
    parser.add_argument(
        "--by",
        default=f"{getpass.getuser()}@{socket.gethostname()}",
        metavar="NAME",
        help="who decides, for `slipway history`; default: user and machine",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for `slipway history`")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bundle = _bundle_parser()
    verbs.add_parser("deploy", parents=[bundle], help="swap once every worker has checked it")
    verbs.add_parser("shadow", parents=[bundle], help="answer copies of live requests")
    canary = verbs.add_parser(
        "canary", parents=[bundle], help="answer a growing fraction of the live requests"
    )
    _add_plan(canary)
    canary.add_argument(
        "--slow-ms",
        type=float,
        metavar="MS",
        help="a slower request is slow; default: twice the stable model's 95th percentile",
    )
    _add_cluster(verbs.add_parser("cluster", help="a canary of two Deployments on Kubernetes"))
    verbs.add_parser("promote", help="make the candidate the stable model now")
    verbs.add_parser("abort", help="end the candidate; the stable model continues to serve")
    rollback = verbs.add_parser(
        "rollback", help="end the candidate, or return to the former stable model"
    )
    rollback.add_argument(
        "version", nargs="?", help="the version to leave; refused if it is no longer served"
    )
    verbs.add_parser("reset", help="return to SLIPWAY_BUNDLE")
    verbs.add_parser("status", help="print the state as JSON")
    return parser


def _bundle_parser() -> CommandParser:
    parser = CommandParser(add_help=False)
    add = parser.add_argument
    add("bundle", type=Path, help="folder of the bundle; it is copied")
    add("--certificate", type=Path, help="default: certificate.json beside the bundle")
    add("--engine", type=Path, help="default: engine beside the bundle, if there is one")
    add(
        "--allow-other-contract",
        action="store_true",
        help="accept other labels, or inputs that callers do not send yet",
    )
    add(
        "--allow-metric-loss",
        default="0.01",
        metavar="LOSS",
        help="accuracy points, or growth of the RMSE; any: not compared; default: 0.01",
    )
    add(
        "--allow-disagreement",
        type=float,
        metavar="FRACTION",
        help="of shadowed requests; default: explained by the metrics",
    )
    add(
        "--allow-difference",
        type=float,
        metavar="UNITS",
        help="between values; default: the stable model's interval",
    )
    return parser


def _add_cluster(cluster: CommandParser) -> None:
    add = cluster.add_argument
    add("--prometheus", required=True, metavar="URL", help="with the metrics of both Deployments")
    add("--namespace", default="default", help="default: default")
    add("--route", default="slipway", help="name of the HTTPRoute; default: slipway")
    add("--stable", default="slipway", help="its first backend; default: slipway")
    add("--candidate", default="slipway-candidate", help="the second; default: slipway-candidate")
    add("--every", type=float, default=15.0, metavar="SECONDS", help="default: 15")
    _add_plan(cluster)


def _add_plan(canary: CommandParser) -> None:
    add = canary.add_argument
    add("--steps", type=_percentages, metavar="PERCENT,...", help="default: 1,5,25,50,100")
    add(
        "--hold-seconds",
        type=float,
        metavar="SECONDS",
        help="minimum duration of a step; default: 60",
    )
    add(
        "--hold-requests",
        type=int,
        metavar="REQUESTS",
        help="minimum requests of the candidate in a step; default: 300",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
