"""Writes the params.yaml of a new project: what its owner decides, each with its reason.

A key that is left out has its default, so the file stays short.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipway.config.params import Params
from slipway.config.yaml_text import WIDTH, comment_above, yaml_comment, yaml_entry

_HEAD = """\
# What this project decides, written by `slipway init`; the reason is beside each value. Every other
# key has its default: `slipway params` prints all, `slipway set KEY=VALUE` changes one.
"""
_SEARCH = """
# For `slipway search`, which tries these values in about five times the time of a training.
search:
"""


def params_text(content: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Format `content` as YAML, by section; `reasons` explain the keys, as "section.key"."""
    lines: list[str] = []
    for name in (name for name in Params.model_fields if name in content):
        if not isinstance(content[name], dict):
            lines.append(yaml_entry(name, content[name], ""))
            continue
        lines += ["", f"{name}:"]
        for key, value in content[name].items():
            lines += _entry(key, value, reasons.get(f"{name}.{key}", ""))
    return _HEAD + "\n".join(lines) + "\n"


def search_text(section: Mapping[str, Any]) -> str:
    """Format the section `search` as YAML, for the end of params.yaml."""
    lines = [yaml_entry(key, section[key], "  ") for key in section if key != "space"]
    lines.append("  space:")
    lines += [yaml_entry(key, value, "    ") for key, value in section["space"].items()]
    return _SEARCH + "\n".join(lines) + "\n"


def _entry(key: str, value: Any, reason: str) -> Iterator[str]:
    """Yield the lines of one key: its reason beside it, or above it where both are too long."""
    line, remark = yaml_entry(key, value, "  "), yaml_comment(reason)
    if isinstance(value, dict) and value and len(line) > WIDTH:
        yield f"  {key}:{remark}"
        yield from (yaml_entry(name, entry, "    ") for name, entry in value.items())
    elif len(line + remark) <= WIDTH:
        yield line + remark
    else:
        yield comment_above(reason, "  ").rstrip("\n")
        yield line
