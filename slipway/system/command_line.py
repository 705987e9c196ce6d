"""The command line: a parser whose errors name the expected usage, and closed output pipes."""

import argparse
import math
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from slipway.system.errors import linked

_TOO_MUCH = 1e6


class _ClickStyle(argparse.HelpFormatter):
    """Help that looks like that of the verbs which click parses."""

    def start_section(self, heading: str | None) -> None:
        names = {"positional arguments": "Arguments"}
        super().start_section(names.get(heading or "", (heading or "").capitalize()))

    def _format_usage(
        self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        """Return such as "Usage: slipway plan [OPTIONS] NAME": the options are listed below."""
        every, prog = list(actions), self._prog
        positionals = [action for action in every if not action.option_strings]
        if len(positionals) < len(every):
            self._prog += " [OPTIONS]"
        text = super()._format_usage(
            usage, positionals, [], "Usage: " if prefix is None else prefix
        )
        self._prog = prog
        return text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the paragraphs of a description, which begins without the name of its command."""
        text = _sentence(re.sub(r"^`slipway[^`]*`: ", "", text.strip()))
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        begin = f"{indent}  "
        return "\n\n".join(
            textwrap.fill(part, width, initial_indent=begin, subsequent_indent=begin)
            for part in paragraphs
        )

    def _expand_help(self, action: argparse.Action) -> str:
        return _sentence(super()._expand_help(action))


def _sentence(text: str) -> str:
    """Return a text that begins with a capital letter and ends with a full stop."""
    is_code = text.startswith(("`", "SLIPWAY_"))
    begin = text if is_code else text[:1].upper() + text[1:]
    return begin if begin.endswith((".", "?", ":")) else f"{begin}."


class CommandParser(argparse.ArgumentParser):
    """An argparse parser with the help and the errors of the verbs that click parses."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", _ClickStyle)
        super().__init__(*arguments, **settings)
        self.description = linked(self.description or "")
        for action in self._actions:
            if isinstance(action, argparse._HelpAction):
                action.help = "Show this message and exit."

    def error(self, message: str) -> NoReturn:
        """Print the error with the expected usage to stderr, and exit with code 2."""
        usage = " ".join(self.format_usage().removeprefix("Usage: ").split())
        help_command = f"`{self.prog} --help`"
        self.exit(2, f"\nerror: {message}. Expected `{usage}`; see {help_command}.\n")


def positive_number(text: str) -> float:
    """Parse a number above 0 and below a million. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 < value < _TOO_MUCH, "above 0 and below 1e6")


def whole_number(most: int) -> Callable[[str], int]:
    """Return a parser of a whole number from 1 to `most`, which raises ArgumentTypeError."""

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else 0
        if not 1 <= value <= most:
            fault = f"found {text!r}, expected a whole number from 1 to {most:,}"
            raise argparse.ArgumentTypeError(fault)
        return value

    return parse


def fraction(text: str) -> float:
    """Parse a number from 0 to 1. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 <= value <= 1, "from 0 to 1")


def _number(text: str, is_allowed: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number {expected}")
    return value


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the process silently if the reader of its output closes the pipe, as in `... | head`.

    A BrokenPipeError of anything else, such as a socket, propagates.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # a write error occurs here, not at interpreter exit
    except BrokenPipeError:
        poll = select.poll()
        for descriptor in (1, 2):
            poll.register(descriptor, 0)
        unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
        if not unread:
            raise
        devnull = os.open(os.devnull, os.O_WRONLY)
        for descriptor in unread:
            os.dup2(devnull, descriptor)  # the interpreter flushes once more when it exits
        sys.exit(128 + signal.SIGPIPE)
