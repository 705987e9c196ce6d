"""Changes single values of `params.yaml` and keeps every other byte, such as comments and spacing.

A YAML library's round trip keeps comments but reformats lists and mappings, so it is only used to
find the position of a value.
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
    """Return `text` with other values, each named "section.key".

    ParamsError if a key is missing or the values contradict each other.
    """
    expected = _content(text)
    for place, value in changes.items():
        text = _with(text, place, value)
        section, _, key = place.partition(".")
        expected[section][key] = value
    if _content(text) != expected:
        raise ParamsError(
            f"{', '.join(changes)} cannot be changed automatically in this layout of params.yaml. "
            "Change it by hand."
        )
    parse_params(expected)
    return text


def difference(before: str, after: str, name: str = "params.yaml") -> str:
    """Return a patch for `patch -p1`; "" if nothing differs."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
        n=1,
    )
    return "".join(lines)


def propose(path: Path, changes: Mapping[str, Any], *, apply: bool) -> str:
    """Return the patch as text; with `apply` replace the file atomically."""
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
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _content(text: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return content
