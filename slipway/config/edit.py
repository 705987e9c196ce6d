"""Changes single values of `params.yaml` and leaves every other byte of it, comments and spacing, as it is.

A YAML library's round trip keeps comments, but spaces lists and mappings its own way: it only says where a value stands.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from slipway.config.params import parse_params
from slipway.system import files
from slipway.system.errors import ParamsError

_SCALAR = re.compile(r"""("[^"]*"|'[^']*'|[^\s#,}][^#,}\n]*?)(?=\s*(?:[,}]|#|$))""")


def changed_text(text: str, changes: Mapping[str, Any]) -> str:
    """`text` with other values, each named "section.key"; ParamsError if a key is not there or the values do not fit together."""
    expected = _content(text)
    for place, value in changes.items():
        text = _with(text, place, value)
        section, _, key = place.partition(".")
        expected[section][key] = value
    if _content(text) != expected:
        raise ParamsError(
            f"params.yaml is written in a way in which {', '.join(changes)} cannot be changed. Change it by hand."
        )
    parse_params(expected)
    return text


def difference(before: str, after: str, name: str = "params.yaml") -> str:
    """A patch that `patch -p1` takes; "" for none."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
        n=1,
    )
    return "".join(lines)


def propose(path: Path, changes: Mapping[str, Any], *, apply: bool) -> str:
    """The patch as text; with `apply` the file is replaced, in one go."""
    before = path.read_text()
    after = changed_text(before, changes)
    if apply and after != before:
        files.write_text(path, after)
    return difference(before, after, path.name)


def _with(text: str, place: str, value: Any) -> str:
    section, _, key = place.partition(".")
    places = YAML().load(text)
    if key not in places.get(section, {}):
        raise ParamsError(f"params.yaml has no key {place}.")
    line, column = places[section].lc.value(key)
    lines = text.splitlines(keepends=True)
    lines[line] = lines[line][:column] + _SCALAR.sub(
        lambda _: _scalar(value), lines[line][column:], count=1
    )
    return "".join(lines)


def _scalar(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _content(text: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return content
