"""Changes single values of `params.yaml` and keeps every other byte, such as comments and spacing.

A YAML library that reads and writes the file keeps comments, but reformats lists and mappings. So
the library is only used to find the position of a value.
"""

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from slipway.config.mistakes import fields_of
from slipway.config.network_arguments import arguments_class
from slipway.config.params import Params, choices_of, no_project, parse_params
from slipway.config.yaml_files import parse_value, parse_yaml
from slipway.config.yaml_text import as_plain_yaml, yaml_entry
from slipway.system import files
from slipway.system.errors import ParamsError


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
    expected = _content(text)
    for place, value in changes.items():
        text = _with(text, expected, place, value)
        if _content(text) != expected:
            raise ParamsError(
                f"{place} cannot be changed automatically in this layout of params.yaml. "
                "Change it by hand."
            )
    parse_params(copy.deepcopy(expected))
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
    try:
        before = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise no_project(path) from None
    after = changed_text(before, changes)
    if apply and after != before:
        files.write_text(path, after)
    return difference(before, after, path.name)


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


def _with(text: str, content: dict[str, Any], key: str, value: Any) -> str:
    """Change the value of one key in `text` and in `content`. Returns the new text.

    Sections that the file leaves out are added.
    """
    parts, known = key.split("."), known_keys(content)
    if key not in known and not _is_open(key):
        raise _unknown_key(key, known)
    node, mapping = YAML(pure=True).compose(text), content
    while len(parts) > 1 and isinstance(mapping.get(parts[0]), dict):
        node, mapping = _entry(node, parts[0]), mapping[parts.pop(0)]
    first, *inner = parts
    for part in reversed(inner):
        value = {part: value}
    mapping[first] = value
    entry = _entry(node, first)
    if entry is not None:
        return _replaced(text, entry, value)
    if node.flow_style:
        return _replaced(text, node, mapping)
    end = text.find("\n", _end(node))
    end = len(text) if end < 0 else end
    indent = node.start_mark.column
    return f"{text[:end]}\n{_block(first, value, ' ' * indent, len(inner))}{text[end:]}"


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
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8) or [
        one for one in known if one.rpartition(".")[2] == name
    ]
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


def _content(text: str) -> dict[str, Any]:
    try:
        content = parse_yaml(text.encode(), "params.yaml")
    except ValueError as error:
        raise ParamsError(str(error)) from error
    if not isinstance(content, dict):
        raise ParamsError("params.yaml is not a mapping of sections. Restore it, such as with git.")
    return content
