"""The commands for params.yaml: `slipway check` and `slipway set`."""

from pathlib import Path

import click

from slipway.cli.command import say
from slipway.config.edit import propose, read_assignments
from slipway.preflight.project import check_project

_PARAMS = Path("params.yaml")


@click.command()
def check() -> None:
    """Check params.yaml, the data and this machine, as every run does first.

    The section `search` is checked as by `slipway search`. All mistakes are named at once. Nothing
    is run or changed.
    """
    check_project(with_search=True)
    say("params.yaml, the data and this machine fit together. Next: slipway run")


@click.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_values(assignments: tuple[str, ...]) -> None:
    """Change values of params.yaml, and keep its comments.

    KEY is "section.key", such as train.epochs, or an entry in it, such as
    evaluate.gates.accuracy.min. VALUE is YAML. The new file is checked before it is written, so
    a mistake changes nothing.
    """
    patch = propose(_PARAMS, read_assignments(assignments), apply=True)
    say(patch or "params.yaml has these values already.")
