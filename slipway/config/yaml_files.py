"""The one reader and the one writer of YAML.

Like DVC, it reads YAML 1.2: `off` and `yes` are text, 1e-3 is a number. Mistakes are described with
their line and a correction. The writer quotes every text that a reader of YAML 1.2 or of YAML 1.1
(PyYAML, kubectl) would take for something else: `no`, `1e5`, `0o17`, a line break.
"""

import copy
import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

_DATE = re.compile(r"\b\d{4}-\d\d?-\d\d?\b")
_WIDTH = 100
# A path, a word or several, or such as 16-mixed; none of them is a number, a date or an operator.
_PLAIN = re.compile(r"(\.{0,2}/|[^\W\d])([\w./-]| (?=[\w./-]))*|\d+-[A-Za-z]+")
_NO_TEXT = ("true", "yes", "on", "false", "no", "off", "none", "null", "y", "n")
_CLASS_NAMES = ("classes", "label_map")  # keys of the section `data`
_MAX_KEY = 1000  # characters; YAML allows 1024 for a key that has no question mark before it


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises ValueError that describes the mistake and its correction."""
    return parse_yaml(path.read_bytes(), str(path))


def parse_yaml(payload: bytes, name: str) -> Any:
    """Parse the content of the YAML file `name`. Raises ValueError with mistake and correction."""
    try:
        return copy.deepcopy(_loaded(payload))
    except MarkedYAMLError as error:
        raise ValueError(_misplaced(error, payload, name)) from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    except RecursionError:
        text = f"{name} is nested too deeply to be read. Remove unneeded brackets or indents."
        raise ValueError(text) from None
    except (ValueError, LookupError) as error:  # a date, or the value of a tag such as !!int
        text = payload.decode(errors="replace")
        dates = [date for date in _DATE.findall(text) if not _exists(date)]
        wrong = f"dates that do not exist: {', '.join(dates)}"
        if not dates:
            wrong = f"a wrong value: {error}"
        text = f"{name} holds {wrong}. Correct it, and write dates in quotes: '2024-02-29'."
        raise ValueError(text) from error


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


@lru_cache(maxsize=16)
def _loaded(payload: bytes) -> Any:
    """Parse YAML. A stage reads params.yaml several times, and each reading takes 30 ms."""
    content = YAML(typ="safe", pure=True).load(payload)
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(data, dict) and any(_has_number(data.get(key)) for key in _CLASS_NAMES):
        root = YAML(typ="safe", pure=True).compose(payload)
        for key in _CLASS_NAMES:
            if (node := _node_at(_node_at(root, "data"), key)) is not None:
                data[key] = _as_written(data[key], node)
    return content


def parse_value(text: str, key: str) -> Any:
    """Parse the YAML value of a key such as data.classes, whose numbers may be names."""
    value = YAML(typ="safe", pure=True).load(text)
    if key not in [f"data.{name}" for name in _CLASS_NAMES] or not _has_number(value):
        return value
    return _as_written(value, YAML(typ="safe", pure=True).compose(text))


def _has_number(names: Any) -> bool:
    found = [*names, *names.values()] if isinstance(names, dict) else names
    return isinstance(found, list) and any(type(name) in (int, float) for name in found)


def _node_at(mapping: Any, key: str) -> Any:
    """Return the node of a key; None if the key comes from `<<`."""
    pairs = [] if mapping is None else mapping.value
    return next((value for name, value in pairs if name.value == key), None)


def _as_written(value: Any, node: Any) -> Any:
    """Return class names with numbers such as 0x1F as their text; 7 stays a number, a mistake."""
    if isinstance(value, list):
        return [_as_written(*pair) for pair in zip(value, node.value, strict=True)]
    if isinstance(value, dict):
        pairs = zip(value.items(), node.value, strict=True)
        return {
            _as_written(name, name_node): _as_written(meant, meant_node)
            for (name, meant), (name_node, meant_node) in pairs
        }
    is_number = type(value) in (int, float)
    return node.value if is_number and node.value != repr(value) else value


def _misplaced(error: MarkedYAMLError, payload: bytes, name: str) -> str:
    """Return text about the line of a repeated key, or of a block with the wrong indentation."""
    lines = payload.decode(errors="replace").splitlines()
    number = 0 if error.problem_mark is None else error.problem_mark.line
    shown = lines[number].strip() if number < len(lines) else "the end of the file"
    if isinstance(error, DuplicateKeyError):
        return (
            f"{name} has a key twice, the second time in line {number + 1}: `{shown}`; expected "
            "every key once. Remove one of the two, or merge their blocks."
        )
    return (
        f"{name} is not YAML at line {number + 1}: `{shown}` ({error.problem}); expected "
        "`key: value`, as far indented as its neighbours. Correct this line or the one before it; "
        "a pasted block is often indented differently, or not whole."
    )


def _exists(date: str) -> bool:
    try:
        datetime.date(*map(int, date.split("-")))
    except ValueError:
        return False
    return True


def _is_short(value: Any, line: str) -> bool:
    return isinstance(value, list) and len(line) <= _WIDTH and ": {" not in line


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
