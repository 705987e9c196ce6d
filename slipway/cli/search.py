"""`slipway search`."""

import contextlib
import json
import sys

import click


@click.command()
@click.option("--name", help="Name of the search; search-NUMBER without.")
@click.option("--json", "as_json", is_flag=True, help="Print the trials for a program.")
def search(name: str | None, as_json: bool) -> None:
    """Try values of params.yaml within a budget, as the section `search` there says.

    Each trial trains beside the workspace and becomes an experiment with its score on validation
    rows; the test rows stay closed. `slipway take` makes the best one the workspace. An interrupted
    search goes on if the same command is given again.
    """
    from slipway.search.run import as_json as content
    from slipway.search.run import conclude
    from slipway.search.run import search as run_search

    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        end = run_search(name)
        conclude(end)
    if as_json:
        click.echo(json.dumps(content(end), indent=2))
