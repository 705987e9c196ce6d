"""The command `slipway upgrade`."""

import sys
from pathlib import Path

import click

from slipway.cli.command import say
from slipway.upgrade.project import upgrade as upgrade_project

_FOLDER = Path()


@click.command()
@click.option("--yes", is_flag=True, help="Write the changes without asking.")
def upgrade(yes: bool) -> None:
    """Move params.yaml and dvc.yaml of an older version to this one.

    Values and comments stay. Every change is shown, with the stages that the next run will repeat.
    Asks before it writes unless --yes is given; without a terminal, nothing is changed.
    """
    found = upgrade_project(_FOLDER, apply=yes)
    click.echo(found.text())
    if not found.patch:
        return
    if not yes and sys.stdin.isatty() and click.confirm("Write these changes?"):
        upgrade_project(_FOLDER, apply=True)
        yes = True
    if yes:
        say("The changes are written. Next: slipway check, then slipway run")
    else:
        say("Nothing was written. To write the changes: slipway upgrade --yes")
