"""Moves the text of params.yaml to the current version, and keeps every other byte of it.

slipway/upgrade/renames.yaml says what changed. ruamel.yaml finds the places of keys and values in
the text; its round trip would keep comments, but reformat lists and mappings. The new text is read
again and compared with the content that it should have.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from slipway.config.network_arguments import arguments_class
from slipway.config.params import Params, mistakes_in, read_content, value_at
from slipway.config.yaml_files import as_plain_yaml, as_yaml, yaml_comment, yaml_entry
from slipway.kinds.registry import KINDS, settings_of_kinds
from slipway.project.params_text import comment_of
from slipway.system.errors import ParamsError
from slipway.upgrade import renames
from slipway.upgrade.yaml_edit import TextEdit

_CONFLICT = b"\n<<<<<<< "  # git's marker of a merge conflict
_ARGUMENTS = "train.network_arguments"
_UNTOUCHED = "Nothing was changed."


@dataclass(frozen=True)
class ParamsMigration:
    """A params.yaml of the current version and the changes that led to it."""

    text: str
    content: dict[str, Any]
    version: int  # of the file before
    renamed: dict[str, str] = field(default_factory=dict)  # new key by old key
    replaced: dict[str, str] = field(default_factory=dict)  # "old -> new" by new key
    added: dict[str, str] = field(default_factory=dict)  # value by key


def migrate(path: Path) -> ParamsMigration:
    """Return the migration of a params.yaml to the current version, without writing it.

    Raises ParamsError if the file has a newer version, a key that neither the table nor the current
    version knows, or another mistake, because its meaning would be uncertain.
    """
    if path.is_file() and _CONFLICT in path.read_bytes():
        raise ParamsError(
            "params.yaml has conflict markers of git, expected your own version of the file. "
            f"{_UNTOUCHED} Run `git checkout --ours params.yaml`, then `slipway upgrade` again."
        )
    content = read_content(path)
    version = _version_of(content)
    text = path.read_bytes().decode()
    edit = _Edit(text)
    table = renames.table()
    if version < table.to:
        _rename(edit, content, table.params)
        _replace(edit, content, table.params, table.params_value)
    _add(edit, content, table.params_added)
    _set_version(edit, content, table.to)
    if mistakes := mistakes_in(content):
        lines = "".join(f"\n  {line}" for line in mistakes)
        raise ParamsError(
            f"params.yaml (version {version}) would still have mistakes as version {table.to}:"
            f"{lines}\nExpected the keys of version {version}. {_UNTOUCHED} Correct these, then "
            "run `slipway upgrade` again."
        )
    after = edit.result()
    if not _holds(after, content):
        raise ParamsError(
            "params.yaml cannot be upgraded automatically in this layout, such as with anchors, "
            f"merge keys or tabs. Expected a plain mapping of sections. {_UNTOUCHED} Write anchors "
            "out, then run `slipway upgrade` again."
        )
    return ParamsMigration(after, content, version, edit.renamed, edit.replaced, edit.added)


def _holds(text: str, content: Mapping[str, Any]) -> bool:
    try:
        found: object = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return False
    return found == content


def _version_of(content: Mapping[str, Any]) -> int:
    version, newest = content.get("version", 0), renames.table().to
    if type(version) is not int or version < 0:
        raise ParamsError(
            f"params.yaml has version {as_yaml(version)}, expected a whole number from 0 to "
            f"{newest}. {_UNTOUCHED} Restore the line `version` with git."
        )
    if version > newest:
        raise ParamsError(
            f"params.yaml has version {version}, this Slipway reads version {newest} and older. "
            f"{_UNTOUCHED} Install the Slipway that wrote it: pip install --upgrade slipway-ml"
        )
    return version


class _Edit(TextEdit):
    """Replacements of keys and values in a text of YAML."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.renamed: dict[str, str] = {}
        self.replaced: dict[str, str] = {}
        self.added: dict[str, str] = {}
        self._root = YAML(pure=True).compose(text)
        self._break = "\r\n" if "\r\n" in text else "\n"

    def has(self, key: str) -> bool:
        """Return True if the original text has the section and the key."""
        section, _, name = key.rpartition(".")
        mapping = self._entry(section)[1] if section else self._root
        return any(inner.value == name for inner, _ in mapping.value)

    def rename(self, key: str, new: str) -> None:
        """Rename a key within its section."""
        node, _ = self._entry(key)
        self._put(node, new.rpartition(".")[2])
        self.renamed[key] = new

    def replace(self, key: str, value: object) -> None:
        """Replace the value of `key`, a scalar on one line."""
        _, node = self._entry(key)
        self._put(node, as_plain_yaml(value))

    def insert(self, key: str, value: Any, after: str | None, *, is_section: bool = False) -> None:
        """Add a key after another key of its section, or else as the section's first key.

        A section has a line for each of its keys, and at the top an empty line before it.
        """
        section, _, name = key.rpartition(".")
        mapping = self._entry(section)[1] if section else self._root
        first = mapping.value[0][0].start_mark
        if mapping.flow_style:
            entry = yaml_entry(name, value)
            place = self._entry(after)[1].end_mark.index if after else first.index
            self._pieces.append((place, place, f", {entry}" if after else f"{entry}, "))
            return
        lines = [_line(key, value)]
        if is_section:
            lines = [_line(key), *(f"  {_line(f'{key}.{k}', v)}" for k, v in value.items())]
            lines = lines if section else ["", *lines]
        indent = self._break + " " * first.column
        if after is None:
            self._pieces.append((first.index, first.index, "".join(x + indent for x in lines)))
            return
        last = self._entry(after)[1]
        while last.value and not isinstance(last, ScalarNode) and not last.flow_style:
            last = last.value[-1][1] if isinstance(last, MappingNode) else last.value[-1]
        end = last.end_mark.index
        end = self._text.find("\n", end - (self._text[end - 1] == "\n"))  # of a block of text
        end = len(self._text) if end < 0 else end - (self._text[end - 1] == "\r")
        new = "".join((indent if x else self._break) + x for x in lines)
        self._pieces.append((end, end, new))

    def _put(self, node: Node, text: str) -> None:
        self._pieces.append((node.start_mark.index, node.end_mark.index, text))

    def _entry(self, key: str) -> tuple[Node, Any]:
        """Return (key node, value node) of a key by its name in the original text."""
        *sections, name = key.split(".")
        node = self._root
        for section in sections:
            node = next(value for inner, value in node.value if inner.value == section)
        name_node, value = next(pair for pair in node.value if pair[0].value == name)
        return name_node, value


def _line(key: str, value: object = ...) -> str:
    """Return the line of a key with its value and the comment of the embedded params.yaml."""
    text = f"{key.rpartition('.')[2]}:" + (f" {as_plain_yaml(value)}" if value is not ... else "")
    return text + yaml_comment(comment_of(key))


def _rename(edit: _Edit, content: dict[str, Any], names: Mapping[str, str]) -> None:
    for old, new in names.items():
        place, _, name = old.rpartition(".")
        section = value_at(content, place)
        if not isinstance(section, dict) or name not in section:
            continue
        key = new.rpartition(".")[2]
        if key in section:
            raise ParamsError(
                f"params.yaml has {old} and also {new}, its name now, expected one of them. "
                f"{_UNTOUCHED} Remove one, then run `slipway upgrade` again."
            )
        section[key] = section.pop(name)
        edit.rename(old, new)


def _replace(
    edit: _Edit,
    content: dict[str, Any],
    names: Mapping[str, str],
    values: Mapping[str, Mapping[Any, Any]],
) -> None:
    old_names = {new: old for old, new in names.items() if old in edit.renamed}
    for pattern, table in values.items():
        place, _, name = pattern.rpartition(".")
        section = value_at(content, place)
        if not isinstance(section, dict):
            continue
        for key in list(section) if name == "*" else [name]:
            found = section.get(key)
            if isinstance(found, bool) or not isinstance(found, str | int | float):
                continue
            if found in table:
                section[key] = table[found]
                where = f"{place}.{key}"
                edit.replace(old_names.get(where, where), table[found])
                edit.replaced[where] = f"{as_plain_yaml(found)} -> {as_plain_yaml(table[found])}"


def _add(edit: _Edit, content: dict[str, Any], added: Mapping[str, Any]) -> None:
    """Add missing keys and sections, except keys that the input or the network does not read."""
    task = value_at(content, "data.task")
    if not isinstance(task, str) or task not in KINDS:  # a mistake, which is reported later
        return
    foreign = settings_of_kinds().keys() - KINDS[task].settings.keys()
    arguments = arguments_class(str(value_at(content, "train.network")))
    sections: dict[str, dict[str, Any]] = {}
    for key, value in added.items():
        place, _, name = key.rpartition(".")
        if key in foreign or (place == _ARGUMENTS and name not in _fields(arguments)):
            continue
        present = value_at(content, place)
        if isinstance(present, dict) and present and name not in present:
            edit.insert(key, value, _place_before(edit, key, present))
            edit.added[key] = as_plain_yaml(value)
            present[name] = copy.deepcopy(value)
        elif not isinstance(present, dict):
            sections.setdefault(place, {})[name] = copy.deepcopy(value)
    for place in [key for key in _keys(Params, "") if key in sections]:
        parent, _, name = place.rpartition(".")
        outer = value_at(content, parent) if parent else content
        if isinstance(outer, dict) and name not in outer:
            section = sections[place]
            edit.insert(place, section, _place_before(edit, place, outer), is_section=True)
            edit.added |= {f"{place}.{key}": as_plain_yaml(value) for key, value in section.items()}
            outer[name] = section


def _fields(arguments: type[BaseModel] | None) -> Mapping[str, Any]:
    return arguments.model_fields if arguments else {}


def _place_before(edit: _Edit, key: str, section: Mapping[str, Any]) -> str | None:
    """Return the existing key after which a new key belongs, by the order of `Params`."""
    place = key.rpartition(".")[0]
    order = list(_keys(Params, ""))
    if key not in order:  # an argument of a network: behind the last one
        return f"{place}.{list(section)[-1]}"
    old_names = {new: old for old, new in edit.renamed.items()}
    for earlier in reversed(order[: order.index(key)]):
        where, _, name = earlier.rpartition(".")
        found = old_names.get(earlier, earlier)
        if where == place and name in section and edit.has(found):
            return found
    return None


def _keys(model: type[BaseModel], section: str) -> Iterator[str]:
    for name, declared in model.model_fields.items():
        yield section + name
        kind = declared.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{section}{name}.")


def _set_version(edit: _Edit, content: dict[str, Any], version: int) -> None:
    if content.get("version") == version:
        return
    if "version" in content:
        edit.replace("version", version)
        edit.replaced["version"] = f"{content['version']} -> {version}"
    else:
        edit.insert("version", version, None)
        edit.added["version"] = str(version)
    content["version"] = version
