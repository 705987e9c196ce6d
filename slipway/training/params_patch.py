"""Proposed changes of params.yaml: shown as a patch, written only when asked to. Nothing but the numbers is touched."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

from slipway import files
from slipway.errors import ParamsError
from slipway.params import parse_params

_NUMBER = re.compile(r"[^\s,}#]+")  # a plain scalar, up to what follows it on its line


def patched(text: str, changes: Mapping[str, int | float]) -> str:
    """`text` with the numbers at "section.key" replaced; ParamsError if a key is not there or the result is not valid."""
    lines, content = text.splitlines(keepends=True), YAML(typ="rt").load(text)
    for place, value in changes.items():
        *sections, key = place.split(".")
        section = content
        for name in sections:
            section = section[name]
        if key not in section:
            raise ParamsError(f"{place} is not in params.yaml, so it cannot be changed there.")
        line, column = section.lc.value(key)
        lines[line] = lines[line][:column] + _NUMBER.sub(repr(value), lines[line][column:], count=1)
        section[key] = value
    result = "".join(lines)
    found = YAML(typ="safe", pure=True).load(result)
    if found != content:
        raise ParamsError(
            f"{', '.join(changes)} of params.yaml could not be replaced in place. Write the numbers by hand: {dict(changes)}."
        )
    parse_params(found, "the changed params.yaml")
    return result


def difference(before: str, after: str, name: str = "params.yaml") -> str:
    """A patch that `patch -p1` takes; "" for none."""
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=1)
    return "".join(lines)


def propose(path: Path, changes: Mapping[str, int | float], *, apply: bool) -> str:
    """The patch as text; with `apply` the file is replaced, atomically."""
    before = path.read_text()
    after = patched(before, changes)
    if apply and after != before:
        files.write_text(path, after)
    return difference(before, after, path.name)
