"""Checks of folders and names: rooms, class names, module names, statements, mirrored tests."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.structure.prose import Finding
from tests.structure.syntax import nodes
from tests.structure.tracked import tracked_files

MOST_MODULES = 16  # in one folder, without its `__init__.py`
PACKAGES = ("slipway",)
# Folders of tests/ that mirror no room: they test the repository as a whole, or these folders.
_OTHER_TESTS = ("tests", "tests/structure", "tests/end_to_end", "tests/launch", "tests/monitoring")
# Ordinary nouns of the field that end in -ing.
_NOUNS = {
    *("batching", "cleaning", "decoding", "draining", "early_stopping", "framing", "monitoring"),
    *("packing", "planning", "profiling", "pruning", "sampling", "training", "tuning"),
}


def modules(root: Path, packages: Iterable[str] = PACKAGES) -> list[str]:
    """The tracked modules of our packages."""
    return [
        path for path in tracked_files(root) if path.startswith(tuple(f"{p}/" for p in packages))
    ]


def modules_by_folder(paths: Iterable[str]) -> Counter[str]:
    """The number of modules in each folder, without its `__init__.py`."""
    return Counter(str(Path(path).parent) for path in paths if not path.endswith("/__init__.py"))


def statements(source: str) -> int:
    """The statements of a module. A docstring counts as one."""
    return sum(isinstance(node, ast.stmt) for node in nodes(source))


def duplicate_class_names(sources: Iterable[str]) -> set[str]:
    """The names that more than one class of the sources has."""
    names = Counter(
        node.name for source in sources for node in nodes(source) if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def lazy_modules(sources: Mapping[str, str]) -> Iterator[str]:
    """The modules that compute attributes on use, by a `__getattr__` outside classes."""
    for path, source in sources.items():
        classes = [node for node in nodes(source) if isinstance(node, ast.ClassDef)]
        methods = {statement for one in classes for statement in one.body}
        for node in nodes(source):
            is_hook = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            if is_hook and node not in methods:
                yield path


def defined_too_late(sources: Mapping[str, str]) -> Iterator[str]:
    """The modules that define names after their `if __name__ == "__main__"`.

    `python -m` runs the module before it defines them.
    """
    for path, source in sources.items():
        *before, _ = ast.parse(source).body or [ast.Pass()]
        if any(
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in before
        ):
            yield path


def gerunds(paths: Iterable[str]) -> Iterator[Finding]:
    """The modules that are named after an activity and not after a thing."""
    for path in paths:
        name = Path(path).stem
        if name.endswith("ing") and name not in _NOUNS:
            yield Finding("gerund", path, 1, f"module {name}: name the thing, not the activity")


def misplaced_tests(tests: Iterable[str], paths: Iterable[str]) -> Iterator[Finding]:
    """The tests whose folder mirrors no room, or that are named after a module of another room."""
    folders: dict[str, set[str]] = {}
    for path in paths:
        for folder in Path(path).parents:
            folders.setdefault(str(folder), set())
        folders[str(Path(path).parent)].add(Path(path).stem)
    for test in tests:
        room = mirrored_room(str(Path(test).parent))
        if room is None:
            continue
        name = Path(test).stem.removeprefix("test_")
        homes = [folder for folder, names in folders.items() if name in names]
        if room not in folders:
            yield Finding("mirror", test, 1, f"there is no {room}/")
        elif homes and room not in homes and f"{room}/{name}" not in folders:
            yield Finding("mirror", test, 1, f"{name}.py lies in {', '.join(homes)}")


def mirrored_room(folder: str) -> str | None:
    """The folder that a folder of tests mirrors; None where it mirrors none."""
    if folder in _OTHER_TESTS:
        return None
    return f"slipway/{folder.removeprefix('tests/')}"


def room_docstring_faults(path: str, source: str) -> Iterator[str]:
    """The faults of the docstring of a room's `__init__.py`."""
    docstring = ast.get_docstring(ast.parse(source))
    if docstring is None:
        yield f"{path}: no docstring; say what lives here and what does not"
    elif len(docstring.splitlines()) > 3:
        yield f"{path}: {len(docstring.splitlines())} lines of docstring, expected 1 to 3"
