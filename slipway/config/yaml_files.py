"""Reads YAML files, and describes their mistakes with the line and a correction.

Like DVC, it is YAML 1.2: `off` and `yes` are text, 1e-3 is a number.
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
    return YAML(typ="safe", pure=True).load(payload)


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
