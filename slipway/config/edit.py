"""Changes single values of `params.yaml` and keeps every other byte, such as comments and spacing.

A YAML library that reads and writes the file keeps comments, but reformats lists and mappings. So
the library is only used to find the position of a value.
"""

import copy
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from slipway.config.mistakes import fields_of
from slipway.config.network_arguments import arguments_class
from slipway.config.params import Params, choices_of, no_project, parse_params
from slipway.config.yaml_files import parse_value, parse_yaml
from slipway.config.yaml_text import (
    WIDTH,
    as_plain_yaml,
    comment_above,
    yaml_comment,
    yaml_entry,
)
from slipway.system import files
from slipway.system.errors import ParamsError, nearest

_NUMBERS = re.compile(r"\d[\d,.]*")


class Absent(Enum):
    """The value of a key that is left out."""

    ABSENT = "left out"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Edit:
    """A new value of one key, or its removal with its line.

    A comment in `former` explains only the former value, so it goes; every other comment stays.
    """

    place: tuple[str, ...]  # such as ("train", "epochs")
    value: Any  # ABSENT removes the key
    reason: str = ""
    former: Collection[str] = ()


def read_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse texts such as "train.epochs=5". Returns the values by key; values are YAML.

    Raises ParamsError for a text without "=" or with an invalid value.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise ParamsError(
                f"{text!r} is not an assignment. Write KEY=VALUE, such as train.epochs=5."
            )
        if key.strip() in changes:
            twice = [one for one in texts if one.partition("=")[0].strip() == key.strip()]
            raise ParamsError(
                f"{key.strip()} is given twice: {' and '.join(twice)}; expected one value for "
                "each key. Leave one of them out."
            )
        try:
            changes[key.strip()] = parse_value(value, key.strip())
        except (YAMLError, ValueError, LookupError):
            raise ParamsError(
                f"{text!r} has a value that is not YAML, expected one such as 5, text, [a, b] or "
                "{min: 0.9, max: null}. Put quotes around the whole assignment in a shell."
            ) from None
    return changes


def changed_text(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text of a params.yaml with changed values.

    `changes` maps keys such as "section.key" or "section.key.entry" to values. Raises ParamsError
    if a key is unknown or if the new values contradict each other.
    """
    text = assigned_text(text, changes)
    parse_params(read_text(text))
    return text


def assigned_text(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text with changed values, as `changed_text` does, without a check of the values.

    Raises ParamsError for a key that no section has, and that is not in the file either.
    """
    for key, value in changes.items():
        content = read_text(text)
        known = known_keys(content)
        if key not in known and not _is_open(key):
            raise _unknown_key(key, known)
        text = edited_text(text, [Edit(tuple(key.split(".")), value)])
    return text


def edited_text(text: str, edits: Sequence[Edit]) -> str:
    """Return the text of a params.yaml after the edits. The new values are not checked.

    Raises ParamsError if the layout of the file does not allow an edit.
    """
    expected = read_text(text)
    for edit in edits:
        if edit.value is ABSENT:
            text = _without(text, expected, edit.place, edit.former)
        else:
            text = _with(text, expected, edit)
        if read_text(text) != expected:
            raise ParamsError(
                f"{'.'.join(edit.place)} cannot be changed automatically in this layout of "
                "params.yaml. Change it by hand."
            )
    return text


def difference(before: str, after: str, name: str = "params.yaml") -> str:
    """Return a unified diff of two texts, for `patch -p1`; "" if nothing differs."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
        n=1,
    )
    return "".join(lines)


def propose(path: Path, changes: Mapping[str, Any], *, apply: bool) -> str:
    """Return the changes to a params.yaml as a patch. With `apply`, also write them atomically."""
    before = read_file(path)
    after = changed_text(before, changes)
    if apply and after != before:
        files.write_text(path, after)
    return difference(before, after, path.name)


def read_file(path: Path) -> str:
    """Return the text of a params.yaml. Raises ParamsError if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise no_project(path) from None


def known_keys(content: Mapping[str, Any]) -> list[str]:
    """Return all keys that may be set: the documented ones, and those in `content`."""
    arguments = arguments_class(choices_of(content)[0])
    declared = [*_declared(Params), *_declared(arguments, "train.network_arguments.")]
    return list(dict.fromkeys([*declared, *_flat(content)]))


def _declared(section: Any, place: str = "") -> Iterator[str]:
    """Yield the keys of a section's type, which may be optional, and of the sections inside."""
    for key, field in fields_of(section).items():
        yield f"{place}{key}"
        yield from _declared(field.annotation, f"{place}{key}.")


def _flat(content: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{place}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{place}{key}.")


def _with(text: str, content: dict[str, Any], edit: Edit) -> str:
    """Set the value of one key in `text` and in `content`. Returns the new text.

    Sections that the file leaves out are added.
    """
    parts, value = list(edit.place), copy.deepcopy(edit.value)
    node, mapping = YAML(pure=True).compose(text), content
    while len(parts) > 1 and isinstance(mapping.get(parts[0]), dict):
        node, mapping = _entry(node, parts[0]), mapping[parts.pop(0)]
    first, *inner = parts
    for part in reversed(inner):
        value = {part: value}
    is_same = first in mapping and mapping[first] == value
    mapping[first] = value
    entry = _entry(node, first)
    if entry is not None:
        if not is_same:
            text = _replaced(text, entry, value)
        return _with_reason(text, edit) if edit.reason or edit.former else text
    if node.flow_style:
        return _replaced(text, node, mapping)
    end = text.find("\n", _end(node))
    end = len(text) if end < 0 else end
    indent = " " * node.start_mark.column
    text = f"{text[:end]}\n{_block(first, value, indent, len(inner))}{text[end:]}"
    return _with_reason(text, edit) if edit.reason else text


def _without(
    text: str, content: dict[str, Any], place: tuple[str, ...], former: Collection[str]
) -> str:
    """Remove a key from `text` and from `content`, and a section that is empty then."""
    node, mapping = YAML(pure=True).compose(text), content
    for part in place[:-1]:
        node, mapping = _entry(node, part), mapping[part]
    if len(mapping) == 1 and len(place) > 1:
        return _without(text, content, place[:-1], former)
    del mapping[place[-1]]
    if node.flow_style:
        return _replaced(text, node, mapping)
    lines = _lines_of(text, node, place[-1], former)
    return text[: lines.begin] + text[lines.end + 1 :]


def _with_reason(text: str, edit: Edit) -> str:
    """Put the reason of a value in the place of comments that explain the former one."""
    node = YAML(pure=True).compose(text)
    for part in edit.place[:-1]:
        node = _entry(node, part)
    if node is None or node.flow_style:
        return text
    lines = _lines_of(text, node, edit.place[-1], edit.former)
    reason = "" if lines.remark else yaml_comment(edit.reason)
    entry = text[lines.key : lines.value_end]
    above = ""
    if reason and len(entry + reason) > WIDTH:
        above, reason = comment_above(edit.reason, " " * node.start_mark.column), ""
    remark = f" {lines.remark}" if lines.remark else reason
    return text[: lines.begin] + above + entry + remark + text[lines.end :]


class _EntryLines(NamedTuple):
    """The lines of one entry in a block mapping, as positions in the text."""

    begin: int  # of the comments above the entry that explain only its value
    key: int  # the start of its first line
    value_end: int
    end: int  # of its last line
    remark: str  # the user's comment at the end of that line, or ""


def _lines_of(text: str, mapping: Node, key: str, former: Collection[str]) -> _EntryLines:
    name, value = next(pair for pair in mapping.value if pair[0].value == key)
    start = begin = text.rfind("\n", 0, name.start_mark.index) + 1
    value_end = _end(value)
    end = text.find("\n", value_end)
    end = len(text) if end < 0 else end
    known = {_plain_comment(reason) for reason in former if reason}
    above: list[str] = []
    while (line := text[text.rfind("\n", 0, max(0, start - 1)) + 1 : start]).lstrip()[:1] == "#":
        above.insert(0, line.strip().removeprefix("#"))
        start -= len(line)
        if _plain_comment(" ".join(above)) in known:
            begin = start
    remark = text[value_end:end].strip()
    if _plain_comment(remark.removeprefix("#")) in known:
        remark = ""
    return _EntryLines(
        begin, text.rfind("\n", 0, name.start_mark.index) + 1, value_end, end, remark
    )


def _plain_comment(text: str) -> str:
    """Return a comment without its numbers, which differ between machines and with more rows."""
    return _NUMBERS.sub("0", " ".join(text.split()))


def _is_open(key: str) -> bool:
    """Return True for a key inside of a mapping with names of the user, such as evaluate.gates."""
    kind: Any = Params
    for part in key.split(".")[:-1]:
        field = fields_of(kind).get(part)
        kind = field.annotation if field else None
        if get_origin(kind) is dict:
            return True
    return False


def _block(key: str, value: Any, indent: str, depth: int) -> str:
    """Return the lines of a key whose value has `depth` new mappings, each with one entry."""
    if not depth:
        return yaml_entry(key, value, indent)
    ((inner, held),) = value.items()
    return f"{indent}{key}:\n{_block(inner, held, f'{indent}  ', depth - 1)}"


def _unknown_key(key: str, known: Sequence[str]) -> ParamsError:
    name = key.rpartition(".")[2]
    near = nearest(key, known) or [one for one in known if one.rpartition(".")[2] == name]
    meant = f"did you mean {' or '.join(near)}?" if near else "`slipway params` lists all."
    return ParamsError(f"params.yaml has no key {key}, expected one such as train.epochs; {meant}")


def _entry(node: Node, key: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _replaced(text: str, node: Node, value: Any) -> str:
    return text[: node.start_mark.index] + as_plain_yaml(value) + text[_end(node) :]


def _end(node: Node) -> int:
    """Return the position in the text at which a value ends.

    The library's own end mark of a block is too far: it lies after the comments below the block.
    """
    while isinstance(node, CollectionNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, MappingNode) else node.value[-1]
    end: int = node.end_mark.index
    return end


def read_text(text: str) -> dict[str, Any]:
    """Return the content of the text of a params.yaml, unchecked."""
    try:
        content = parse_yaml(text.encode(), "params.yaml")
    except ValueError as error:
        raise ParamsError(str(error)) from error
    if not isinstance(content, dict):
        raise ParamsError("params.yaml is not a mapping of sections. Restore it, such as with git.")
    return content
