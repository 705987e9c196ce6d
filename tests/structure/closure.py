"""The first-party files that a stage reaches by import, and the `deps` of dvc.yaml made from them.

DVC does not follow imports, so a change in the library would not re-run a stage whose `deps` do
not name the file. `make deps` writes the lists; test_pipeline.py compares them. `__init__.py`
files are left out: they hold a docstring and nothing else, which a test checks.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ruamel.yaml

PACKAGES = ("slipway", "stages", "serving")
# verify starts the service as a process of its own, which is a dependency that no import shows.
STARTED_BY = {"verify": ["serving/service.py"]}
# The user's functions are imported by a name in params.yaml: by precompute, by the service that verify starts, and by evaluate, where a
# released model takes raw images.
USERS_CODE = "transforms"
RUNS_USERS_CODE = ("precompute", "evaluate", "verify")
# The others name a package as a whole where they reach much of it: DVC reads every line of dvc.yaml and dvc.lock whenever it starts.
# These are named file by file, since what follows them takes long, or they do themselves.
NAMED_BY_FILE = ("split", "precompute", "augment", "train")
_MUCH = 4  # files of a package


def imported_modules(source: str) -> Iterator[str]:
    """Every dotted name that `source` imports, anywhere in it, with `from a import b` as `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def first_party_file(root: Path, module: str) -> Path | None:
    """The file of a first-party module, or None for another package's or for a name inside a module."""
    if module.split(".")[0] not in PACKAGES:
        return None
    path = root / (module.replace(".", "/") + ".py")
    return path if path.is_file() else None


def closure(root: Path, start: list[Path]) -> set[Path]:
    """`start` and every first-party file reachable from it by import."""
    reached: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        found = (first_party_file(root, module) for module in imported_modules(path.read_text()))
        waiting.extend(file for file in found if file is not None)
    return reached


def reached_files(root: Path, stage: str) -> set[Path]:
    """The code files that `stage` reaches, relative to `root`."""
    start = [root / "stages" / f"{stage}.py", *(root / path for path in STARTED_BY.get(stage, []))]
    return {path.relative_to(root) for path in closure(root, start)}


def stage_dependencies(root: Path, stage: str) -> list[str]:
    """The code that `stage` depends on, files and packages, as sorted paths relative to `root`."""
    found = reached_files(root, stage)
    if stage in NAMED_BY_FILE:
        return sorted(path.as_posix() for path in found)
    counts = Counter(path.parent for path in found if path.parent not in (Path("slipway"), Path("stages")))
    whole = {package for package, count in counts.items() if count >= _MUCH}
    return sorted({_outermost(path, whole).as_posix() for path in found})


def _outermost(path: Path, whole: set[Path]) -> Path:
    """The outermost folder of `whole` that holds the file, which DVC then hashes with all below it; else the file itself."""
    return next((folder for folder in reversed(path.parents) if folder in whole), path)


def is_code(dependency: str) -> bool:
    """Whether an entry of `deps` is code of ours."""
    return dependency.partition("/")[0] in PACKAGES


def rewrite(root: Path) -> None:
    """Replace our code in every stage's `deps`, leaving data dependencies and comments as they are."""
    yaml = ruamel.yaml.YAML()
    yaml.preserve_quotes = True
    yaml.width = 140
    yaml.indent(mapping=2, sequence=4, offset=2)
    path = root / "dvc.yaml"
    content = yaml.load(path.read_text())
    for name, stage in content["stages"].items():
        data = [dependency for dependency in stage["deps"] if not is_code(dependency) and dependency != USERS_CODE]
        stage["deps"][:] = [*data, *([USERS_CODE] if name in RUNS_USERS_CODE else []), *stage_dependencies(root, name)]
    with path.open("w") as file:
        yaml.dump(content, file)


if __name__ == "__main__":
    rewrite(Path.cwd())
