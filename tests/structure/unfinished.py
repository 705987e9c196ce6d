"""Faults that are known and not fixed yet: the lines of unfinished.txt, which only gets shorter.

A line is a check and the room, file or class in which the check does not count yet. The rooms
with long lines are in pyproject.toml, because ruff checks them.
`python -m tests.structure.unfinished` writes both lists again from what is there now.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.structure.layout import (
    MOST_MODULES,
    duplicate_class_names,
    gerunds,
    misplaced_tests,
    modules,
    modules_by_folder,
)
from tests.structure.prose import Finding, findings
from tests.structure.tracked import tracked_files

_LONG_LINES = "[tool.ruff.lint.per-file-ignores]\n"
LIST = Path(__file__).with_name("unfinished.txt")


def read_list() -> set[tuple[str, str]]:
    """The pairs of check and room of unfinished.txt."""
    lines = LIST.read_text().splitlines() if LIST.is_file() else []
    return {(line.split()[0], line.split()[1]) for line in lines if line}


def all_findings(root: Path) -> Iterator[Finding]:
    """Every fault of texts, names and folders."""
    ours = modules(root)
    tests = [path for path in tracked_files(root) if Path(path).name.startswith("test_")]
    yield from findings(root)
    yield from gerunds(ours)
    yield from misplaced_tests(tests, ours)
    for folder, count in modules_by_folder(modules(root, ["slipway", "serving"])).items():
        if count > MOST_MODULES:
            yield Finding("folder", folder, 1, f"{count} modules, at most {MOST_MODULES}")
    for name in sorted(duplicate_class_names((root / path).read_text() for path in ours)):
        yield Finding("class", name, 1, f"more than one class is named {name}")


def place(finding: Finding) -> tuple[str, str]:
    """The line of unfinished.txt that a fault belongs to."""
    whole_file = finding.check in ("gerund", "mirror", "class", "folder")
    return finding.check, finding.path if whole_file else finding.room


def write_list(root: Path) -> None:
    """Write unfinished.txt from the faults that are there now."""
    places = {place(finding) for finding in all_findings(root)}
    LIST.write_text("".join(f"{check} {room}\n" for check, room in sorted(places)))


def write_rooms_with_long_lines(root: Path) -> None:
    """Write the per-file-ignores of pyproject.toml from the long lines that are there now."""
    command = ["ruff", "check", "--isolated", "--line-length=100", "--select=E501", "--exit-zero"]
    found = subprocess.run(
        [*command, "--output-format=json", "."], cwd=root, capture_output=True, check=True
    ).stdout
    paths = {Path(fault["filename"]).relative_to(root) for fault in json.loads(found)}
    rooms = sorted({str(path.parent) for path in paths})
    lines = "".join(f'"{room}/*.py" = ["E501"]\n' for room in rooms)
    project = root / "pyproject.toml"
    text = re.sub(r'^".*" = \["E501"\]\n', "", project.read_text(), flags=re.MULTILINE)
    project.write_text(text.replace(_LONG_LINES, _LONG_LINES + lines))


if __name__ == "__main__":
    write_list(Path.cwd())
    write_rooms_with_long_lines(Path.cwd())
