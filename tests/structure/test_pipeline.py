"""A stage has one name in four places, and dvc.yaml says what it really reads."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.artifacts import locations
from slipway.cli.documentation import described
from slipway.config.params import Params
from slipway.kinds.code_digest import RUNS_USERS_CODE, reached_files, stage_names
from slipway.system.source_code import PACKAGES, read_source
from slipway.training.job import PROJECT_PATHS

# The keys of `data` that decide which bytes a row's `source` names (see
# tests/data/sources/test_sources.py). Everything else in `data` reaches a later stage through
# `rows.parquet`, which is a dependency of the stages that read the raw bytes again.
SAY_WHICH_BYTES = {"data.task", "data.sources", "data.image_column"}
STAGES = [
    "clean",
    "split",
    "precompute",
    "augment",
    "audit",
    "train",
    "evaluate",
    "prune",
    "export",
    "compile",
    "verify",
]


@pytest.fixture(name="pipeline")
def _pipeline(root: Path) -> dict[str, Any]:
    stages: dict[str, Any] = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    return stages


def params_of(stage: dict[str, Any]) -> list[str]:
    """The keys of params.yaml that a stage names below `meta`."""
    keys: list[str] = stage["meta"]["params"]
    return keys


@cache
def code_of(root: Path, stage: str) -> set[str]:
    return {path.as_posix() for path in reached_files(root, [Path(f"slipway/stages/{stage}.py")])}


def attributes_read(source: str) -> set[str]:
    """The dotted keys of `params` that a stage's source reads: "train", "clean.max_pixels", ..."""
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
    """Keys that a stage reads but does not declare in dvc.yaml; a section covers its keys."""
    return {
        place
        for place in attributes_read(source)
        if not is_declared(place, declared) and place != "model_dump"
    }


UNREAD = ("search", "edge", "openvino", "loop")  # sections that no stage reads


def test_every_stage_has_a_file_a_params_section_and_a_dvc_entry(
    root: Path, pipeline: dict[str, Any]
) -> None:
    assert list(pipeline) == ["code", *STAGES]
    assert stage_names(root) == sorted(STAGES)
    assert set(STAGES) | {"version", "seed", "data", "ensemble", *UNREAD} == set(
        Params.model_fields
    )


def test_every_key_that_dvc_yaml_names_exists(pipeline: dict[str, Any]) -> None:
    names = [key.name for key in described()]
    for stage in STAGES:
        for key in params_of(pipeline[stage]):
            assert any(f"{name}.".startswith(f"{key}.") for name in names), (stage, key)


def test_every_stage_file_defines_run_and_nothing_public_besides(root: Path) -> None:
    for stage in ["code", *STAGES]:
        tree = ast.parse((root / "slipway/stages" / f"{stage}.py").read_text())
        public = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        assert public == ["run"], stage


def test_stage_files_hold_at_most_85_statements(root: Path) -> None:
    counts = {
        stage: sum(
            isinstance(node, ast.stmt)
            for node in ast.walk(ast.parse((root / "slipway/stages" / f"{stage}.py").read_text()))
        )
        for stage in STAGES
    }
    assert {stage: count for stage, count in counts.items() if count > 85} == {}


def test_every_stage_runs_as_a_module_of_its_name(pipeline: dict[str, Any]) -> None:
    assert {name: stage["cmd"] for name, stage in pipeline.items()} == {
        name: f"python -m slipway.stages.{name}" for name in pipeline
    }


def test_dvc_yaml_names_no_code_and_always_runs_the_stage_code(pipeline: dict[str, Any]) -> None:
    deps = {path.partition("/")[0] for name in STAGES for path in pipeline[name]["deps"]}
    assert not deps & set(PACKAGES)
    assert pipeline["code"]["always_changed"]
    assert "deps" not in pipeline["code"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_depends_on_the_digests_of_its_own_code_and_params(
    stage: str, pipeline: dict[str, Any]
) -> None:
    assert pipeline[stage]["params"] == [{"code.yaml": [stage]}]


def test_dvc_yaml_stays_short(root: Path) -> None:
    assert len((root / "dvc.yaml").read_text().splitlines()) <= 220


def test_only_the_stages_that_run_the_users_functions_reach_their_caller(root: Path) -> None:
    callers = {
        "slipway/data/store/image_conversion.py",
        "slipway/export/reference_model.py",
        "slipway/serving/requests/decoding.py",
    }
    assert {stage for stage in STAGES if callers & code_of(root, stage)} == set(RUNS_USERS_CODE)


def test_only_verify_reaches_the_service_and_its_page(root: Path) -> None:
    for file in (
        "slipway/serving/service.py",
        "slipway/serving/page/app.js",
        "slipway/serving/page/zh.json",
        "slipway/serving/api_docs/docs.html",
    ):
        assert {stage for stage in STAGES if file in code_of(root, stage)} == {"verify"}


READ_DOCSTRINGS = {"__doc__", "getdoc", "model_json_schema"}


def test_no_code_reads_the_docstrings_of_another_module(root: Path) -> None:
    """A digest leaves out docstrings unless their own module reads them."""
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            source = path.read_text()
            if not any(name in source for name in READ_DOCSTRINGS):
                continue
            nodes = list(ast.walk(ast.parse(source)))
            attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            # No stage reaches the second, which describes the sections of params.yaml.
            names = ("source_code.py", "documentation.py")
            assert not attributes & READ_DOCSTRINGS or path.name in names, path


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_only_params_that_dvc_knows_of(
    stage: str, root: Path, pipeline: dict[str, Any]
) -> None:
    assert (
        undeclared(
            (root / "slipway/stages" / f"{stage}.py").read_text(), params_of(pipeline[stage])
        )
        == set()
    )


WRITTEN_BELOW = ("data/", "artifacts/", "metrics/", "reports/")
READ_RAW_DATA = {"clean", "precompute", "evaluate", "verify"}  # by the key data.path
TRAIN_READS = {PROJECT_PATHS.packed.as_posix(), PROJECT_PATHS.augmented.as_posix()}
NOT_OF_THE_PIPELINE = {"artifacts/rebuilt_engine"}  # written in a container, where there is no DVC


def undeclared_paths(source: str, stage: dict[str, Any]) -> set[str]:
    """Stage outputs that a stage's file names but dvc.yaml lists neither as deps nor as outs."""
    entries = [
        entry for key in ("deps", "outs", "metrics", "plots") for entry in stage.get(key, [])
    ]
    declared = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    nodes = list(ast.walk(ast.parse(source)))
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    shared = [
        getattr(locations, alias.name).as_posix()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == locations.__name__
        for alias in node.names
    ]
    paths = {
        text
        for text in (*constants, *shared)
        if isinstance(text, str) and text.startswith(WRITTEN_BELOW) and " " not in text
    }
    return {
        path
        for path in paths - NOT_OF_THE_PIPELINE
        if not any(f"{path}/".startswith(f"{name}/") for name in declared)
    }


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_knows_every_file_that_a_stage_names(
    stage: str, root: Path, pipeline: dict[str, Any]
) -> None:
    assert (
        undeclared_paths((root / "slipway/stages" / f"{stage}.py").read_text(), pipeline[stage])
        == set()
    )
    assert ("${data.path}" in pipeline[stage]["deps"]) == (stage in READ_RAW_DATA)
    assert stage != "train" or set(pipeline[stage]["deps"]) >= TRAIN_READS


def test_a_removed_data_dependency_is_noticed(root: Path, pipeline: dict[str, Any]) -> None:
    for stage in STAGES:
        source = (root / "slipway/stages" / f"{stage}.py").read_text()
        for removed in (
            {*pipeline[stage]["deps"]}
            - {"${data.path}"}
            - (TRAIN_READS if stage == "train" else set())
        ):
            deps = [name for name in pipeline[stage]["deps"] if name != removed]
            assert undeclared_paths(source, {**pipeline[stage], "deps": deps}), (stage, removed)


def test_an_undeclared_param_is_noticed() -> None:
    source = "def run(params):\n    use(params.train.epochs, params.clean.max_pixels, params.seed)"
    assert undeclared(source, ["train", "clean.max_pixels"]) == {"seed"}
    assert undeclared(source, ["train.epochs", "seed", "clean.max_bad_fraction"]) == {
        "clean.max_pixels"
    }
    assert undeclared(
        "def run(params):\n    use(params.train.epochs, params.train)", ["train.epochs"]
    ) == {"train"}


def test_a_stage_that_reads_raw_bytes_again_declares_what_says_which() -> None:
    source = "def run(params):\n    read_samples(params.data, params.data.engine)"
    assert (
        undeclared(source, ["data.task", "data.sources", "data.image_column", "data.engine"])
        == set()
    )
    assert undeclared(source, ["data.task", "data.sources", "data.image_column"]) == {"data.engine"}
    assert undeclared(
        "def run(params):\n    read_samples(params.data)", ["data.task", "data.image_column"]
    ) == {"data"}


def test_package_files_hold_a_docstring_and_no_logic(root: Path) -> None:
    offers_names = root / "slipway/__init__.py"  # slipway.load, imported on first use
    for path in set((root / "slipway").rglob("__init__.py")) - {offers_names}:
        body = ast.parse(path.read_text()).body
        assert [type(node) for node in body] == [ast.Expr], path


def test_the_package_itself_imports_no_module_of_its_own(root: Path) -> None:
    """Every module runs it, so each stage's digest would cover what it imports."""
    assert "slipway" not in {
        name.partition(".")[0]
        for name in read_source((root / "slipway/__init__.py").read_text()).modules
    }
