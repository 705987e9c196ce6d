"""The commands for params.yaml: `slipway check`, `slipway params` and `slipway set`."""

import textwrap
from pathlib import Path

import click

from slipway.cli.command import say
from slipway.cli.documentation import described
from slipway.config.edit import difference, read_assignments, read_file
from slipway.config.mistakes import hint
from slipway.config.params import defaults_for, flat, read_content, resolved
from slipway.config.yaml_text import as_plain_yaml
from slipway.kinds.registry import input_kinds, kind_of
from slipway.preflight.project import check_project
from slipway.system import files
from slipway.system.errors import ParamsError

_PARAMS = Path("params.yaml")


@click.command()
def check() -> None:
    """Check params.yaml, the data and this machine, as every run does first.

    The section `search` is checked as by `slipway search`. All mistakes are named at once. Nothing
    is run or changed.
    """
    check_project(with_search=True)
    say("params.yaml, the data and this machine fit together. Next: slipway run")


@click.command("params")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--explain", is_flag=True, help="Print what each key means and may be.")
def show_params(keys: tuple[str, ...], explain: bool) -> None:
    """Print the value of every key of your task; a star marks those that differ from their default.

    KEY is a section such as train, or a key such as train.epochs, to print only these.
    """
    content = read_content(_PARAMS)
    values, usual = dict(flat(resolved(content))), dict(flat(defaults_for(content)))
    known = {key.name: key for key in described()}
    own = kind_of(values["data.task"]).input
    others = {key for kind in input_kinds().values() for key in kind.keys} - {*own.keys}
    wanted = [
        key
        for key in values
        if (any(f"{key}.".startswith(f"{k}.") for k in keys) if keys else key not in others)
    ]
    if unknown := [
        key for key in keys if not any(f"{one}.".startswith(f"{key}.") for one in values)
    ]:
        raise ParamsError(
            f"params.yaml has no key {unknown[0]}; {hint(unknown[0], list(values), 'known are')}"
        )
    for key in wanted:
        differs = values[key] != usual.get(key)
        line = f"{'*' if differs else ' '} {key}: {as_plain_yaml(values[key])}"
        if differs and key in usual:
            line += f" # default: {as_plain_yaml(usual[key])}"
        say(line)
        if explain and key in known:
            about = ". ".join(part.rstrip(".") for part in (known[key].meaning, known[key].values))
            say(textwrap.indent(textwrap.fill(about.lstrip(". "), 92), "      "))


@click.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_values(assignments: tuple[str, ...]) -> None:
    """Change values of params.yaml, and keep its comments.

    KEY is "section.key", such as train.epochs, or an entry in it, such as
    evaluate.gates.accuracy.min. VALUE is YAML. The new file is checked before it is written, so
    a mistake changes nothing. A new train.network comes with its recipe: arguments, learning rate,
    epochs and the space of `slipway search`.
    """
    from slipway.project.network_change import with_assignments

    before = read_file(_PARAMS)
    changes = read_assignments(assignments)
    after, lines = with_assignments(before, changes)
    if after == before:
        say("params.yaml has these values already.")
        return
    files.write_text(_PARAMS, after)
    about = lines if len(lines) > len(changes) else []  # of the recipe of a new network
    say("\n".join([*about, difference(before, after)]))
