"""Lets imports find the project's own modules. It imports nothing, so that `--help` is fast."""

import sys
from pathlib import Path


def search_the_project() -> None:
    """Put the working directory on `sys.path`, as `python -m` does and a script does not."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
