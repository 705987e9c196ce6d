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
    user_code,
)
from slipway.kinds.parts import InputPart, TargetPart, import_part
from slipway.kinds.registry import KINDS, TaskKind
from slipway.system.errors import IntegrityError, UnavailableError

FILES = {
    "slipway/stages/__init__.py": "",
    "slipway/stages/code.py": "",
    "slipway/stages/train.py": "from slipway import a\n",
    "slipway/stages/verify.py": "from slipway import service_process\n",
    "slipway/__init__.py": "",
    "slipway/a.py": "from .b import c\n",
    "slipway/b.py": "def f():\n    import slipway.deep.d\n",
    "slipway/deep/__init__.py": "",
    "slipway/deep/d.py": "import numpy\nfrom .. import e\n",
    "slipway/e.py": "X = 1\n",
    "slipway/unused.py": "",
    "slipway/service_process.py": 'COMMAND = ["serve", "slipway.serving.service:Service"]\n',
    "slipway/serving/__init__.py": "",
    "slipway/serving/service.py": "import slipway.serving.page.site\n",
    "slipway/serving/page/site.py": "",
    "slipway/serving/page/app.js": "1",
    "slipway/serving/page/pictures/icon.svg": "2",
    "slipway/serving/page/__pycache__/site.pyc": "3",
    "slipway/serving/page/.hidden": "4",
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


def test_a_stage_reaches_direct_and_indirect_imports_and_nothing_else(tree: Path) -> None:
    assert set(stage_files(tree, "train")) == {
        *("slipway/stages/train.py", "slipway/__init__.py", "slipway/a.py", "slipway/b.py"),
        *(
            "slipway/deep/__init__.py",
            "slipway/deep/d.py",
            "slipway/e.py",
            "slipway/stages/__init__.py",
        ),
    }


def test_verify_reaches_the_service_its_assets_and_the_users_code(tree: Path) -> None:
    reached = set(stage_files(tree, "verify"))
    assert {
        "slipway/serving/service.py",
        "slipway/serving/page/app.js",
        "slipway/serving/page/pictures/icon.svg",
    } <= reached
    assert {"transforms/faces.py", "transforms/table.csv", "slipway/unused.py"} <= reached
    assert (
        not {"slipway/serving/page/__pycache__/site.pyc", "slipway/serving/page/.hidden"} & reached
    )


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("slipway/e.py", {"train"}),
        ("slipway/stages/verify.py", {"verify"}),
        ("slipway/unused.py", {"verify"}),
        ("slipway/serving/page/app.js", {"verify"}),
        ("transforms/faces.py", {"verify"}),
        ("slipway/__init__.py", {"train", "verify"}),
        ("slipway/deep/__init__.py", {"train"}),
        ("slipway/stages/__init__.py", {"train", "verify"}),
        ("slipway/serving/__init__.py", {"verify"}),
        ("slipway/stages/code.py", set()),
    ],
)
def test_a_changed_line_changes_the_digests_of_the_stages_that_reach_it(
    tree: Path, name: str, stages: set[str]
) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    (tree / name).write_text(FILES[name] + "Y = 2\n")
    assert {stage for stage in before if stage_digest(tree, stage) != before[stage]} == stages


@pytest.mark.process
def test_code_in_every_package_of_a_stages_modules_changes_its_digest(
    tmp_path: Path,
    root: Path,
) -> None:
    start = Path("slipway/stages/train.py")
    modules = [path for path in reached_files(root, [start]) if path.suffix == ".py"]
    for package in ("slipway", "transforms"):
        shutil.copytree(root / package, tmp_path / package)
    before = stage_digest(tmp_path, "train")
    folders = {folder for path in modules for folder in path.parents if folder != Path()}
    assert {Path("slipway"), Path("slipway/training/networks"), Path("slipway/stages")} <= folders
    for init in (folder / "__init__.py" for folder in folders):
        text = (tmp_path / init).read_text()
        (tmp_path / init).write_text(f"{text}X = 1\n")
        assert stage_digest(tmp_path, "train") != before, init
        (tmp_path / init).write_text(text)
    assert stage_digest(tmp_path, "train") == before


def test_the_imports_of_a_packages_init_are_reached_too(tree: Path) -> None:
    (tree / "slipway/deep/__init__.py").write_text("from slipway import unused\n")
    assert "slipway/unused.py" in stage_files(tree, "train")


def test_a_changed_comment_changes_no_digest(tree: Path) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    for name, content in FILES.items():
        if name.endswith(".py"):
            (tree / name).write_text(f'"""Text."""\n\n# why\n{content}')
    assert {stage: stage_digest(tree, stage) for stage in before} == before


def test_backup_files_of_editors_and_patch_change_no_digest(tree: Path) -> None:
    before = {stage: stage_digest(tree, stage) for stage in stage_names(tree)}
    for folder in ("slipway", "slipway/serving/page/pictures", "transforms"):
        for name in ("#{}#", "{}~", "{}.orig", "{}.rej", "{}.bak", "{}.swp", ".{}.swp"):
            (tree / folder / name.format("a.py")).write_text("X = 2\n")
    assert {stage: stage_digest(tree, stage) for stage in before} == before


def test_a_user_file_that_python_cannot_parse_is_digested_whole(tree: Path) -> None:
    (tree / "transforms/old.py").write_text("print 1  # one\n")
    before = stage_digest(tree, "verify")
    (tree / "transforms/old.py").write_text("print 1  # two\n")
    assert stage_digest(tree, "verify") != before


def test_a_stage_without_code_raises_an_error_instead_of_an_empty_digest(tree: Path) -> None:
    (tree / "slipway/stages/train.py").unlink()
    with pytest.raises(
        IntegrityError, match=r"train has no digest: slipway/stages/train\.py is missing"
    ):
        stage_digest(tree, "train")


def test_every_stage_file_except_code_is_a_stage_with_a_digest(tree: Path) -> None:
    assert stage_names(tree) == ["train", "verify"]


def test_remembered_digests_are_not_used_for_changed_content(
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
def test_a_cache_of_a_different_version_or_format_is_ignored(
    tree: Path,
    content: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_digest, "_SOURCES", {})
    (tree / ".work").mkdir()
    (tree / ".work/code.json").write_text(content.replace("ours", code_digest._reader()))
    recall(tree)
    assert code_digest._SOURCES == {}


def test_a_project_without_its_own_slipway_has_the_installed_digests(
    tmp_path: Path, root: Path
) -> None:
    start = Path("slipway/stages/train.py")
    shutil.copy(root / "params.yaml", tmp_path)
    assert reached_files(tmp_path, [start]) == reached_files(root, [start])
    assert stage_digest(tmp_path, "train") == stage_digest(root, "train")


TABLES = {"slipway/inputs/columns.py", "slipway/training/networks/tabm.py"}
IMAGES = {"slipway/training/networks/image_networks.py"}


def reached_by(root: Path, stage: str, task: str) -> set[str]:
    found = reached_files(root, [Path(f"slipway/stages/{stage}.py")], [KINDS[task]])
    return {path.as_posix() for path in found}


def test_training_of_images_does_not_reach_the_code_of_tables(root: Path) -> None:
    reached = reached_by(root, "train", "image_classification")
    assert reached >= IMAGES
    assert not reached & TABLES
    assert not {path for path in reached if path.startswith("slipway/data/tables/")}


def test_no_stage_digest_depends_on_the_table_of_renames(root: Path) -> None:
    reached = {path for stage in stage_names(root) for path in stage_files(root, stage)}
    assert "slipway/config/params.py" in reached
    assert [path for path in reached if "renames" in path] == []


def test_training_of_tables_does_not_reach_the_networks_for_images(root: Path) -> None:
    reached = reached_by(root, "train", "table_regression")
    assert reached >= TABLES
    assert not reached & IMAGES


NUMBERS = {
    "slipway/training/targets/numbers.py",
    "slipway/metrics/number_scores.py",
    "slipway/reports/evaluation/number_results.py",
    "slipway/reports/pages/sections/numbers.py",
}
CLASSES = {
    "slipway/training/targets/classes.py",
    "slipway/metrics/class_scores.py",
    "slipway/metrics/class_uncertainty.py",
    "slipway/reports/evaluation/class_results.py",
    "slipway/reports/pages/sections/classes.py",
}


@pytest.mark.parametrize("stage", ["train", "evaluate", "export"])
def test_stages_of_classes_do_not_reach_the_code_of_numeric_targets(root: Path, stage: str) -> None:
    reached = reached_by(root, stage, "image_classification")
    assert reached & CLASSES
    assert not reached & NUMBERS
    reached = reached_by(root, stage, "image_regression")
    assert reached & NUMBERS
    assert not reached & CLASSES


def test_code_digests_follow_every_kind_if_params_name_none(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data: {task: no_such_task}\n")
    assert project_kinds(tmp_path) == list(KINDS.values())
    assert set(stage_files(tmp_path, "train")) >= IMAGES | TABLES


def test_the_task_in_params_chooses_the_kind_of_a_code_digest(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data: {task: table_regression}\n")
    assert project_kinds(tmp_path) == [KINDS["table_regression"]]


def test_each_part_that_code_loads_is_named_by_a_literal_and_declared(root: Path) -> None:
    sources = {path: path.read_text() for path in root.glob("slipway/**/*.py")}
    for path in (path for path, source in sources.items() if ".load_part(" in source):
        for node in ast.walk(ast.parse(sources[path])):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".load_part"):
                assert ast.literal_eval(node.args[0]) in (
                    *get_args(InputPart),
                    *get_args(TargetPart),
                ), path


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_part_of_a_record_can_be_imported(kind: TaskKind) -> None:
    assert kind.input.parts.keys() <= set(get_args(InputPart))
    assert kind.target.parts.keys() | {"trees"} == set(get_args(TargetPart))  # which are optional
    parts = [*kind.input.parts.values(), *kind.target.parts.values()]
    assert all(callable(import_part(path)) for path in parts)


def test_input_and_target_have_no_part_of_the_same_name() -> None:
    assert not set(get_args(InputPart)) & set(get_args(TargetPart))


USERS: dict[str, str] = {
    "nets.py": "import numpy\nfrom own import layers\n",
    "own/layers.py": "from . import blocks\n",
    "own/blocks.py": "X = 1\n",
    "own/unused.py": "",
    "own/weights.bin": "1",
    "scores.py": "from slipway.unused import x\n",
    "params.yaml": "train: {network: 'nets:Net', loss: auto}\n"
    "evaluate: {metrics: ['scores:f', 'gone:f']}\n",
}
OF_NETWORK = {"nets.py", "own/layers.py", "own/blocks.py"}


@pytest.fixture(name="users_tree")
def _users_tree(tree: Path) -> Path:
    (tree / "slipway/stages/evaluate.py").write_text("")
    (tree / "own").mkdir()
    for name, content in USERS.items():
        (tree / name).write_text(content)
    return tree


def test_a_stage_reaches_the_users_code_that_it_runs_and_the_modules_it_imports(
    users_tree: Path,
) -> None:
    reached = {stage: set(stage_files(users_tree, stage)) for stage in ("train", "evaluate")}
    names = {*USERS, "gone.py"}
    assert reached["train"] & names == OF_NETWORK
    assert reached["evaluate"] & names == OF_NETWORK | {"scores.py"}
    assert "slipway/unused.py" in reached["evaluate"]
    named = {"train.network": ["scores:f"]}
    assert set(stage_files(users_tree, "train", named=named)) & names == {"scores.py"}


def test_the_digest_of_user_code_changes_with_the_project_modules_that_it_imports(
    users_tree: Path,
) -> None:
    def digest() -> str:
        (code,) = user_code(users_tree, "train.network", ["nets:Net", "small_resnet", None])
        return code.sha256

    before = digest()
    (users_tree / "own/blocks.py").write_text("X = 1  # why\n")
    (users_tree / "own/unused.py").write_text("Y = 1\n")
    (users_tree / "slipway/a.py").write_text("Y = 1\n")
    assert digest() == before
    (users_tree / "own/blocks.py").write_text("X = 2\n")
    assert digest() != before


@pytest.mark.parametrize(("folder", "is_link"), [("metrics", False), ("linked", True)])
def test_user_code_in_a_folder_that_the_code_stamp_ignores_is_refused(
    users_tree: Path, folder: str, is_link: bool
) -> None:
    if is_link:
        (users_tree / folder).symlink_to(users_tree / "own")
    else:
        (users_tree / folder).mkdir()
    (users_tree / folder / "layers.py").write_text("")
    (users_tree / "nets.py").write_text(f"import {folder}.layers\n")
    with pytest.raises(UnavailableError, match=f"'nets:Net' reaches {folder}/layers.py, in a fold"):
        user_code(users_tree, "train.network", ["nets:Net"])


@pytest.mark.parametrize("name", ["gone:Net", "numpy:array", "slipway.a:f"])
def test_user_code_without_a_file_in_the_project_is_refused(users_tree: Path, name: str) -> None:
    with pytest.raises(UnavailableError, match=r"which has no file in the project's folder"):
        user_code(users_tree, "train.network", [name])
