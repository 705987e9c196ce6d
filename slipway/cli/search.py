"""The command `slipway search`."""

import contextlib
import json
import sys

import click

from slipway.cli.command import is_quiet
from slipway.system.errors import ParamsError


@click.command()
@click.option("--name", help="Name of the search; by default search-NUMBER.")
@click.option("--folds", is_flag=True, help="Train params.yaml as it is, on each of split.folds.")
@click.option(
    "--members", type=click.IntRange(min=2), help="Make the best trials members of an ensemble."
)
@click.option("--join", is_flag=True, help="Share the trials with other processes, also by Slurm.")
@click.option("--json", "as_json", is_flag=True, help="Print the trials as JSON.")
def search(name: str | None, folds: bool, members: int | None, join: bool, as_json: bool) -> None:
    """Try values of params.yaml within a budget, as its section `search` specifies.

    Each trial trains beside the workspace and becomes an experiment with its score on validation
    rows; the test rows stay closed. `slipway take` makes the best one the workspace. An interrupted
    search resumes if the same command is given again.

    With --folds nothing is searched: params.yaml is trained on each fold, and the answers to the
    rows of all folds are scored together.

    With --join, several processes search as one, such as the tasks of a Slurm array. Each trains
    one trial at a time, and search.workers is their number.

    With --members N nothing is searched either: the N best trials of the latest search, or of the
    search --name, become ensemble.members in params.yaml.
    """
    if members is not None:
        if folds or join or as_json:
            raise ParamsError(
                "search was given --members and another task, expected --members alone or with "
                "--name. Leave out --folds, --join and --json."
            )
        from slipway.search.members import write_members

        click.echo(f"{write_members(name, members)}\nnext: slipway run")
        return
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        content = _cross_validate(name, join) if folds else _search(name, join)
    if as_json:
        click.echo(json.dumps(content, indent=2))


def _search(name: str | None, join: bool) -> object:
    from slipway.search.console import as_json, conclude
    from slipway.search.run import search

    end = search(name, is_quiet=is_quiet(), is_joint=join)
    conclude(end)
    return as_json(end)


def _cross_validate(name: str | None, join: bool) -> object:
    from slipway.search.cross_validation import as_json, conclude, cross_validate

    found = cross_validate(name, is_quiet=is_quiet(), is_joint=join)
    conclude(found)
    return as_json(found)
