"""Verbs that fail, one for each way."""

import click

from slipway.cli.command import say
from slipway.cli.lazy import Verb
from slipway.system.errors import DataError

ERRORS = {
    "data": DataError("no images. Add some."),
    "interrupt": KeyboardInterrupt(),
    "abort": click.Abort(),
    "package": ModuleNotFoundError("No module named 'torch'", name="torch._C"),
    "ours": ModuleNotFoundError("No module named 'slipway.gone'", name="slipway.gone"),
}


@click.command()
@click.argument("name")
def fail(name: str) -> None:
    """Raise an error."""
    raise ERRORS[name]


@click.command()
def hint() -> None:
    """Print a hint."""
    say("a hint")


@click.command()
@click.argument("options", nargs=-1)
def same(options: tuple[str, ...]) -> None:
    """Have a usage with two equal placeholders."""


FAILING = {
    "same": Verb(f"{__name__}:same", "repeats a word"),
    "fail": Verb(f"{__name__}:fail", "fails", extra="serve"),
    "hint": Verb(f"{__name__}:hint", "hints"),
    "gone": Verb("no.such.module:verb", "a text about it"),
}
