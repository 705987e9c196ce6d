"""Digests of the code that each stage reaches, which `dvc.yaml` names in place of lists of files.

DVC does not follow imports, so a change in the library would not re-run a stage. The stage `code`
writes one digest per stage into `code.yaml`, which the other stages have among their params. A
stage reaches what it imports, what that imports, the modules that are started by name in a process
of their own, the `__init__.py` of every package around these, and every other file beside them:
pages, scripts, texts. Of the parts that it loads from a kind's record, it reaches those of the kind
that `data.task` in params.yaml names: an edit to tables re-runs no training of images, and one to
numeric targets none of classes. The stages that call the user's functions reach all of
`transforms/`. A stage that runs a network, a loss, a metric or a transform of the user's own, which
params.yaml names, reaches that module and every module of the project that it imports.
Comments, docstrings that nothing reads and blank lines do not count (`source_code`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from slipway.kinds.code_stamp import WRITTEN
from slipway.kinds.registry import KINDS, TaskKind
from slipway.system import files
from slipway.system.errors import IntegrityError, UnavailableError
from slipway.system.source_code import PACKAGES, PART, read_source
from slipway.system.user_code import UserCode, is_user_code

CODE_DIGESTS = Path("code.yaml")
STAGES = Path("slipway/stages")
USERS_CODE = "transforms"
# They import the function that `precompute.transform` names: precompute, the service that verify
# starts, and evaluate, if a released model takes raw images.
RUNS_USERS_CODE = ("precompute", "evaluate", "verify")
# By the key of params.yaml that names code of the user's own: the stages that run it.
RUNS_NAMED_CODE = {
    "precompute.transform": RUNS_USERS_CODE,
    "train.network": ("audit", "train", "evaluate", "prune", "export", "verify"),
    "train.loss": ("audit", "train", "prune"),
    "evaluate.metrics": ("evaluate",),
}
_OURS = frozenset(PACKAGES) - {USERS_CODE}
_INSTALLED = Path(__file__).parents[2]
_CACHE = Path(".work/code.json")
# Bytecode, files half written, and what editors and patch leave behind; Emacs saves `#x.py#`.
_NOT_READ = (".pyc", ".partial", "~", "#", ".orig", ".rej", ".bak", ".swp")


def stage_names(root: Path) -> list[str]:
    """The stages of the project `root` that have a digest, sorted: all but `code` itself."""
    folder = _base(root, "slipway") / STAGES
    return sorted(
        path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "code")
    )


def stage_digest(root: Path, stage: str) -> str:
    """Hex SHA-256 of the code that `stage` reaches. IntegrityError if there is no such stage."""
    return files.digest_json(stage_files(root, stage))


def stage_files(
    root: Path,
    stage: str,
    kinds: Iterable[TaskKind] | None = None,
    named: Mapping[str, list[str]] | None = None,
) -> dict[str, str]:
    """The hex digest of each file that `stage` reaches, by its path in the project `root`.

    It loads the parts of `kinds` and the user's code in `named`, by default the project's.
    IntegrityError if there is no such stage: without a digest, any code would pass for its own.
    """
    start = STAGES / f"{stage}.py"
    if not (_base(root, "slipway") / start).is_file():
        raise IntegrityError(
            f"the code of the stage {stage} has no digest: {start} is missing. Restore it."
        )
    users = _files_below(root / USERS_CODE, root) if stage in RUNS_USERS_CODE else []
    for key, names in (project_names(root) if named is None else named).items():
        if stage in RUNS_NAMED_CODE[key]:
            found = (_file_of(root, name.partition(":")[0]) for name in names)
            users += [path for path in found if path is not None]
    return digests(root, [start, *users], project_kinds(root) if kinds is None else kinds)


def project_kinds(root: Path) -> list[TaskKind]:
    """The kind of the project's task. Every kind if params.yaml names none: no code is missed."""
    task = _project_value(root, "data.task")
    return [KINDS[task]] if isinstance(task, str) and task in KINDS else list(KINDS.values())


def project_names(root: Path) -> dict[str, list[str]]:
    """The user's own code that the project's params.yaml names, by key."""
    found = {key: _project_value(root, key) for key in RUNS_NAMED_CODE}
    named = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    return {
        key: [name for name in names if isinstance(name, str) and is_user_code(name)]
        for key, names in named.items()
    }


def untracked_user_code(root: Path, pipeline: dict[str, Any]) -> list[str]:
    """The files of the user's own code that the stage `code` of this dvc.yaml does not depend on.

    After a change to one, DVC would not run that stage, and so no other.
    """
    stage = pipeline.get("stages", {}).get("code", {})
    if not stage or stage.get("always_changed"):
        return []
    tracked = [Path(dep) for dep in stage.get("deps", []) if isinstance(dep, str)]
    names = [name for named in project_names(root).values() for name in named]
    found = (_file_of(root, name.partition(":")[0]) for name in names)
    own = {place for path in found if path for place in _users_digests(root, path)}
    return sorted(place for place in own if not any(map(Path(place).is_relative_to, tracked)))


def user_code(root: Path, key: str, names: Iterable[str | None]) -> list[UserCode]:
    """Describe those of `names`, the value of `key` in params.yaml, that are the user's own code.

    UnavailableError for a module without a file in the project `root`: the digest of a stage covers
    no other.
    """
    return [_described(root, key, name) for name in names if name and is_user_code(name)]


def _described(root: Path, key: str, name: str) -> UserCode:
    module = name.partition(":")[0]
    path = None if module.partition(".")[0] in _OURS else _file_of(root, module)
    if path is None:
        expected = f"{module.replace('.', '/')}.py"
        raise UnavailableError(
            f"{key} {name!r} names the module {module}, which has no file in the project's folder, "
            f"expected {expected} in {root.resolve()}. Write it, or correct the name."
        )
    own = _users_digests(root, path)
    if hidden := [place for place in own if _is_hidden_from_stamps(root, Path(place))]:
        raise UnavailableError(
            f"{key} {name!r} reaches {', '.join(hidden)}, in a folder that stages write, or behind "
            "a link, where no change is noticed. Move it into another folder of the project."
        )
    return UserCode(key=key, name=name, sha256=files.digest_json(own))


def _is_hidden_from_stamps(root: Path, place: Path) -> bool:
    """True for a module that `code_stamp` does not read."""
    folder = place.parts[0]
    return len(place.parts) > 1 and (folder in WRITTEN or (root / folder).is_symlink())


def _users_digests(root: Path, path: Path) -> dict[str, str]:
    """The digests of a file of the user's and of those that it reaches in the project."""
    reached = digests(root, [path], [])
    return {place: digest for place, digest in reached.items() if Path(place).parts[0] not in _OURS}


def _project_value(root: Path, key: str) -> object:
    """The value of a key in params.yaml; None if the file cannot be read or lacks it."""
    try:
        value: object = _parsed((root / "params.yaml").read_bytes())
    except OSError:
        return None
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@cache
def _parsed(params: bytes) -> object:
    try:
        return YAML(typ="safe", pure=True).load(params)
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
    find = cache(partial(_file_of, root))  # most modules are imported many times
    modules: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules.add(path)
            if path.suffix == ".py":
                names = _reduced((_base(root, path.parts[0]) / path).read_bytes())[1]
                loaded = {module for name in names for module in declared.get(name, ())}
                found = (find(_absolute(name, path)) for name in {*names, *loaded})
                waiting.extend(file for file in found if file is not None)
                waiting.extend(_packages_of(root, path))
    folders = {path.parent for path in modules if path.parts[0] in PACKAGES}
    return modules | {
        file for folder in folders for file in _assets(_base(root, folder.parts[0]), folder)
    }


def _declared_modules(kinds: Iterable[TaskKind]) -> dict[str, set[str]]:
    """The modules behind each name such as "part:clean"."""
    found: dict[str, set[str]] = {}
    for kind in kinds:
        for part, path in (*kind.input.parts.items(), *kind.target.parts.items()):
            found.setdefault(f"{PART}{part}", set()).add(path.partition(":")[0])
    return found


def remember(root: Path) -> None:
    """Save the digests for the next process, by the content of files: reading all takes seconds."""
    files.write_text(root / _CACHE, json.dumps({"reader": _reader(), "sources": _known(root)}))


def recall(root: Path) -> None:
    """Load what another process saved, if it reduced source code as this one does."""
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
    """The folder that holds a package: the project, as for `python -m`, else the installation."""
    return root if package not in _OURS or (root / package).is_dir() else _INSTALLED


def _file_of(root: Path, module: str) -> Path | None:
    """The file of a module of ours or of the project; None for a name inside a module.

    Python looks for any module in the project first.
    """
    package = module.partition(".")[0]
    if not package:  # of a relative import that Python refuses
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
    """The files of a package that are not modules, and those in folders that are not packages."""
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
