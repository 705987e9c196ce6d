"""Computes a digest of the code of each stage, so that DVC re-runs a stage when its code changed.

DVC does not follow imports. The stage `code` writes one digest for each stage into `code.yaml`, and
`dvc.yaml` lists the digest among the stage's params. The digest covers every file that the stage
reaches:

* the modules that it imports, directly or not, and modules that it starts in other processes;
* the `__init__.py` of every package around these modules, and other files beside them: pages,
  scripts, texts;
* of the parts that it loads from a kind's record, only those of the kind that `data.task` names: an
  edit to tables does not re-run a training of images;
* all of `transforms/`, for the stages that call the user's functions;
* a network, loss, metric or transform of the user that params.yaml names and the stage runs, with
  every module of the project that it imports.

Comments, blank lines and docstrings that no code reads do not count, nor do the default values of
params: the digest of a stage's params has those that it reads (slipway/system/source_code.py).
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

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
# Stages that run the function of `precompute.transform`. `verify` runs it in the service that it
# starts, `evaluate` if a reference model takes raw images.
RUNS_USERS_CODE = ("precompute", "evaluate", "verify")
# Key of params.yaml that names code of the user -> the stages that run this code.
RUNS_NAMED_CODE = {
    "precompute.transform": RUNS_USERS_CODE,
    "train.network": ("audit", "train", "evaluate", "prune", "export", "verify"),
    "train.loss": ("audit", "train", "prune"),
    "evaluate.metrics": ("evaluate",),
}
_OURS = frozenset(PACKAGES) - {USERS_CODE}
_INSTALLED = Path(__file__).parents[2]
_CACHE = Path(".work/code.json")
# Bytecode, partly written files, and backups of editors and `patch`; Emacs saves `#x.py#`.
_NOT_READ = (".pyc", ".partial", "~", "#", ".orig", ".rej", ".bak", ".swp")


def stage_names(root: Path) -> list[str]:
    """List the stages of the project `root` that have a digest, sorted: all except `code`."""
    folder = _base(root, "slipway") / STAGES
    return sorted(
        path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "code")
    )


def stage_digest(root: Path, stage: str) -> str:
    """Return the SHA-256, in hex, of the code that `stage` reaches.

    Raises IntegrityError if there is no such stage.
    """
    return files.digest_json(stage_files(root, stage))


def stage_files(
    root: Path,
    stage: str,
    kinds: Iterable[TaskKind] | None = None,
    named: Mapping[str, list[str]] | None = None,
) -> dict[str, str]:
    """Return the hex digest of each file that `stage` reaches, by its path in the project `root`.

    Args:
        kinds: kinds of task whose parts count; None for the project's.
        named: names of the user's code by key of params.yaml; None for the project's.

    Raises:
        IntegrityError: there is no such stage.
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
    """Return the kind of the project's task; all kinds if params.yaml names none."""
    task = _project_value(root, "data.task")
    return [KINDS[task]] if isinstance(task, str) and task in KINDS else list(KINDS.values())


def project_names(root: Path) -> dict[str, list[str]]:
    """Return the names of the user's code in the project's params.yaml, by key."""
    found = {key: _project_value(root, key) for key in RUNS_NAMED_CODE}
    named = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    return {
        key: [name for name in names if isinstance(name, str) and is_user_code(name)]
        for key, names in named.items()
    }


def user_code(root: Path, key: str, names: Iterable[str | None]) -> list[UserCode]:
    """Describe the user's code among `names`, the value of `key` in params.yaml.

    Raises UnavailableError for a module without a file in the project `root`, or in a folder whose
    changes are not noticed, because digests do not cover it.
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
    """Return True for a module that `code_stamp` does not read."""
    folder = place.parts[0]
    return len(place.parts) > 1 and (folder in WRITTEN or (root / folder).is_symlink())


def _users_digests(root: Path, path: Path) -> dict[str, str]:
    """Return the digests of a user's file and of the project's files that it reaches."""
    reached = digests(root, [path], [])
    return {place: digest for place, digest in reached.items() if Path(place).parts[0] not in _OURS}


def _project_value(root: Path, key: str) -> object:
    """Return the value of a key in params.yaml; None if the file or the key is missing."""
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
        return None  # the stage itself refuses the file, with a message


def digests(
    root: Path, start: Iterable[Path], kinds: Iterable[TaskKind] | None = None
) -> dict[str, str]:
    """Return the hex digest of each file that the files `start` import, directly or not, by path.

    Modules of a task kind are included for `kinds` only; with None, for all kinds.
    """
    return {
        path.as_posix(): _digest(_base(root, path.parts[0]) / path)
        for path in sorted(reached_files(root, start, kinds))
    }


def reached_files(
    root: Path, start: Iterable[Path], kinds: Iterable[TaskKind] | None = None
) -> set[Path]:
    """Return the files `start`, all modules that they import, and the other files beside these.

    Modules that are loaded as parts are included for `kinds` only; with None, for all kinds.
    """
    declared = _declared_modules(KINDS.values() if kinds is None else kinds)
    find = cache(partial(_file_of, root))  # most modules are imported many times
    init = cache(partial(_init_of, root))
    modules: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules.add(path)
            if path.suffix == ".py":
                names = _reduced(_base(root, path.parts[0]) / path)[1]
                loaded = {module for name in names for module in declared.get(name, ())}
                found = (find(_absolute(name, path)) for name in {*names, *loaded})
                waiting.extend(file for file in found if file is not None)
                inits = (init(folder) for folder in path.parents[:-1])  # Python runs them first
                waiting.extend(file for file in inits if file is not None)
    folders = {path.parent for path in modules if path.parts[0] in PACKAGES}
    return modules | {
        file for folder in folders for file in _assets(_base(root, folder.parts[0]), folder)
    }


def _declared_modules(kinds: Iterable[TaskKind]) -> dict[str, set[str]]:
    """Return the modules of the parts by their name in digests, such as "part:clean"."""
    found: dict[str, set[str]] = {}
    for kind in kinds:
        for part, path in (*kind.input.parts.items(), *kind.target.parts.items()):
            found.setdefault(f"{PART}{part}", set()).add(path.partition(":")[0])
    return found


def remember(root: Path) -> None:
    """Save the digests by content of files, because computing all of them takes seconds."""
    files.write_text(root / _CACHE, json.dumps({"reader": _reader(), "sources": _known(root)}))


def recall(root: Path) -> None:
    """Load the digests that another process saved, if it had the same `read_source`."""
    try:
        content = json.loads((root / _CACHE).read_bytes())
        sources = content["sources"] if content["reader"] == _reader() else {}
        found = {key: (digest, tuple(names)) for key, (digest, names) in sources.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # without a usable cache all code is read again
    if all(isinstance(text, str) for digest, names in found.values() for text in (digest, *names)):
        _SOURCES.update(found)


_SOURCES: dict[
    str, tuple[str, tuple[str, ...]]
] = {}  # SHA-256 of a file -> (digest of its code, modules that it names)


def _known(root: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the entries of `_SOURCES` whose files still exist."""
    paths = (
        path for package in PACKAGES for path in (_base(root, package) / package).rglob("*.py")
    )
    keys = {files.sha256_file(path) for path in paths}
    return {key: value for key, value in _SOURCES.items() if key.partition("-")[0] in keys}


@cache
def _reader() -> str:
    """Return the digest of the module that defines `read_source`."""
    return files.sha256_file(Path(read_source.__code__.co_filename))


def _reduced(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return (digest of a module's code without comments and docstrings, modules it names)."""
    payload = path.read_bytes()
    of_params = path.parent.parts[-2:] == ("slipway", "config")
    key = files.sha256_bytes(payload) + "-without-defaults" * of_params
    if key not in _SOURCES:
        try:
            source = read_source(payload.decode(), defaults=not of_params)
            _SOURCES[key] = files.sha256_bytes(source.text.encode()), tuple(sorted(source.modules))
        except (
            SyntaxError,
            ValueError,
        ):  # this Python cannot parse the user's file: digest the whole text
            _SOURCES[key] = key, ()
    return _SOURCES[key]


def _digest(path: Path) -> str:
    return _reduced(path)[0] if path.suffix == ".py" else files.sha256_file(path)


def _base(root: Path, package: str) -> Path:
    """Return the folder that contains a package: the project `root`, else the installation."""
    is_there = package not in _OURS or os.path.isdir(f"{root}/{package}")
    return root if is_there else _INSTALLED


def _file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module of Slipway or of the project; None if there is no such file.

    As in Python, modules in the project come before installed ones.
    """
    package = module.partition(".")[0]
    if not package:  # a relative import that Python refuses
        return None
    path, base = module.replace(".", "/"), _base(root, package)
    # Texts, because a stage looks for thousands of files, and a Path takes several times as long.
    choices = (f"{path}.py", f"{path}/__init__.py")
    return next((Path(choice) for choice in choices if os.path.isfile(f"{base}/{choice}")), None)


def _init_of(root: Path, folder: Path) -> Path | None:
    """Return the `__init__.py` of a package; None if there is no such file."""
    file = folder / "__init__.py"
    return file if os.path.isfile(f"{_base(root, file.parts[0])}/{file}") else None


def _absolute(name: str, path: Path) -> str:
    """Return the absolute name of a module that the file `path` imports, perhaps relatively."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    package = path.parent.parts[: len(path.parent.parts) + 1 - level]
    return ".".join([*package, *filter(None, name[level:].split("."))])


def _assets(base: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of a package that are not modules, also in subfolders without modules."""
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
