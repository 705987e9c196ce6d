"""The one reader of YAML; slipway/config/yaml_text.py is the one writer.

Like DVC, it reads YAML 1.2: `off` and `yes` are text, 1e-3 is a number. Mistakes are described with
their line and a correction.
"""

import copy
import datetime
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

_DATE = re.compile(r"\b\d{4}-\d\d?-\d\d?\b")
_CLASS_NAMES = ("classes", "label_map")  # keys of the section `data`


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
