"""Groups of verbs that are imported on use, so that `slipway --help` stays quick."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True)
class Verb:
    """An entry in the table of verbs.

    `target` is the "module:name" of a click command, or of a function `main` that parses its
    arguments itself. If `target` is a mapping, the verb is a group of further verbs, and `alone` is
    the click command that runs if none of them is given.
    """

    target: "str | Mapping[str, Verb]"
    help: str
    extra: str = "train"  # the extra of the distribution with the packages that the verb needs
    first: tuple[str, ...] = ()  # arguments that `main` gets before those of the user
    alone: str = ""

    def command(self, name: str) -> click.Command:
        """Import the verb and return its click command."""
        if not isinstance(self.target, str):
            if self.alone:
                return _group_with(_imported(self.alone), self.target, name)
            return LazyGroup(self.target, name=name, help=f"{self.help.capitalize()}.")
        module, _, attribute = self.target.partition(":")
        if attribute == "main":
            return _forwarded(name, module, self)
        return _imported(self.target)


class LazyGroup(click.Group):
    """A click group of the verbs in a table. Help and completion import none of them."""

    def __init__(self, verbs: Mapping[str, Verb], **settings: Any) -> None:
        super().__init__(subcommand_metavar="VERB ...", **settings)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.verbs[cmd_name].command(cmd_name) if cmd_name in self.verbs else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; for an unknown name, suggest the verb that was probably meant."""
        if args[0] not in self.verbs and not args[0].startswith("-"):
            from slipway.config.mistakes import hint  # pydantic comes with it

            near = hint(args[0], list(self.verbs), "known here")
            ctx.fail(
                f"unknown verb {args[0]!r}, expected one of `{ctx.command_path} --help`; {near}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in self.verbs.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=verb.help)
            for name, verb in self.verbs.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


def _imported(target: str) -> click.Command:
    module, _, attribute = target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


def _group_with(alone: click.Command, verbs: Mapping[str, Verb], name: str) -> click.Command:
    """Return a group that runs `alone` if no verb of its own is given."""

    def run(**given: Any) -> Any:
        context = click.get_current_context()
        verb = context.invoked_subcommand
        if verb is None:
            return context.invoke(alone, **given)
        if any(given.values()):
            context.fail(
                f"options of `{context.command_path}` were given before {verb}, expected none. "
                f"Give those of `{context.command_path} {verb} --help` after it."
            )
        return None

    return LazyGroup(
        verbs,
        name=name,
        callback=run,
        params=alone.params,
        help=alone.help,
        invoke_without_command=True,
    )


def _forwarded(name: str, module: str, verb: Verb) -> click.Command:
    """Return a command that passes all its arguments, even `--help`, to the module's `main`."""

    def run(arguments: tuple[str, ...]) -> None:
        main: Callable[[list[str]], int | None] = importlib.import_module(module).main
        sys.exit(main([*verb.first, *arguments]))

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help=verb.help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
