"""The command line: a parser whose errors name the expected usage, and closed output pipes."""

import argparse
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_TOO_MUCH = 1e6


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors state the expected usage and the command for help."""

    def error(self, message: str) -> NoReturn:
        """Print the error with the expected usage to stderr, and exit with code 2."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
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
