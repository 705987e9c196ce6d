"""Imports the user's own code, named "package.module:name" in params.yaml, and locates its faults.

Modules are searched in the project's folder (the working directory) before installed packages.
"""

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from slipway.system.contract import Contract
from slipway.system.errors import UnavailableError
from slipway.system.module_search import search_the_project

NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in .*\n(.*)')
_NOT_THE_USERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)


class UserCode(Contract):
    """A part of a model that is the user's own code."""

    key: str  # key of params.yaml: "train.network"
    name: str  # "package.module:name"
    sha256: str  # hex, of the project's files that it reaches


def is_user_code(name: str) -> bool:
    """Return True if the name is user code ("package.module:name"), not a built-in of Slipway."""
    return ":" in name


def is_well_formed(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None


def import_named(name: str) -> Any:
    """Import the object `name`. Raises UnavailableError with the file and line of the fault."""
    module, _, attribute = name.partition(":")
    search_the_project()
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        if error.obj is not sys.modules.get(module) or error.name != attribute:
            raise _not_imported(name, error) from error
        raise UnavailableError(
            f"{module} has no function {attribute!r}, which {name} names. "
            "Write it, or correct the name."
        ) from None
    except SystemExit as error:  # would end the stage silently, with this exit code
        raise UnavailableError(
            f"{name} cannot be imported: importing {module} calls sys.exit({error.code!r})"
            f"{_in(fault_place(error))}. "
            "Put that call under `if __name__ == '__main__':`, or remove it."
        ) from error
    except Exception as error:
        raise _not_imported(name, error) from error


def failure(error: BaseException, code: object = None) -> str:
    """Return text about an error of the user's code: "ValueError: no face (faces.py, line 3: ...)".

    The place is the last line of the user's that ran, or else the definition of `code`.
    """
    text = f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")
    place = fault_place(error) or definition_place(code)
    return f"{text} ({place})" if place else text


def fault_place(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback; "" if there is none.

    torch's exporter does not run the code in frames, but writes them into its message.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_the_users(error.filename):
        return _place(error.filename, error.lineno, error.text)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_the_users(frame.filename)
    ]
    if frames:
        return _place(frames[-1].filename, frames[-1].lineno, frames[-1].line)
    named = [found for found in _FRAME.findall(str(error)) if _is_the_users(found[0])]
    return _place(named[-1][0], int(named[-1][1]), named[-1][2]) if named else ""


def definition_place(code: object) -> str:
    """Return the line that defines a function or a class; "" if Python does not know it."""
    try:
        file = inspect.getsourcefile(code)  # type: ignore[arg-type]
        line = inspect.getsourcelines(code)[1]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""
    return _place(file, line, None) if file and _is_the_users(file) else ""


def _not_imported(name: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{name} cannot be imported: {failure(error)}. Fix the code, or install what it needs."
    )


def _is_the_users(file: str) -> bool:
    path = Path(file)
    return path.is_file() and not any(map(path.is_relative_to, _NOT_THE_USERS))


def _place(file: str, line: int | None, text: str | None) -> str:
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}, line {line}" + (f": `{text.strip()}`" if text and text.strip() else "")


def _in(place: str) -> str:
    return f" ({place})" if place else ""
