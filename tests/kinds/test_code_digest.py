"""A stage's digest changes with the code that it reaches, and with nothing else."""

import ast
import shutil
from pathlib import Path
from typing import get_args

import pytest

from slipway.kinds import code_digest
from slipway.kinds.code_digest import (
    project_kinds,
    reached_files,
    recall,
    remember,
    stage_digest,
    stage_files,
    stage_names,
)
from slipway.kinds.parts import InputPart, import_part
from slipway.kinds.registry import KINDS, TaskKind
from slipway.system.errors import IntegrityError

FILES = {
    "stages/__init__.py": "",
    "stages/code.py": "",
    "stages/train.py": "from slipway import a\n",
    "stages/verify.py": "from slipway import service_process\n",
    "slipway/__init__.py": "",
    "slipway/a.py": "from .b import c\n",
    "slipway/b.py": "def f():\n    import slipway.deep.d\n",
    "slipway/deep/__init__.py": "",
    "slipway/deep/d.py": "import numpy\nfrom .. import e\n",
    "slipway/e.py": "X = 1\n",
    "slipway/unused.py": "",
    "slipway/service_process.py": 'COMMAND = ["serve", "serving.service:Service"]\n',
    "serving/__init__.py": "",
    "serving/service.py": "import serving.page.site\n",
    "serving/page/site.py": "",
    "serving/page/app.js": "1",
    "serving/page/pictures/icon.svg": "2",
    "serving/page/__pycache__/site.pyc": "3",
    "serving/page/.hidden": "4",
    "transforms/__init__.py": "",
    "transforms/faces.py": "from slipway.unused import x\n",
    "transforms/table.csv": "5",
}


@pytest.fixture(name="tree")
def _tree(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_stage_reaches_imports_of_imports_and_no_more(tree: Path) -> None:
    assert set(stage_files(tree, "train")) == {
        *("stages/train.py", "slipway/__init__.py", "slipway/a.py", "slipway/b.py"),
        *("slipway/deep/__init__.py", "slipway/deep/d.py", "slipway/e.py", "stages/__init__.py"),
    }


def test_verify_reaches_the_service_its_assets_and_the_users_code(tree: Path) -> None:
    reached = set(stage_files(tree, "verify"))
    assert {
        "serving/service.py",
        "serving/page/app.js",
        "serving/page/pictures/icon.svg",
    } <= reached
    assert {"transforms/faces.py", "transforms/table.csv", "slipway/unused.py"} <= reached
    assert not {"serving/page/__pycache__/site.pyc", "serving/page/.hidden"} & reached


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("slipway/e.py", {"train"}),
        ("stages/verify.py", {"verify"}),
        ("slipway/unused.py", {"verify"}),
        ("serving/page/app.js", {"verify"}),
        ("transforms/faces.py", {"verify"}),
        ("slipway/__init__.py", {"train", "verify"}),
        ("slipway/deep/__init__.py", {"train"}),
        ("stages/__init__.py", {"train", "verify"}),
        ("serving/__init__.py", {"verify"}),
        ("stages/code.py", set()),
    ],
)
def test_a_changed_line_changes_the_digests_of_the_stages_that_reach_it(
    tree: Path, name: str, stages: set[str]
) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    (tree / name).write_text(FILES[name] + "Y = 2\n")
    assert {stage for stage in before if stage_digest(tree, stage) != before[stage]} == stages


def test_code_in_every_package_of_a_stages_modules_changes_its_digest(
    tmp_path: Path,
    root: Path,
) -> None:
    start = Path("stages/train.py")
    modules = [path for path in reached_files(root, [start]) if path.suffix == ".py"]
    for package in ("slipway", "stages", "serving", "transforms"):
        shutil.copytree(root / package, tmp_path / package)
    before = stage_digest(tmp_path, "train")
    folders = {folder for path in modules for folder in path.parents if folder != Path()}
    assert {Path("slipway"), Path("slipway/training/networks"), Path("stages")} <= folders
    for init in (folder / "__init__.py" for folder in folders):
        text = (tmp_path / init).read_text()
        (tmp_path / init).write_text(f"{text}X = 1\n")
        assert stage_digest(tmp_path, "train") != before, init
        (tmp_path / init).write_text(text)
    assert stage_digest(tmp_path, "train") == before


def test_a_package_is_reached_with_what_it_imports(tree: Path) -> None:
    (tree / "slipway/deep/__init__.py").write_text("from slipway import unused\n")
    assert "slipway/unused.py" in stage_files(tree, "train")


def test_a_changed_comment_changes_no_digest(tree: Path) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    for name, content in FILES.items():
        if name.endswith(".py"):
            (tree / name).write_text(f'"""Text."""\n\n# why\n{content}')
    assert {stage: stage_digest(tree, stage) for stage in before} == before


def test_files_of_editors_and_patch_change_no_digest(tree: Path) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    for folder in ("slipway", "serving/page/pictures", "transforms"):
        for name in ("#{}#", "{}~", "{}.orig", "{}.rej", "{}.bak", "{}.swp", ".{}.swp"):
            (tree / folder / name.format("a.py")).write_text("X = 2\n")
    assert {stage: stage_digest(tree, stage) for stage in before} == before


def test_a_users_file_that_is_not_python_counts_as_it_is(tree: Path) -> None:
    (tree / "transforms/old.py").write_text("print 1  # one\n")
    before = stage_digest(tree, "verify")
    (tree / "transforms/old.py").write_text("print 1  # two\n")
    assert stage_digest(tree, "verify") != before


def test_a_stage_without_code_is_an_error_and_no_empty_digest(tree: Path) -> None:
    (tree / "stages/train.py").unlink()
    with pytest.raises(IntegrityError, match=r"train has no digest: stages/train\.py is missing"):
        stage_digest(tree, "train")


def test_the_stages_are_those_with_a_file(tree: Path) -> None:
    assert stage_names(tree) == ["train", "verify"]


def test_what_was_remembered_is_not_taken_for_other_content(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stage_digest(tree, "train")
    remember(tree)
    monkeypatch.setattr(code_digest, "_SOURCES", {})
    recall(tree)
    assert code_digest._SOURCES
    assert stage_digest(tree, "train") == before
    (tree / "slipway/e.py").write_text("X = 2\n")
    assert stage_digest(tree, "train") != before


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"reader": "another", "sources": {"a": ["b", []]}}', "[" * 3000),
        *('{"reader": "ours"}', '{"reader": "ours", "sources": null}'),
        *('{"reader": "ours", "sources": {"a": null}}', '{"reader": "ours", "sources": ["a"]}'),
        '{"reader": "ours", "sources": {"a": ["b", [1]]}}',
    ],
)
def test_a_cache_of_another_version_or_form_is_ignored(
    tree: Path,
    content: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_digest, "_SOURCES", {})
    (tree / ".work").mkdir()
    (tree / ".work/code.json").write_text(content.replace("ours", code_digest._reader()))
    recall(tree)
    assert code_digest._SOURCES == {}


def test_a_project_without_code_of_its_own_has_the_installed_ones(
    tmp_path: Path, root: Path
) -> None:
    start = Path("stages/train.py")
    shutil.copy(root / "params.yaml", tmp_path)
    assert reached_files(tmp_path, [start]) == reached_files(root, [start])
    assert stage_digest(tmp_path, "train") == stage_digest(root, "train")


TABLES = {"slipway/inputs/columns.py", "slipway/training/networks/tabm.py"}
IMAGES = {
    "slipway/training/networks/image_networks.py",
    "slipway/training/networks/small_resnet.py",
}


def reached_by(root: Path, stage: str, task: str) -> set[str]:
    found = reached_files(root, [Path(f"stages/{stage}.py")], [KINDS[task]])
    return {path.as_posix() for path in found}


def test_the_code_of_tables_is_no_part_of_the_training_of_images(root: Path) -> None:
    reached = reached_by(root, "train", "image_classification")
    assert reached >= IMAGES
    assert not reached & TABLES
    assert not {path for path in reached if path.startswith("slipway/data/tables/")}


def test_the_networks_for_images_are_no_part_of_the_training_of_tables(root: Path) -> None:
    reached = reached_by(root, "train", "table_regression")
    assert reached >= TABLES
    assert not reached & IMAGES


def test_code_digests_follow_every_kind_if_params_name_none(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data: {task: no_such_task}\n")
    assert project_kinds(tmp_path) == list(KINDS.values())
    assert set(stage_files(tmp_path, "train")) >= IMAGES | TABLES


def test_the_task_in_params_chooses_the_kind_of_a_code_digest(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data: {task: table_regression}\n")
    assert project_kinds(tmp_path) == [KINDS["table_regression"]]


def test_each_part_that_code_loads_is_named_by_a_literal_and_declared(root: Path) -> None:
    for path in [*root.glob("slipway/**/*.py"), *root.glob("serving/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".load_part"):
                assert ast.literal_eval(node.args[0]) in get_args(InputPart), path


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_part_of_a_record_can_be_imported(kind: TaskKind) -> None:
    assert kind.input.parts.keys() <= set(get_args(InputPart))
    assert all(callable(import_part(path)) for path in kind.input.parts.values())
