"""Digests of the code that each stage reaches, which `dvc.yaml` names in place of lists of files.

DVC does not follow imports, so a change in the library would not re-run a stage. The stage `code`
writes one digest per stage into `code.yaml`, which the other stages have among their params. A
stage reaches what it imports, what that imports, the modules that are started by name in a process
of their own, the `__init__.py` of every package around these, and every other file beside them:
pages, scripts, texts. Of the parts that it loads from a kind's record, it reaches those of the kind
that `data.task` in params.yaml names: an edit to tables re-runs no training of images. The stages that call the user's functions reach all of `transforms/`.
Comments, docstrings that nothing reads and blank lines do not count (`source_code`).
"""

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from slipway.kinds.registry import KINDS, TaskKind
from slipway.system import files
from slipway.system.errors import IntegrityError
from slipway.system.source_code import PACKAGES, PART, read_source

CODE_DIGESTS = Path("code.yaml")
USERS_CODE = "transforms"
# They import the function that `precompute.transform` names: precompute, the service that verify
# starts, and evaluate, if a released model takes raw images.
RUNS_USERS_CODE = ("precompute", "evaluate", "verify")
_INSTALLED = Path(__file__).parents[2]
_CACHE = Path(".work/code.json")
# Bytecode, files half written, and what editors and patch leave behind; Emacs saves `#x.py#`.
_NOT_READ = (".pyc", ".partial", "~", "#", ".orig", ".rej", ".bak", ".swp")


def stage_names(root: Path) -> list[str]:
    """The stages of the project `root` that have a digest, sorted: all but `code` itself."""
    folder = _base(root, "stages") / "stages"
    return sorted(
        path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "code")
    )


def stage_digest(root: Path, stage: str) -> str:
    """Hex SHA-256 of the code that `stage` reaches now. IntegrityError if there is no such stage."""
    return files.digest_json(stage_files(root, stage))


def stage_files(root: Path, stage: str, kinds: Iterable[TaskKind] | None = None) -> dict[str, str]:
    """The hex digest of each file that `stage` reaches, by its path in the project `root`.

    It loads the parts of `kinds`, by default those of the project's kind.
    IntegrityError if there is no such stage: without a digest, any code would pass for its own.
    """
    start = Path("stages") / f"{stage}.py"
    if not (_base(root, "stages") / start).is_file():
        raise IntegrityError(
            f"the code of the stage {stage} has no digest: {start} is missing. Restore it."
        )
    users = _files_below(root / USERS_CODE, root) if stage in RUNS_USERS_CODE else []
    return digests(root, [start, *users], project_kinds(root) if kinds is None else kinds)


def project_kinds(root: Path) -> list[TaskKind]:
    """The kind of the project's task; every kind if params.yaml names none, so no code is missed."""
    try:
        task = _task_in((root / "params.yaml").read_bytes())
    except OSError:
        task = None
    return [KINDS[task]] if task in KINDS else list(KINDS.values())


@cache
def _task_in(params: bytes) -> object:
    try:
        return YAML(typ="safe", pure=True).load(params)["data"]["task"]
    except (YAMLError, UnicodeDecodeError, ValueError, LookupError, TypeError, RecursionError):
        return None  # the stage refuses such a file when it reads it


def digests(
    root: Path, start: Iterable[Path], kinds: Iterable[TaskKind] | None = None
) -> dict[str, str]:
    """The hex digest of each file that `start` reaches, for `kinds` or for all kinds."""
    return {
        path.as_posix(): _digest(_base(root, path.parts[0]) / path)
        for path in sorted(reached_files(root, start, kinds))
    }


def reached_files(
    root: Path, start: Iterable[Path], kinds: Iterable[TaskKind] | None = None
) -> set[Path]:
    """The files `start`, all modules that they reach, and the files beside those.

    They load the parts of `kinds`, by default those of all kinds.
    """
    declared = _declared_modules(KINDS.values() if kinds is None else kinds)
    modules: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules.add(path)
            if path.suffix == ".py":
                names = _reduced((_base(root, path.parts[0]) / path).read_bytes())[1]
                loaded = {module for name in names for module in declared.get(name, ())}
                found = (_file_of(root, _absolute(name, path)) for name in {*names, *loaded})
                waiting.extend(file for file in found if file is not None)
                waiting.extend(_packages_of(root, path))
    folders = {path.parent for path in modules}
    return modules | {
        file for folder in folders for file in _assets(_base(root, folder.parts[0]), folder)
    }


def _declared_modules(kinds: Iterable[TaskKind]) -> dict[str, set[str]]:
    """The modules behind each name such as "part:clean"."""
    found: dict[str, set[str]] = {}
    for kind in kinds:
        for part, path in kind.input.parts.items():
            found.setdefault(f"{PART}{part}", set()).add(path.partition(":")[0])
    return found


def remember(root: Path) -> None:
    """Keep what was read for the next process, by the content of the files: reading all takes seconds."""
    files.write_text(root / _CACHE, json.dumps({"reader": _reader(), "sources": _known(root)}))


def recall(root: Path) -> None:
    """Take up what another process remembered, if it read source code as this one does."""
    try:
        content = json.loads((root / _CACHE).read_bytes())
        sources = content["sources"] if content["reader"] == _reader() else {}
        found = {key: (digest, tuple(names)) for key, (digest, names) in sources.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # nothing, or nothing that can be understood: the code is read again
    if all(isinstance(text, str) for digest, names in found.values() for text in (digest, *names)):
        _SOURCES.update(found)


_SOURCES: dict[
    str, tuple[str, tuple[str, ...]]
] = {}  # (digest, modules named) by the SHA-256 of a file


def _known(root: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The entries of `_SOURCES` whose files are there now."""
    paths = (
        path for package in PACKAGES for path in (_base(root, package) / package).rglob("*.py")
    )
    keys = {files.sha256_file(path) for path in paths}
    return {key: value for key, value in _SOURCES.items() if key in keys}


@cache
def _reader() -> str:
    """Digest of the module that reduces source text."""
    return files.sha256_file(Path(read_source.__code__.co_filename))


def _reduced(payload: bytes) -> tuple[str, tuple[str, ...]]:
    """The digest of a module's text without comments and docstrings, and the modules it names."""
    key = files.sha256_bytes(payload)
    if key not in _SOURCES:
        try:
            source = read_source(payload.decode())
            _SOURCES[key] = files.sha256_bytes(source.text.encode()), tuple(sorted(source.modules))
        except (
            SyntaxError,
            ValueError,
        ):  # a user's file that this Python cannot read counts as it is
            _SOURCES[key] = key, ()
    return _SOURCES[key]


def _digest(path: Path) -> str:
    payload = path.read_bytes()
    return _reduced(payload)[0] if path.suffix == ".py" else files.sha256_bytes(payload)


def _base(root: Path, package: str) -> Path:
    """The folder that holds a package: the project's, as for `python -m`, else where it is installed."""
    return root if package == USERS_CODE or (root / package).is_dir() else _INSTALLED


def _file_of(root: Path, module: str) -> Path | None:
    """The file of a first-party module; None for a name inside a module, and for another package's."""
    package = module.partition(".")[0]
    if package not in PACKAGES:
        return None
    path = Path(*module.split("."))
    choices = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((choice for choice in choices if (_base(root, package) / choice).is_file()), None)


def _packages_of(root: Path, path: Path) -> Iterator[Path]:
    """The `__init__.py` of each package around a module, which Python runs before the module."""
    files_there = (folder / "__init__.py" for folder in path.parents[:-1])
    return (file for file in files_there if (_base(root, file.parts[0]) / file).is_file())


def _absolute(name: str, path: Path) -> str:
    """The whole name of a module that the file `path` imports, perhaps relatively."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    package = path.parent.parts[: len(path.parent.parts) + 1 - level]
    return ".".join([*package, *filter(None, name[level:].split("."))])


def _assets(base: Path, folder: Path) -> Iterator[Path]:
    """The files of a package that are no modules, and those in its folders that are no packages."""
    for path in (base / folder).iterdir():
        if path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            yield from _files_below(path, base)
        elif path.is_file() and path.suffix != ".py" and _is_read(path):
            yield path.relative_to(base)


def _files_below(folder: Path, base: Path) -> list[Path]:
    return [
        path.relative_to(base) for path in folder.rglob("*") if path.is_file() and _is_read(path)
    ]


def _is_read(path: Path) -> bool:
    return (
        not path.name.startswith(".")
        and not path.name.endswith(_NOT_READ)
        and "__pycache__" not in path.parts
    )
