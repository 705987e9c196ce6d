"""Runs user functions, named "package.module:function". Their code is verified before it runs.

The digest covers the .py files of the function's module, or of its whole package. Imports from
elsewhere are not covered. `load` imports the code only if it has the expected digest.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from slipway.system.errors import ImageError, IntegrityError, ParamsError, UnavailableError
from slipway.system.module_search import search_the_project
from slipway.system.user_code import import_named, is_well_formed

Scalar = bool | int | float | str
Values = dict[str, Scalar]
ImageFunction = Callable[[Image.Image], Image.Image | tuple[Image.Image, Values]]
_RULE = "transform_failed"
_loaded: dict[str, str] = {}  # package -> its digest when it was imported


def code_digest(function: str) -> str:
    """Return the hex SHA-256 of names and contents of the function's .py files, without imports.

    Raises ParamsError for a malformed name, UnavailableError if the module does not exist.
    """
    module, _ = _split(function)
    root, files = _source_files(module, function)
    digest = hashlib.sha256()
    for path in files:
        name, content = path.relative_to(root).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %b %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


@lru_cache(maxsize=16)
def load(function: str, sha256: str) -> ImageFunction:
    """Import the function. Raises IntegrityError, before any code runs, if its digest differs.

    Raises UnavailableError if it cannot be imported, or if this process imported an older version.
    """
    module, _ = _split(function)
    found = code_digest(function)
    if found != sha256:
        raise IntegrityError(
            f"the code of {function} has the SHA-256 {found[:16]}..., expected {sha256[:16]}...: "
            "it changed since it was used. Restore that code, or use the new code: `slipway run`."
        )
    package = module.partition(".")[0]
    if _loaded.setdefault(package, sha256) != sha256:
        raise UnavailableError(
            f"this process has already imported an older version of {package}. Restart it."
        )
    loaded = import_named(function)
    if not callable(loaded):
        raise UnavailableError(
            f"{function} is {type(loaded).__name__}, expected a function of one image."
        )
    _check_signature(function, loaded)
    return loaded  # type: ignore[no-any-return]


def run(function: str, sha256: str, image: Image.Image) -> tuple[Image.Image, Values]:
    """Apply the function to `image`; return its image and its extra values ({} without any).

    Raises ImageError with the rule `transform_failed` if it raises or returns something else, and
    the errors of `load` if it cannot be loaded.
    """
    loaded = load(function, sha256)
    try:
        answer: object = loaded(image)
    except (Exception, SystemExit) as error:
        raise ImageError(_RULE, f"{function} raised {type(error).__name__}: {error}") from error
    made, values = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(made, Image.Image) or not isinstance(values, dict):
        parts = answer if isinstance(answer, tuple) else (answer,)
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ImageError(
            _RULE, f"{function} returned {kinds}, expected an image, or an image and a dict"
        )
    if min(made.size) == 0:
        raise ImageError(
            _RULE,
            f"{function} returned an image of {made.width}x{made.height} pixels, "
            "expected at least 1x1",
        )
    return made, {str(key): _scalar(function, key, value) for key, value in values.items()}


def _check_signature(function: str, loaded: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(loaded)
    except ValueError:  # compiled code has no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise UnavailableError(
            f"{function} has the arguments {signature}, expected one image as the only required "
            f"argument ({error}). Write it as `def {function.partition(':')[2]}(image):`."
        ) from None


def _scalar(function: str, key: object, value: object) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
        raise ImageError(
            _RULE,
            f"{function} returned {key}={value!r}, expected a finite number, a string or a boolean",
        )
    return value


def _split(function: str) -> tuple[str, str]:
    module, _, name = function.partition(":")
    if not is_well_formed(function):
        raise ParamsError(
            f"{function!r} does not name a function, expected 'package.module:function', such as "
            "'transforms.faces:crop'."
        )
    return module, name


def _source_files(module: str, function: str) -> tuple[Path, list[Path]]:
    """Return the .py files that the digest covers, and the folder that their names are relative to.

    Imports nothing. The folder comes first.
    """
    search_the_project()
    importlib.invalidate_caches()
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    if spec and not folders and not rest and spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin).parent, [Path(spec.origin)]
    for folder in folders:
        is_module = rest and folder.joinpath(*rest).with_suffix(".py").is_file()
        if is_module or folder.joinpath(*rest, "__init__.py").is_file():
            return folder, sorted(path for path in folder.rglob("*.py") if path.is_file())
    raise UnavailableError(
        f"{function} names the module {module}, which has no Python file here. "
        "Put it into the folder transforms/, install it, or correct precompute.transform."
    )
