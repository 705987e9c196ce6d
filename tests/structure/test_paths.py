"""Paths of the checkout in docs, docstrings, comments and messages exist."""

from pathlib import Path

import pytest

from tests.structure.paths import dead_paths, dead_paths_of_text


def test_every_path_that_a_text_names_exists(root: Path) -> None:
    assert [str(found) for found in dead_paths(root)] == []


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("docs/a.md", "see `slipway/gone.py`.", "slipway/gone.py"),
        ("docs/a.md", "the room kinds/gone/ has them", "kinds/gone/"),
        ("docs/a.md", "`data/rules/label_sets.py`", "data/rules/label_sets.py"),
        ("docs/decisions/0001.md", "`serving/guard/` limits", "serving/guard/"),
        ("slipway/drift/__init__.py", '"""See networks/trees.py."""', "networks/trees.py"),
        ("slipway/a.py", 'raise E("see docs/gone.md.")', "docs/gone.md"),
        ("tests/a.py", "x = 1  # as in bench/gone.py", "bench/gone.py"),
        ("tests/a.py", 'def f():\n    """As in\n    tests/gone/."""', "tests/gone/"),
    ],
)
def test_a_path_that_is_gone_is_reported(root: Path, path: str, text: str, name: str) -> None:
    assert [found.text for found in dead_paths_of_text(root, path, text)] == [f"there is no {name}"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/a.md", "`slipway/kinds/parts.py`, `kinds/parts.py`, `stages/train.py`, kinds/"),
        ("docs/a.md", "`stages/NAME.py`, `docs/*.md`, `launch/{a,b}.sh`, https://a.org/docs/a.py"),
        ("docs/a.md", "`data/packed/manifest.json` of a project, `transforms/faces.py`"),
        ("docs/decisions/0001.md", "`serving/guard/` as it was then"),
        ("slipway/training/trees/__init__.py", '"""See networks/trees.py."""'),
        ("tests/a.py", 'write("slipway/gone.py")'),
    ],
)
def test_paths_that_exist_are_placeholders_or_of_a_project_pass(
    root: Path, path: str, text: str
) -> None:
    assert list(dead_paths_of_text(root, path, text)) == []
