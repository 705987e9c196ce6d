"""Arguments of the commands that parse their own: mistakes are described in three parts."""

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, whose refusals say what was expected and how to find out more."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        help_command = f"`{self.prog} --help`"
        self.exit(2, f"\nerror: {message}. Expected `{usage}`; see {help_command}.\n")
