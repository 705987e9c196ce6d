"""Edits a YAML text to a new content, and rewrites only lines whose value changed.

ruamel.yaml finds the places. Its round trip is not used, because it wraps long lists differently
and loses the comment after a removed entry.
"""

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, SequenceNode

from slipway.config.yaml_files import yaml_item, yaml_lines
from slipway.system.errors import SchemaError
from slipway.upgrade.pipeline_merge import keyed


def edited_text(text: str, content: Mapping[str, Any]) -> str:
    """Return a text of YAML, a mapping in block style with "\\n" as line break, with `content`.

    Comments stay, also those beside removed entries on lines of their own. SchemaError for a
    layout that cannot be edited so, such as one with anchors.
    """
    plain = text if text.endswith("\n") else f"{text}\n"
    edit = _LineEdit(plain)
    edit.mapping(YAML(pure=True).compose(plain), _loaded(plain), content)
    after = edit.result()
    try:
        is_whole = _loaded(after) == content
    except YAMLError:
        is_whole = False
    if not is_whole:
        raise SchemaError(
            "dvc.yaml cannot be merged automatically in this layout, such as with anchors, merge "
            "keys or stages in braces. Expected a stage per block. Nothing was changed. Write "
            "these out, then run `slipway upgrade` again."
        )
    return after


def _loaded(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


class TextEdit:
    """Replacements in a text, collected first and then made at once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pieces: list[tuple[int, int, str]] = []  # begin, end, new text

    def result(self) -> str:
        """Return the text after all replacements; those at one place keep their order."""
        parts, done = [], 0
        for begin, end, new in sorted(self._pieces, key=lambda piece: piece[:2]):
            parts += [self._text[done:begin], new]
            done = end
        return "".join([*parts, self._text[done:]])


class _LineEdit(TextEdit):
    """Replacements of whole entries of a YAML text in block style."""

    def mapping(self, node: MappingNode, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Change the entries of a mapping in block style."""
        column = node.start_mark.column
        last = self._line_start(node)
        for name_node, value in node.value:
            key = name_node.value
            if key not in new:
                self._remove(name_node, value)
                continue
            if new[key] != old.get(key, ...):
                self._change(name_node, value, old.get(key), new[key])
        ends = {name.value: self._line_end(value) for name, value in node.value}
        is_first = True
        for key, value in new.items():
            if key in ends:
                last, is_first = ends[key], False
            elif key not in old:
                text = "".join(yaml_lines(key, value, column))
                if isinstance(value, dict) and "cmd" in value:  # an empty line between stages
                    text = f"{text}\n" if is_first else f"\n{text}"
                self._insert(last, text)

    def _change(self, name: Node, node: Node, old: Any, new: Any) -> None:
        is_block = isinstance(node, CollectionNode) and not node.flow_style
        if is_block and isinstance(node, MappingNode) and isinstance(new, dict):
            self.mapping(node, old, new)
        elif is_block and isinstance(node, SequenceNode) and isinstance(new, list) and keyed(old):
            self._sequence(node, keyed(old) or {}, keyed(new) or {})
        else:
            begin, end = self._line_start(name), self._line_end(node)
            lines = "".join(yaml_lines(name.value, new, name.start_mark.column))
            self._pieces.append((begin, end, lines))

    def _sequence(self, node: SequenceNode, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Change the entries of a list in block style."""
        column = node.start_mark.column
        place = self._line_start(node)
        ends = {}
        for name, item in zip(old, node.value, strict=True):
            ends[name] = self._line_end(item)
            if name not in new or new[name] != old[name]:
                self._remove(item, item)
        for name, options in new.items():
            if name not in old or new[name] != old[name]:
                entry = name if options is None else {name: options}
                self._insert(place, f"{' ' * column}- {yaml_item(entry)}\n")
            place = ends.get(name, place)

    def _remove(self, first: Node, last: Node) -> None:
        self._pieces.append((self._line_start(first), self._line_end(last), ""))

    def _insert(self, place: int, text: str) -> None:
        self._pieces.append((place, place, text))

    def _line_start(self, node: Node) -> int:
        return self._text.rfind("\n", 0, node.start_mark.index) + 1

    def _line_end(self, node: Node) -> int:
        """Return the position after the last line of a value."""
        while isinstance(node, CollectionNode) and node.value and not node.flow_style:
            node = node.value[-1][1] if isinstance(node, MappingNode) else node.value[-1]
        end = node.end_mark.index
        return self._text.index("\n", end - (self._text[end - 1] == "\n")) + 1
