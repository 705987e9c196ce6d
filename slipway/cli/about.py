"""The command `slipway version`."""

import json
import platform

import click

from slipway.system.version import installed_version


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the versions of Slipway and of Python."""
    found = {"slipway": installed_version(), "python": platform.python_version()}
    click.echo(json.dumps(found) if as_json else f"slipway {found['slipway']}")
