"""A stage has one name in four places, and dvc.yaml says what it really reads."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.params import Params
from tests.structure.closure import RUNS_USERS_CODE, USERS_CODE, closure, is_code, reached_files, stage_dependencies

# The keys of `data` that decide which bytes a row's `source` stands for (tests/data/sources/test_sources.py shows it).
# What else `data` says of a row is is in `rows.parquet`, on which a stage that reads raw bytes again depends as well.
SAY_WHICH_BYTES = {"data.task", "data.image_column"}
STAGES = ["clean", "split", "precompute", "augment", "audit", "train", "evaluate", "prune", "export", "compile", "verify"]


@pytest.fixture(name="pipeline")
def _pipeline(root: Path) -> dict[str, Any]:
    stages: dict[str, Any] = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    return stages


def attributes_read(source: str) -> set[str]:
    """The dotted places below `params` that a stage's source reads, each in full: "train", "clean.max_pixels", ..."""
    found = set()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    inside = {id(node.value) for node in nodes}
    for node in nodes:
        if id(node) in inside:
            continue
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == "params":
            found.add(".".join(parts))
    return found


def is_declared(place: str, declared: list[str]) -> bool:
    if place == "data" and set(declared) >= SAY_WHICH_BYTES:
        return True
    return any(place == name or place.startswith(f"{name}.") for name in declared)


def undeclared(source: str, declared: list[str]) -> set[str]:
    """Places a stage reads that its `params` in dvc.yaml do not cover; a whole section covers its fields."""
    return {place for place in attributes_read(source) if not is_declared(place, declared) and place != "model_dump"}


def test_every_stage_has_a_file_a_params_section_and_a_dvc_entry(root: Path, pipeline: dict[str, Any]) -> None:
    assert list(pipeline) == STAGES
    assert {path.stem for path in (root / "stages").glob("*.py")} == {"__init__", *STAGES}
    assert set(STAGES) | {"seed", "data"} == set(Params.model_fields)


def test_every_stage_file_defines_run_and_nothing_public_besides(root: Path) -> None:
    for stage in STAGES:
        tree = ast.parse((root / "stages" / f"{stage}.py").read_text())
        public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")]
        assert public == ["run"], stage


def test_stage_files_are_thin(root: Path) -> None:
    lengths = {stage: len((root / "stages" / f"{stage}.py").read_text().splitlines()) for stage in STAGES}
    assert {stage: length for stage, length in lengths.items() if length > 100} == {}


def test_every_stage_runs_as_a_module_of_its_name(pipeline: dict[str, Any]) -> None:
    assert {name: stage["cmd"] for name, stage in pipeline.items()} == {name: f"python -m stages.{name}" for name in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_deps_name_the_import_closure(stage: str, root: Path, pipeline: dict[str, Any]) -> None:
    named = [dependency for dependency in pipeline[stage]["deps"] if is_code(dependency)]
    assert named == stage_dependencies(root, stage), "run `make deps`"


def test_the_stages_that_run_the_users_functions_depend_on_them(pipeline: dict[str, Any]) -> None:
    assert {name for name, stage in pipeline.items() if USERS_CODE in stage["deps"]} == set(RUNS_USERS_CODE)


def test_only_the_stages_that_run_the_users_functions_reach_their_caller(root: Path) -> None:
    callers = {Path(name) for name in ("slipway/data/store/filling.py", "slipway/export/released.py", "serving/requests/decoding.py")}
    assert {stage for stage in STAGES if callers & reached_files(root, stage)} == set(RUNS_USERS_CODE)


@pytest.mark.parametrize("stage", STAGES)
def test_every_file_that_a_stage_reaches_is_named_itself_or_in_its_package(stage: str, root: Path, pipeline: dict[str, Any]) -> None:
    named = set(pipeline[stage]["deps"])
    assert [
        path for path in reached_files(root, stage) if not named & {path.as_posix(), *(folder.as_posix() for folder in path.parents)}
    ] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_only_params_that_dvc_knows_of(stage: str, root: Path, pipeline: dict[str, Any]) -> None:
    assert undeclared((root / "stages" / f"{stage}.py").read_text(), pipeline[stage]["params"]) == set()


def test_an_undeclared_param_is_noticed() -> None:
    source = "def run(params):\n    use(params.train.epochs, params.clean.max_pixels, params.seed)"
    assert undeclared(source, ["train", "clean.max_pixels"]) == {"seed"}
    assert undeclared(source, ["train.epochs", "seed", "clean.max_bad_share"]) == {"clean.max_pixels"}
    assert undeclared("def run(params):\n    use(params.train.epochs, params.train)", ["train.epochs"]) == {"train"}


def test_a_stage_that_reads_raw_bytes_again_declares_what_says_which() -> None:
    source = "def run(params):\n    read_samples(params.data, params.data.engine)"
    assert undeclared(source, ["data.task", "data.image_column", "data.engine"]) == set()
    assert undeclared(source, ["data.task", "data.image_column"]) == {"data.engine"}
    assert undeclared("def run(params):\n    read_samples(params.data)", ["data.task"]) == {"data"}


def test_the_closure_follows_imports_of_imports(tmp_path: Path) -> None:
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway" / "a.py").write_text("from slipway import b\n")
    (tmp_path / "slipway" / "b.py").write_text("def f():\n    import slipway.c\n")
    (tmp_path / "slipway" / "c.py").write_text("import numpy\n")
    (tmp_path / "slipway" / "unused.py").write_text("")
    reached = closure(tmp_path, [tmp_path / "slipway" / "a.py"])
    assert {path.name for path in reached} == {"a.py", "b.py", "c.py"}


def test_package_files_hold_a_docstring_and_no_logic(root: Path) -> None:
    for package in ("slipway", "stages", "serving"):
        for path in (root / package).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            assert [type(node) for node in body] == [ast.Expr], path
