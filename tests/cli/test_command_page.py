"""docs/reference/command.md names every verb and every option of it, and nothing else."""

import argparse
import importlib
import re
from collections.abc import Iterator, Mapping

import click
import pytest

from slipway.cli.lazy import Verb
from slipway.cli.verbs import VERBS
from tests.conftest import ROOT

PAGE = (ROOT / "docs/reference/command.md").read_text()
PLAIN = {"--help", "-h"}  # of every verb


def verbs(table: Mapping[str, Verb] = VERBS, before: str = "slipway") -> Iterator[tuple[str, Verb]]:
    """The verbs and those inside of groups, by the words that call them."""
    for name, verb in table.items():
        if isinstance(verb.target, str):
            yield f"{before} {name}", verb
        else:
            if verb.alone:
                yield f"{before} {name}", Verb(verb.alone, verb.help)
            yield from verbs(verb.target, f"{before} {name}")


def options_of(name: str, verb: Verb) -> set[str]:
    """The long options of a verb, and of its own sub-commands."""
    assert isinstance(verb.target, str)
    module, _, attribute = verb.target.partition(":")
    if attribute != "main":
        command = verb.command(name)
        return {
            option
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for option in parameter.opts
            if option.startswith("--")
        }
    parser: argparse.ArgumentParser = importlib.import_module(module)._parser()
    for word in verb.first:
        parser = choices_of(parser)[word]
    parsers = [parser, *choices_of(parser).values()]
    found = {text for one in parsers for action in one._actions for text in action.option_strings}
    return {text for text in found if text.startswith("--")} - PLAIN


def choices_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The sub-commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def documented(page: str) -> dict[str, set[str]]:
    """The options by verb: those of the paragraphs below the heading of the verb."""
    parts = re.split(r"^### `(slipway [a-z -]+)`.*$", page.partition("## Verbs")[2], flags=re.M)
    return {
        name: set(re.findall(r"`(--[a-z0-9-]+)", text.partition("\n## ")[0]))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_command_page_names_every_verb_and_no_other() -> None:
    assert set(documented(PAGE)) == {name for name, _ in verbs()}


@pytest.mark.process
@pytest.mark.parametrize(("name", "verb"), list(verbs()))
def test_the_command_page_names_every_option_of_a_verb_and_no_other(name: str, verb: Verb) -> None:
    assert documented(PAGE)[name] == options_of(name, verb)


def test_the_check_of_the_command_page_finds_a_missing_and_an_invented_option() -> None:
    page = PAGE.replace("`--price-per-gpu-hour`", "`--price-per-hour`")
    assert documented(page)["slipway plan"] == {"--seconds", "--gpus", "--price-per-hour"}
