"""Finds paths of the checkout that docs, docstrings, comments and messages name and that are gone.

A path is one below a folder of the checkout (`tests/kinds/`), a module (`kinds/parts.py`) or a room
(`kinds/`). It counts from the checkout, from `slipway/`, or from a folder around the file.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.structure.prose import TEXTS, Finding
from tests.structure.rooms import ROOMS
from tests.structure.tracked import tracked_files

_FOLDERS = {"slipway", "stages", "serving", "tests", "docs", "bench", "launch", "monitoring"}
_ROOMS = set(ROOMS) - {"data", "artifacts", "metrics", "reports"}  # a project has those four, too
# Written by users, or in an installed package.
_ELSEWHERE = ("transforms/", "launch/secrets", "slipway/assets", "deepspeed/")
# Names of their time.
_HISTORY = ("CHANGELOG.md", "bench/LOG.md", "bench/results/")
_PATH = re.compile(r"(?<![\w./{}$<>-])(?:[\w.*{}$<>-]+/)+[\w.*{}$<>-]*")
_PLACEHOLDER = re.compile(r"[*{}$<>]|(?:^|/)[A-Z]+(?:[./]|$)")
_BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_OF_THEN = re.compile(r"\b(?:then|former)\b")


def dead_paths(root: Path) -> Iterator[Finding]:
    """All of them in the tracked texts of `root`."""
    for path in tracked_files(root, TEXTS):
        if not path.startswith(_HISTORY):
            yield from dead_paths_of_text(root, path, (root / path).read_text())


def dead_paths_of_text(root: Path, path: str, text: str) -> Iterator[Finding]:
    """Those of one file, whose `path` is relative to `root`.

    Our modules count as a whole, and of other Python only docstrings and comments. A decision may
    name a path of its time in a line that says "then" or "former".
    """
    bases = [root / "slipway", *(root / folder for folder in Path(path).parents)]
    found = [
        (number, line, name)
        for number, line in enumerate(text.splitlines(), start=1)
        if "/" in line
        for name in paths_of_line(line)
        if not any((base / name).exists() for base in bases)
    ]
    if found and path.endswith(".py") and not path.startswith("slipway/"):
        prose = prose_lines(text)
        found = [entry for entry in found if entry[0] in prose]
    for number, line, name in found:
        if not (path.startswith("docs/decisions/") and _OF_THEN.search(line)):
            yield Finding("path", path, number, f"there is no {name}")


def paths_of_line(line: str) -> Iterator[str]:
    """The paths of the checkout that a line names."""
    for match in _PATH.findall(line):
        name = match.rstrip(".")
        if name.startswith(_ELSEWHERE) or _PLACEHOLDER.search(name):
            continue
        first = name.partition("/")[0]
        is_room = first in _ROOMS and name.endswith("/")
        if name.endswith(".py") or first in _FOLDERS or is_room:
            yield name


def prose_lines(source: str) -> set[int]:
    """The numbers of the lines that hold a comment or a part of a docstring."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # A docstring is a string at the beginning of a statement.
        is_docstring = token.type == tokenize.STRING and before in _BEGINNINGS
        if is_docstring or token.type == tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return lines
