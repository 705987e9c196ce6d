"""Trainings of ensembles in real processes train each member once, and survive a kill."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from slipway.config.ensemble import members_of
from slipway.config.params import load_params
from slipway.system import files
from slipway.system.errors import DataError
from slipway.training.ensemble_run import check_folds
from slipway.training.job import LeftOut, open_data
from slipway.training.networks.networks import load_network, read_model_manifest
from tests.training.real_runs import kill_after, run_training
from tests.training.test_table_runs import write_project
from tests.training.trees.fitted import ARGUMENTS as TREES

pytestmark = pytest.mark.process
TREES_MEMBER = {"train": {"network": "lightgbm", "network_arguments": TREES, "epochs": 30}}


def set_members(
    project: Path,
    members: list[dict[str, Any]],
    method: str = "greedy",
    student: dict[str, Any] | None = None,
    folds: int | None = None,
) -> None:
    content = yaml.safe_load((project / "params.yaml").read_text())
    folds = 2 if method == "stack" else folds
    content["ensemble"] = {
        "method": method,
        "folds": folds,
        "members": members,
        "student": student,
    }
    files.write_text(project / "params.yaml", yaml.safe_dump(content))


def test_a_killed_ensemble_resumes_and_adding_a_member_trains_only_that_member(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path / "project", label_smoothing=0.0)
    set_members(project, [TREES_MEMBER, {}])
    kill_after(project, "member    2")
    set_members(project, [TREES_MEMBER, {}, TREES_MEMBER | {"seed": 8}])
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    assert "1 lightgbm, seed 7: trained before" in done.stdout
    assert done.stdout.count("trained before") == 1
    manifest = read_model_manifest(project / "artifacts/model")
    network = load_network(project / "artifacts/model")
    assert network.spec == manifest.network
    report = json.loads((project / "metrics/train.json").read_text())["ensemble"]
    members = report["members"].values()
    assert sum(member["weight"] for member in members) == pytest.approx(1)
    assert len(members) == 3


def test_an_altered_member_is_retrained_but_the_finished_folds_of_a_stack_are_not(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path / "project", label_smoothing=0.0)
    other = TREES_MEMBER | {"seed": 8}
    set_members(project, [TREES_MEMBER, other], "stack")
    first = run_training(project)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("out of fold") == 2
    expected = files.sha256_file(project / "artifacts/model/weights.safetensors")
    path = next((project / ".work/members").glob("*/model/trees.txt"))
    path.write_text(path.read_text().replace("leaf_value=", "leaf_value=1", 1))
    done = run_training(project)
    assert done.stdout.count("trained before") == 1
    assert done.stdout.count("was finished before") == 4
    assert files.sha256_file(project / "artifacts/model/weights.safetensors") == expected
    arguments = read_model_manifest(project / "artifacts/model").network.arguments
    assert arguments["method"] == "stack"
    assert len(arguments["bias"]) == 2


@pytest.mark.nightly(seconds=60)
def test_a_killed_student_resumes_to_the_same_weights_and_is_served_if_configured(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path / "project", label_smoothing=0.0)
    student = {"seed": 9, "temperature": 2.0, "soft_fraction": 0.8, "served": False}
    set_members(project, [TREES_MEMBER, TREES_MEMBER | {"seed": 8}], "average", student)
    kill_after(project, "member    student")
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained before") == 2
    model = project / "artifacts/model"
    assert read_model_manifest(model).network.name == "ensemble"
    student_file = files.sha256_file(model / "student/weights.safetensors")
    assert "student tabm, seed 9" in done.stdout

    set_members(
        project, [TREES_MEMBER, TREES_MEMBER | {"seed": 8}], "average", student | {"served": True}
    )
    served = run_training(project)
    assert served.stdout.count("trained before") == 3
    assert files.sha256_file(model / "weights.safetensors") == student_file
    assert load_network(model / "ensemble").spec.name == "ensemble"
    assert load_network(model).spec.name == "tabm"
    assert read_model_manifest(model).seed == 7  # of params.yaml, with which it is compared
    report = json.loads((project / "metrics/train.json").read_text())
    assert report["val_loss"] == pytest.approx(report["ensemble"]["student"]["val_loss"], rel=1e-4)

    shutil.rmtree(project / ".work")
    again = run_training(project)
    assert again.stdout.count("trained before") == 0
    assert files.sha256_file(model / "weights.safetensors") == student_file


@pytest.mark.nightly(seconds=40)
def test_members_that_leave_out_different_folds_train_on_different_rows(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", label_smoothing=0.0)
    members = [TREES_MEMBER | {"without_fold": fold} for fold in (0, 1)]
    set_members(project, members, "average", folds=2)
    first = run_training(project)
    assert first.returncode == 0, first.stderr
    assert "1 lightgbm, seed 7, without fold 0" in first.stdout
    digests = {
        read_model_manifest(path).weights_sha256
        for path in (project / ".work/members").glob("*/model")
    }
    assert len(digests) == 2
    set_members(project, members, "average", folds=3)
    again = run_training(project)
    assert again.stdout.count("trained before") == 0


@pytest.mark.unit
def test_a_left_out_fold_with_all_rows_of_a_class_is_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", label_smoothing=0.0)
    set_members(project, [{"without_fold": 0}, {"without_fold": 1}], "average", folds=2)
    params = load_params(project / "params.yaml")
    members = members_of(params.ensemble, params.seed, params.train)
    data = open_data(project / "data/packed", project / "data/augmented", verify=False)
    check_folds(params, members, data)
    rows = data.train[0]
    is_low = ~LeftOut(1, 2, params.seed).keeps(rows.keys) & (np.arange(len(rows)) % 2 == 0)
    rows = replace(rows, targets=is_low.astype(np.float64))  # only rows of fold 1 are "low"
    with pytest.raises(
        DataError, match=r"members\[1\] is trained without fold 1 of 2.*'low'.*Raise ensemble.folds"
    ):
        check_folds(params, members, replace(data, train=[rows]))
