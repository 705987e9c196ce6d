"""Writes a new params.yaml, with the keys that a user should review first at its top.

The comments on the other keys come from the default params.yaml in the package.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from slipway.config.params import Params, parse_params
from slipway.config.yaml_files import parse_yaml, yaml_comment, yaml_entry
from slipway.system.assets import asset

_WIDTH = 100
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[a-z_0-9]+):(?P<value>.*?)(?P<comment> # .*)?$")
# Of the keys that only tables or texts have, which the embedded file lacks.
_COMMENTS = {
    "data.columns": "corrections of the detected types; reports/columns.yaml lists them",
    "data.missing_values": 'words for a missing cell, such as "?"',
    "data.date_format": 'or, for dates that are not ISO 8601, "%d/%m/%Y"',
    "data.text_columns": "the texts of a row, joined in this order",
    "clean.min_characters": "of a text",
    "clean.max_characters": "of a text; also the service's limit",
    "clean.near_duplicate_similarity": "fraction of equal sequences of four characters",
    "clean.rules.control_characters": "flag: each run of them becomes a space",
    "clean.rules.garbled": "letters that were read in another encoding",
    "clean.rules.mixed_script": "Latin and Greek or Cyrillic letters in one word",
    "clean.rules.rare_script": "the script of less than 1 % of the texts",
    "clean.rules.personal_data": "e-mail addresses, phone and card numbers",
    "clean.rules.boilerplate": "a passage that only one class has",
    "precompute.mask_personal_data": "or [email, phone, card]: hidden, in the service as well",
    "precompute.max_text_bytes": "in UTF-8; longer texts are cut, and answers say so",
    "precompute.tokenizer": "null: bytes; or bpe, or a folder or file with a tokenizer.json",
    "precompute.vocabulary_size": "tokens to learn; only for bpe",
    "precompute.max_tokens": "of a text; only with a tokenizer",
    "augment.token_dropout": "probability that a token is left out; only with a tokenizer",
    "augment.word_deletion": "probability that a word is left out; only without a tokenizer",
    "clean.rules.type_violation": "a cell of another kind; flag: it counts as missing",
    "precompute.max_categories": "of one column; rarer ones count as unknown",
    "precompute.num_quantiles": "pieces of the range of a number, at most",
}
_FIRST = "# ---- Change these first. Each value was proposed; the reason is beside it. "
_OTHERS = "# ---- All other keys, as in every project. docs/reference/params.md explains each. "
_SEARCH = (
    "",
    "# For `slipway search`, which tries these values in about five times the time of a training.",
    "# No stage reads this section: docs/how-to/search.md.",
)


@cache
def template_text() -> str:
    """Return the text of the default params.yaml in the package."""
    return asset("params.yaml").read_text(encoding="utf-8")


def template_content() -> dict[str, Any]:
    """Return the content of the default params.yaml, as a copy that the caller may change."""
    content: dict[str, Any] = parse_yaml(template_text().encode(), "params.yaml")
    return content


@cache
def template_params() -> Params:
    """Return the default params, checked."""
    return parse_params(template_content())


def params_text(content: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Format `content` as YAML; `reasons` explain the keys to review first, as "section.key"."""
    first = [name for name in content if any(key.startswith(f"{name}.") for key in reasons)]
    scalars = [name for name, value in content.items() if not isinstance(value, dict)]
    others = [name for name in content if name not in first and name not in scalars]
    comments = {**_template_comments(), **_COMMENTS}
    lines = ["# The complete configuration of this model, written by `slipway init`."]
    lines += [_line(name, content[name], "", comments.get(name, "")) for name in scalars]
    lines += ["", _ruled(_FIRST)]
    for name in first:
        lines += ["", *_section(name, content[name], reasons, comments)]
    lines += ["", _ruled(_OTHERS)]
    for name in others:
        lines += ["", *_section(name, content[name], {}, comments)]
    return "\n".join(lines) + "\n"


def search_text(section: Mapping[str, Any]) -> str:
    """Format the section `search` as YAML, for the end of params.yaml."""
    lines = [*_SEARCH, "search:"]
    lines += [yaml_entry(key, section[key], "  ") for key in section if key != "space"]
    lines.append("  space:")
    lines += [yaml_entry(key, value, "    ") for key, value in section["space"].items()]
    return "\n".join(lines) + "\n"


def comment_of(key: str) -> str:
    """Return the comment beside a key in the default params.yaml; "" if it has none."""
    return {**_template_comments(), **_COMMENTS}.get(key, "")


def _ruled(text: str) -> str:
    return text + "-" * (_WIDTH - len(text))


def _section(
    name: str, content: Any, reasons: Mapping[str, str], comments: Mapping[str, str]
) -> Iterator[str]:
    if not isinstance(content, dict) or not content:
        yield _line(name, content, "", comments.get(name, ""))
        return
    yield f"{name}:" + yaml_comment(comments.get(name, ""))
    proposed = [key for key in content if f"{name}.{key}" in reasons]
    for key in proposed:
        yield from _reasoned(key, content[key], reasons[f"{name}.{key}"])
    rest = [key for key in content if key not in proposed]
    if proposed and rest:
        yield "  # Further keys, rarely changed:"
    for key in rest:
        value, place = content[key], f"{name}.{key}"
        if place == "clean.rules":
            yield f"  {key}:" + yaml_comment(comments[place])
            yield from (
                _line(inner, action, "    ", comments.get(f"{place}.{inner}", ""))
                for inner, action in value.items()
            )
        else:
            yield _line(key, value, "  ", comments.get(place, ""))


def _reasoned(key: str, value: Any, reason: str) -> Iterator[str]:
    line = _line(key, value, "  ", reason)
    if len(line) <= _WIDTH or "\n" in line:
        yield line
        return
    comment = yaml_comment(reason).removeprefix(" # ")
    yield from textwrap.wrap(
        comment, _WIDTH, initial_indent="  # ", subsequent_indent="  # ", break_long_words=False
    )
    yield _line(key, value, "  ", "")


def _line(key: str, value: Any, indent: str, comment: str) -> str:
    """Return the YAML of one key with its value; a long mapping gets a line for each entry."""
    line, remark = yaml_entry(key, value, indent), yaml_comment(comment)
    if isinstance(value, dict) and len(line) > _WIDTH:
        inner = [yaml_entry(name, entry, f"{indent}  ") for name, entry in value.items()]
        return "\n".join([f"{indent}{key}:{remark}", *inner])
    return line + remark


@cache
def _template_comments() -> dict[str, str]:
    """Return the comment at the end of the line of each key, by "section.key"."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in template_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        path = [entry for entry in path if entry[0] < depth] + [(depth, match["key"])]
        if match["comment"]:
            found[".".join(key for _, key in path)] = match["comment"].removeprefix(" # ")
    return found
