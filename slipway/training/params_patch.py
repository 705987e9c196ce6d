"""Proposed changes of params.yaml: shown as a patch, written only when asked to, and then with every comment left in its place."""

import difflib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from slipway import files
from slipway.errors import ParamsError
from slipway.params import parse_params

_WIDTH = 1 << 16  # of a line, so that none is folded


def patched(text: str, changes: Mapping[str, Any]) -> str:
    """`text` with "section.key" values changed; ParamsError if a key is not there or the result is not valid."""
    yaml = _round_trip()
    content = yaml.load(text)
    for place, value in changes.items():
        *sections, key = place.split(".")
        section = content
        for name in sections:
            section = section[name]
        if key not in section:
            raise ParamsError(f"{place} is not in params.yaml, so it cannot be changed there.")
        section[key] = value
    buffer = io.StringIO()
    yaml.dump(content, buffer)
    parse_params(YAML(typ="safe", pure=True).load(buffer.getvalue()), "the changed params.yaml")
    return buffer.getvalue()


def difference(before: str, after: str, name: str = "params.yaml") -> str:
    """A patch that `patch -p1` takes; "" for none."""
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=1)
    return "".join(lines)


def propose(path: Path, changes: Mapping[str, Any], *, apply: bool) -> str:
    """The patch as text; with `apply` the file is replaced, atomically."""
    before = path.read_text()
    after = patched(before, changes)
    if apply and after != before:
        files.write_text(path, after)
    return difference(before, after, path.name)


def _round_trip() -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml
