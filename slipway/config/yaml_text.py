"""The one writer of YAML, which needs no library, because messages use it everywhere.

It quotes every text that a reader of YAML 1.2 (ruamel, DVC) or of YAML 1.1 (PyYAML, kubectl) would
take for something else: `no`, `1e5`, `0o17`, a line break.
"""

import datetime
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WIDTH = 100  # of a line
# A path, a word or several, or such as 16-mixed; none of them is a number, a date or an operator.
_PLAIN = re.compile(r"(\.{0,2}/|[^\W\d])([\w./-]| (?=[\w./-]))*|\d+-[A-Za-z]+")
_NO_TEXT = ("true", "yes", "on", "false", "no", "off", "none", "null", "y", "n")
_MAX_KEY = 1000  # characters; YAML allows 1024 for a key that has no question mark before it


def as_yaml(value: object) -> str:
    """Format a value as YAML on one line, such as null, 'text' or {min: 0.5, max: null}."""
    return _in_one_line(value, _quoted)


def as_plain_yaml(value: object) -> str:
    """Return a value as `as_yaml` does, with quotes only around texts that need them."""
    return _in_one_line(value, _plain)


def yaml_text(content: Mapping[str, Any]) -> str:
    """Return a file of YAML with nested mappings in block style."""
    return "".join(line for key, value in content.items() for line in yaml_lines(key, value))


def yaml_entry(key: object, value: object, indent: str = "") -> str:
    """Return `key: value` for a mapping in block style; two lines if the key is very long."""
    name, text = as_plain_yaml(key), as_plain_yaml(value)
    if len(name) > _MAX_KEY:
        return f"{indent}? {name}\n{indent}: {text}"
    return f"{indent}{name}: {text}"


def yaml_lines(key: object, value: Any, column: int = 0) -> Iterator[str]:
    """Yield the lines of an entry in block style, each with "\\n"; short lists stay in one line."""
    indent, line = " " * column, yaml_entry(key, value, " " * column)
    if not isinstance(value, dict | list) or not value or "\n" in line or _is_short(value, line):
        yield line + "\n"
        return
    yield f"{indent}{as_plain_yaml(key)}:\n"
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from yaml_lines(name, inner, column + 2)
        return
    yield from (f"{indent}  - {yaml_item(item)}\n" for item in value)


def yaml_item(value: Any) -> str:
    """Return an item of a list in block style; a mapping with one entry has no braces."""
    text = as_plain_yaml(value)
    is_entry = isinstance(value, dict) and len(value) == 1 and not text.startswith("{?")
    return text[1:-1] if is_entry else text


def yaml_comment(text: str) -> str:
    """Return a text as a comment for the end of a line, with the space before it; "" for none.

    A line break would end the comment, and YAML forbids control characters even here.
    """
    shown = _escaped(" ".join(text.split()))
    return f" # {shown}" if shown else ""


def comment_above(text: str, indent: str) -> str:
    """Return a text as lines of a comment, each with "\\n", for a place above an entry."""
    begin = f"{indent}# "
    lines = textwrap.wrap(
        yaml_comment(text)[3:],
        WIDTH,
        initial_indent=begin,
        subsequent_indent=begin,
        break_long_words=False,
    )
    return "".join(f"{line}\n" for line in lines)


def _is_short(value: Any, line: str) -> bool:
    return isinstance(value, list) and len(line) <= WIDTH and ": {" not in line


def _in_one_line(value: object, text: Callable[[str], str]) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_in_one_line(entry, text) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(_entry(key, entry, text) for key, entry in value.items())}}}"
    if isinstance(value, str):
        return text(value)
    if isinstance(value, datetime.date):  # a datetime is one, too
        return value.isoformat()
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    number = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    # Without the point, 1e-05 is text to YAML 1.1.
    return number if "." in number else number.replace("e", ".0e")


def _entry(key: object, value: object, text: Callable[[str], str]) -> str:
    name = as_plain_yaml(key)
    begin = f"? {name} " if len(name) > _MAX_KEY else name
    return f"{begin}: {_in_one_line(value, text)}"


def _plain(value: str) -> str:
    is_plain = _PLAIN.fullmatch(value) and value.isprintable() and value.lower() not in _NO_TEXT
    return value if is_plain else _quoted(value)


def _quoted(value: str) -> str:
    if value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    return '"' + _escaped(value.replace("\\", r"\\").replace('"', r"\"")) + '"'


def _escaped(text: str) -> str:
    """Write what is no printable character as an escape, such as \\n or \\u200b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
