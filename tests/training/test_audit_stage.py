"""The audit, in real processes, finds planted label errors and resumes after a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.system import files
from tests.planted_labels import (
    NGRAMS,
    NO_CHANGES,
    STAGES,
    TABM,
    cancer,
    count_found,
    digits,
    messages,
    plant,
    run_stage,
    write_project,
)
from tests.training.conftest import ROOT
from tests.training.uncertainty.test_out_of_fold import write_sorted_project

OUTPUTS = ("label_issues.json", "label_issues.html", "label_issues.parquet")
IMAGES: dict[str, Any] = {
    "data": {"task": "image_classification"},
    "audit": {"folds": 3, "epochs": 12},
}
TABLE: dict[str, Any] = {
    "data": {"task": "table_classification", "target_column": "label"},
    "augment": NO_CHANGES,
    "train": TABM,
    "audit": {"folds": 5, "epochs": 15},
}
TEXTS: dict[str, Any] = {
    "data": {
        "task": "text_classification",
        "text_columns": ["text"],
        "target_column": "label",
    },
    "train": NGRAMS,
    "audit": {"folds": 3, "epochs": 5},
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("table", "params"),
    [
        pytest.param(digits, IMAGES, marks=pytest.mark.nightly),
        pytest.param(cancer, TABLE, marks=pytest.mark.nightly(seconds=19)),
        pytest.param(messages, TEXTS, marks=pytest.mark.nightly(seconds=30)),
    ],
    ids=["images", "table", "texts"],
)
def test_the_audit_finds_most_planted_label_errors_and_half_of_its_candidates_are_planted(
    table: Any, params: dict[str, Any], tmp_path: Path
) -> None:
    planted, truth = plant(table(), seed=7)
    write_project(tmp_path, planted, params)
    for stage in STAGES[:-1]:
        run_stage(tmp_path, stage)
    before = digests(tmp_path / "data")
    run_stage(tmp_path, "audit")
    found = count_found(tmp_path, truth)
    assert found.planted > 0.6 * len(truth)
    assert found.precision >= 0.5
    assert found.recall >= 0.8
    assert found.suggested >= 0.9 * found.right
    assert digests(tmp_path / "data") == before  # nothing is relabelled
    split = read_table(tmp_path / "data/split/rows.parquet", SPLIT_ROWS)
    audited = pq.read_table(tmp_path / "reports/label_issues.parquet")["id"].to_pylist()
    assert sorted(audited) == sorted(
        row["id"] for row in split.to_pylist() if row["split"] != "test"
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        path.as_posix(): files.sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.nightly
def test_a_killed_audit_keeps_its_finished_folds_and_gives_the_same_result(
    tmp_path: Path,
) -> None:
    whole, killed = (write_audited_project(tmp_path / name) for name in ("whole", "killed"))
    run_stage(whole, "audit")
    kill_after(killed, "fold 2/3  epoch 1/2")
    assert not (killed / "reports").exists()
    assert "fold 1/3  was finished before" in run_stage(killed, "audit")
    for name in OUTPUTS:
        assert (killed / "reports" / name).read_bytes() == (
            whole / "reports" / name
        ).read_bytes(), name
    assert [path.name for path in (killed / ".work/audit").iterdir()] == ["lock"]


@pytest.mark.nightly
def test_an_audit_with_other_params_ignores_the_folds_of_a_killed_one(tmp_path: Path) -> None:
    project = write_audited_project(tmp_path)
    kill_after(project, "fold 2/3  epoch 1/2")
    set_params(project, {"train": {"learning_rate": 0.02}})
    assert "was finished before" not in run_stage(project, "audit")


@pytest.mark.process
def test_audit_without_folds_loads_neither_torch_nor_cleanlab_and_reports_that(
    tmp_path: Path,
) -> None:
    project = write_audited_project(tmp_path)
    set_params(project, {"audit": {"folds": None}})
    code = (
        "import sys, runpy; runpy.run_module('slipway.stages.audit', run_name='__main__'); "
        "print(sorted({'torch', 'cleanlab', 'sklearn'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert json.loads((project / "reports/label_issues.json").read_text()) == {
        "requested": False,
        "folds": 0,
    }
    assert sorted(path.name for path in (project / "reports").iterdir()) == sorted(OUTPUTS)


def write_audited_project(root: Path) -> Path:
    write_sorted_project(root)
    set_params(root, {"audit": {"folds": 3, "epochs": 2}})
    return root


def set_params(project: Path, changes: dict[str, dict[str, Any]]) -> None:
    yaml = YAML(typ="safe", pure=True)
    content = yaml.load(project / "params.yaml")
    for section, values in changes.items():
        content[section].update(values)
    yaml.dump(content, project / "params.yaml")


def kill_after(project: Path, text: str) -> None:
    """Start an audit and kill it when it prints `text`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", "-m", "slipway.stages.audit"]
    with subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        seen = any(text in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGKILL)
    assert seen
