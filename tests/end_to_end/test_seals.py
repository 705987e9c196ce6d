"""Inputs that are edited while a stage runs, with real stages and a real `dvc`."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.config.params import load_params
from tests.end_to_end.project import Project, copy_finished, shown_params

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]  # the first test waits for all stages
# A key that the stage reads, as "section.key", with another value; and one that it does not read.
EDITS: dict[str, tuple[str, Any, str, Any]] = {
    "clean": ("clean.outlier_mad_threshold", 7.0, "split.folds", 5),
    "split": ("split.assignment", "exact", "clean.max_bad_fraction", 0.06),
    "precompute": ("precompute.num_quantiles", 24, "split.folds", 5),
    "augment": ("seed", 8, "train.epochs", 9),
    "audit": ("audit.epochs", 9, "prune.epochs", 9),
    "train": ("train.label_smoothing", 0.1, "evaluate.top_k", 2),
    "evaluate": ("evaluate.confidence", 0.9, "train.epochs", 9),
    "prune": ("prune.epochs", 9, "export.golden_rows", 32),
    "export": ("export.golden_rows", 32, "train.epochs", 9),
    "compile": ("compile.workspace_mib", 512, "train.epochs", 9),
    "verify": ("verify.timing_rounds", 6, "train.epochs", 9),
}


@pytest.fixture(name="project", scope="module")
def _project(finished_table: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The embedded table after `dvc repro`."""
    return copy_finished(finished_table, tmp_path_factory.mktemp("seals"))


@pytest.fixture(name="unchanged", autouse=True)
def _unchanged(project: Project) -> Iterator[None]:
    """Restore params.yaml, dvc.lock and the seals after each test."""
    edited = {
        path: path.read_bytes()
        for path in [project.path / "params.yaml", project.path / "dvc.lock", *_seals(project)]
    }
    yield
    for path, content in edited.items():
        path.write_bytes(content)


def _seals(project: Project) -> list[Path]:
    return sorted((project.path / "artifacts/seals").glob("*.json"))


def run_and(project: Project, stage: str, act: Callable[[], None]) -> tuple[int, str]:
    """Run a stage by hand and `act` right after its start, when it has removed its old seal."""
    seal = project.path / f"artifacts/seals/{stage}.json"
    assert seal.is_file()
    log = project.path / ".work/stage.log"
    with log.open("w") as output:
        line = f"source .venv/bin/activate && exec python -m slipway.stages.{stage}"
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=project.path,
            env=project.environment(),
            stdout=output,
            stderr=output,
        )
        while seal.is_file():
            assert process.poll() is None, log.read_text()
            time.sleep(0.001)
        act()
        code = process.wait(300)
    return code, log.read_text()


def edit_of(project: Project, key: str, value: Any) -> Callable[[], None]:
    """Prepare an edit of params.yaml, which then takes one rename."""
    path = project.path / "params.yaml"
    edited = path.with_suffix(".edited")
    before = path.read_bytes()
    project.set_value(key, value)
    path.replace(edited)
    path.write_bytes(before)
    return lambda: os.replace(edited, path)


# The last stage first, and each only once: new outputs of a stage do not match later ones.
IN_TURN = [
    stage if stage == "clean" else pytest.param(stage, marks=pytest.mark.nightly(seconds=20))
    for stage in reversed(EDITS)
]


@pytest.mark.parametrize("stage", IN_TURN)
def test_a_stage_fails_if_params_that_it_reads_change_while_it_runs(
    project: Project, stage: str
) -> None:
    seal = project.path / f"artifacts/seals/{stage}.json"
    before = seal.read_bytes()
    key, value, other, other_value = EDITS[stage]
    code, said = run_and(project, stage, edit_of(project, other, other_value))
    assert code == 0, said
    assert seal.read_bytes() == before  # no time, no inode
    project.shell("git checkout -q params.yaml")

    code, said = run_and(project, stage, edit_of(project, key, value))
    assert code == 1, said
    assert f"error: params.yaml changed while {stage} ran: {key} " in said
    assert f" -> {json.dumps(value)}. Restore the value or run again." in said
    assert not seal.exists()


@pytest.mark.nightly(seconds=25)
def test_train_with_restored_params_ends_without_another_step(project: Project) -> None:
    before = (project.path / "params.yaml").read_bytes()
    code, said = run_and(project, "train", edit_of(project, "train.label_smoothing", 0.1))
    assert code == 1, said
    (project.path / "params.yaml").write_bytes(before)
    again = project.shell("python -m slipway.stages.train")
    epochs = load_params(project.path / "params.yaml").train.epochs
    assert f"resumed   after epoch {epochs}" in again
    assert not re.search(rf"epoch +1/{epochs}", again)
    assert not list((project.path / ".work/train").glob("*/step-*"))


def test_a_killed_stage_leaves_no_seal_and_runs_again(project: Project) -> None:
    seal = project.path / "artifacts/seals/clean.json"
    before = seal.read_bytes()
    line = "source .venv/bin/activate && exec python -m slipway.stages.clean"
    with subprocess.Popen(
        ["bash", "-c", line], cwd=project.path, env=project.environment()
    ) as process:
        while seal.is_file():
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
    assert not seal.exists()
    project.shell("python -m slipway.stages.split", succeeds=False)  # a record without its seal
    project.shell("python -m slipway.stages.clean")
    assert seal.read_bytes() == before


def test_a_stage_fails_if_its_code_changes_while_it_runs(project: Project) -> None:
    path = project.path / "slipway/data/splits/units.py"
    before = path.read_text()
    try:
        code, said = run_and(project, "split", lambda: _write(path, f"{before}\nX = 1\n"))
    finally:
        path.write_text(before)
    assert code == 1, said
    assert (
        "error: code changed while split ran: slipway/data/splits/units.py. "
        "Restore it or run again." in said
    )


@pytest.mark.nightly
def test_a_stage_succeeds_if_only_a_comment_changes_while_it_runs(project: Project) -> None:
    path = project.path / "slipway/data/splits/units.py"
    before = path.read_text()
    try:
        code, said = run_and(project, "split", lambda: _write(path, f"# a comment\n{before}"))
    finally:
        path.write_text(before)
    assert code == 0, said


def test_a_stage_fails_if_raw_data_changes_while_it_runs(project: Project) -> None:
    name = shown_params()[1]["data"]["path"]
    raw = project.path / name
    facts = raw.stat()
    try:
        code, said = run_and(project, "clean", lambda: os.utime(raw))
    finally:
        os.utime(raw, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert code == 1, said
    assert f"error: {name} changed while clean ran: {name}. Restore it or run again." in said


@pytest.mark.nightly
def test_a_stage_whose_code_differs_from_code_yaml_is_refused(project: Project) -> None:
    """Otherwise `dvc repro -s split` would record the old digest for the new code."""
    path = project.path / "slipway/data/splits/units.py"
    before = path.read_text()
    try:
        path.write_text(f"{before}\nX = 1\n")
        said = project.shell("dvc repro -f -s split", succeeds=False)
    finally:
        path.write_text(before)
        project.shell("dvc repro split")
    assert "the code that split runs changed after the stage `code` wrote code.yaml" in said


def test_a_stage_that_dvc_recorded_with_other_params_is_refused_by_the_next(
    project: Project,
) -> None:
    lock, yaml = project.path / "dvc.lock", YAML(typ="safe", pure=True)
    content = yaml.load(lock)
    content["stages"]["train"]["params"]["code.yaml"]["train"]["params"] = "00"
    yaml.dump(content, lock)
    said = project.shell("python -m slipway.stages.evaluate", succeeds=False)
    assert "dvc.lock does not match train: params " in said
    assert "Run `dvc repro -f -s train`, then `dvc repro`." in said


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("evaluate", marks=pytest.mark.nightly),
        "export",
        pytest.param("verify", marks=pytest.mark.nightly),
    ],
)
def test_a_model_whose_params_differ_from_the_seal_of_train_is_refused(
    project: Project, stage: str
) -> None:
    card = project.path / "artifacts/model/model.json"
    before = card.read_bytes()
    content = json.loads(before)
    content["params"]["label_smoothing"] = 0.1
    try:
        card.chmod(0o644)
        card.write_text(json.dumps(content))
        said = project.shell(f"python -m slipway.stages.{stage}", succeeds=False)
    finally:
        card.write_bytes(before)
    assert (
        "artifacts/model/model.json is not the model of artifacts/seals/train.json: "
        "train.label_smoothing 0.1 -> 0.05" in said
    )


@pytest.mark.nightly(seconds=15)
def test_the_bundle_records_the_params_of_the_runs_and_not_later_edits(project: Project) -> None:
    project.set_value("split.folds", 5)
    project.set_value("train.label_smoothing", 0.2)
    project.shell("python -m slipway.stages.export")
    params = json.loads((project.path / "artifacts/bundle/bundle.json").read_text())["lineage"][
        "params"
    ]
    assert (params["split"]["folds"], params["train"]["label_smoothing"]) == (None, 0.05)
    assert {
        "seed",
        "data",
        "clean",
        "split",
        "precompute",
        "augment",
        "train",
        "evaluate",
        "prune",
        "ensemble",
        "export",
    } == set(params)


@pytest.mark.nightly
def test_a_repeated_stage_writes_identical_seals(project: Project) -> None:
    before = {path.name: path.read_bytes() for path in _seals(project)}
    assert set(before) == {f"{stage}.json" for stage in EDITS}
    project.shell("dvc repro -f -s split")
    assert {path.name: path.read_bytes() for path in _seals(project)} == before


@pytest.mark.nightly
def test_a_dvc_experiment_in_a_temporary_folder_is_sealed(project: Project) -> None:
    assert "Ran experiment" in project.shell(
        "dvc exp run --temp -n sealed -S evaluate.coverage=0.8"
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(text)
    shutil.move(partial, path)
