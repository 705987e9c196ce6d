"""The stamp of the stage `code`: what changes it, and what is remembered for it."""

from pathlib import Path

import pytest

from slipway.kinds import code_stamp as module
from slipway.kinds.code_stamp import code_stamp, remember_text, remembered

FILES = {
    "package/system/files.py": "X = 1\n",
    "package/page/index.html": "page",
    "project/params.yaml": "seed: 1\n",
    "project/loss.py": "Y = 1\n",
    "project/networks/net.py": "Z = 1\n",
    "project/networks/weights.csv": "1",
    "project/transforms/table.csv": "1",
    "project/data/raw/code.py": "1",
    "project/.venv/lib/code.py": "1",
    "project/networks/__pycache__/net.pyc": "1",
}


@pytest.fixture(name="root")
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "_PACKAGE", tmp_path / "package")
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("package/system/files.py", True),
        ("package/page/index.html", True),
        ("project/params.yaml", True),
        ("project/loss.py", True),
        ("project/networks/net.py", True),
        ("project/transforms/table.csv", True),
        ("project/networks/weights.csv", False),
        ("project/data/raw/code.py", False),
        ("project/.venv/lib/code.py", False),
        ("project/networks/__pycache__/net.pyc", False),
    ],
)
def test_the_code_stamp_changes_with_params_the_package_and_the_users_modules(
    root: Path, name: str, counts: bool
) -> None:
    before = code_stamp(root)
    (root.parent / name).write_text("X = 2\n")
    assert (code_stamp(root) != before) is counts


def test_adding_or_removing_a_module_changes_the_code_stamp(root: Path) -> None:
    before = code_stamp(root)
    (root / "metric.py").write_text("")
    with_metric = code_stamp(root)
    (root / "metric.py").unlink()
    (root / "params.yaml").unlink()
    assert len({before, with_metric, code_stamp(root)}) == 3


def test_the_code_stamp_of_a_project_changes_when_its_folder_moves(root: Path) -> None:
    before = code_stamp(root)
    assert code_stamp(root.rename(root.parent / "p {1}")) != before


def test_the_saved_output_is_returned_only_for_the_same_stamp(root: Path) -> None:
    assert remembered(root, "a") is None
    remember_text(root, "a", "train: 1\n")
    assert remembered(root, "a") == "train: 1\n"
    assert remembered(root, "b") is None
    for content in ("", "[]", '{"stamp": "a"}', '{"stamp": "a", "text": 1}'):
        (root / ".work/code_stamp.json").write_text(content)
        assert remembered(root, "a") is None
