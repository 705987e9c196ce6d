"""Prints the rooms, the arrows between them, the largest modules and the figures of the house.

`make house` runs it. The tests in this folder hold the limits. It runs no tests, so it cannot print
their seconds: it names the commands that measure them.
"""

from collections import Counter, defaultdict
from pathlib import Path

from tests.structure.core_modules import MOST_CORE_MODULES, num_core_modules
from tests.structure.layout import (
    MOST_MODULES,
    duplicate_class_names,
    gerunds,
    modules,
    modules_by_folder,
    statements,
)
from tests.structure.prose import LONGEST_LINE, LONGEST_SENTENCE, findings
from tests.structure.rooms import TABLES, arrows, forbidden_arrows

_LARGEST = 10
_NOT_RUN = "-"  # in place of a figure that only a run of the tests gives


def house_text(root: Path) -> str:
    """Everything that `make house` prints."""
    sources = {path: (root / path).read_text() for path in modules(root)}
    counts = {path: statements(source) for path, source in sources.items()}
    parts = [room_table(root, counts), largest_modules(counts), figures(root, sources, counts)]
    return "\n\n".join(parts)


def room_table(root: Path, counts: dict[str, int]) -> str:
    """One line per room: modules, statements, and the rooms that it imports."""
    imported: dict[str, Counter[str]] = defaultdict(Counter)
    for folder in TABLES:
        for arrow in arrows(root, folder):
            imported[f"{folder}/{arrow.source}"][arrow.target] += 1
    sizes: Counter[str] = Counter()
    modules_in: Counter[str] = Counter()
    for path, count in counts.items():
        for room in _rooms_around(path):
            sizes[room] += count
            modules_in[room] += not path.endswith("/__init__.py")
    lines = [f"{'room':34} {'modules':>7} {'statements':>10}  imports"]
    for room in sorted(sizes):
        targets = ", ".join(f"{name} {count}" for name, count in imported[room].most_common())
        lines.append(f"{room:34} {modules_in[room]:7} {sizes[room]:10}  {targets}")
    return "\n".join(lines)


def largest_modules(counts: dict[str, int]) -> str:
    """The modules with the most statements."""
    largest = sorted(counts.items(), key=lambda item: -item[1])[:_LARGEST]
    return "\n".join(["largest modules", *(f"{count:6}  {path}" for path, count in largest)])


def figures(root: Path, sources: dict[str, str], counts: dict[str, int]) -> str:
    """The figures of rooms, names and texts beside their limits."""
    by_folder = modules_by_folder(
        path for path in sources if not path.startswith("slipway/stages/")
    )
    folder, most = by_folder.most_common(1)[0]
    forbidden = sum(len(forbidden_arrows(root, table)) for table in TABLES)
    dvc_lines = len((root / "dvc.yaml").read_text().splitlines())
    texts = Counter(found.check for found in findings(root))
    rows = [
        ("H1", f"modules in the largest folder ({folder})", most, MOST_MODULES),
        ("H1", "imports against the tables", forbidden, 0),
        (
            "H2",
            "modules of the service without extensions",
            num_core_modules(root),
            MOST_CORE_MODULES,
        ),
        ("H3", "lines of dvc.yaml", dvc_lines, 220),
        ("H4", "docstrings that open with a question word", texts["docstring"], 0),
        ("H4", f"lines over {LONGEST_LINE} characters", texts["line"], 0),
        ("H4", "banned words", texts["banned"], 0),
        ("H4", f"sentences of more than {LONGEST_SENTENCE} words in docs", texts["sentence"], 0),
        ("H5", "seconds of the unit tier; measure: time make check", _NOT_RUN, 180),
        ("H5", "seconds of unit and process tier; measure: time make test", _NOT_RUN, 900),
        ("H6", "statements", sum(counts.values()), "none: an indicator"),
        ("H6", "class names used twice", len(duplicate_class_names(sources.values())), 0),
        ("H6", "modules named after an activity", len(list(gerunds(sources))), 0),
    ]
    lines = [
        f"{target}  {name:60} {value:>6}  limit {limit}" for target, name, value, limit in rows
    ]
    return "\n".join(["figures", *lines])


def _rooms_around(path: str) -> list[str]:
    """The rooms that hold a module: `slipway/data` and `slipway/data/store`, for example."""
    parts = Path(path).parts[:-1]
    if parts == ("slipway",):
        return []
    return ["/".join(parts[:depth]) for depth in range(2, min(len(parts), 3) + 1)]


if __name__ == "__main__":
    print(house_text(Path.cwd()))
