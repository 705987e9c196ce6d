"""Whole trainings on a table run in real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.params import load_params
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.system import files
from slipway.system.errors import IntegrityError
from slipway.training.networks.networks import load_network, read_model_manifest
from tests.packed_tables import write_packed_table
from tests.project_params import of_kind, own_content
from tests.training.real_runs import kill_after, run_training, weights_digest
from tests.training.trees.fitted import ARGUMENTS as TREES

pytestmark = pytest.mark.process
ARGUMENTS = {
    "num_submodels": 4,
    "num_blocks": 2,
    "width": 32,
    "dropout": 0.0,
    "embedding_size": 8,
    "num_bins": 24,
}


def write_project(root: Path, weight: float = 1.0, **train: Any) -> Path:
    content = own_content()
    params = of_kind(content, "table_classification")
    params["train"] |= {
        "network": "tabm",
        "network_arguments": ARGUMENTS,
        "epochs": 2,
        "batch_size": 64,
        "learning_rate": 0.01,
    }
    params["train"] |= {
        "warmup_epochs": 1.0,
        "devices": 1,
        "accelerator": "cpu",
        "precision": "32-true",
    } | train
    root.mkdir(exist_ok=True)
    files.write_text(root / "params.yaml", yaml.dump(params, Dumper=yaml.CSafeDumper))
    write_packed_table(
        root / "data/packed", "table_classification", {"train": 400, "val": 101}, weight=weight
    )
    write_plan(
        root / "data/augmented", plan_from_params(load_params(root / "params.yaml").augment, 7)
    )
    return root


def losses(project: Path) -> tuple[float, float]:
    metrics = json.loads((project / "metrics/train.json").read_text())
    return metrics["train_loss"], metrics["val_loss"]


def test_two_processes_on_a_table_reach_the_loss_of_one_process(tmp_path: Path) -> None:
    one = write_project(tmp_path / "one")
    two = write_project(tmp_path / "two", devices=2, strategy="ddp")
    for project in (one, two):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_zero_3_in_float16_comes_close_to_the_loss_of_float32(tmp_path: Path) -> None:
    one = write_project(tmp_path / "one")
    half = write_project(
        tmp_path / "half", devices=2, strategy="deepspeed_stage_3", precision="16-mixed"
    )
    for project in (one, half):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    assert losses(half) == pytest.approx(losses(one), abs=0.01)


def test_equal_row_weights_change_no_bit_and_all_zero_row_weights_are_refused(
    tmp_path: Path,
) -> None:
    one, four, zero = (
        write_project(tmp_path / str(weight), weight=weight) for weight in (1.0, 4.0, 0.0)
    )
    assert run_training(one).returncode == run_training(four).returncode == 0
    assert weights_digest(one) == weights_digest(four)
    refused = run_training(zero)
    assert refused.returncode == 1
    assert "error: every training row has the weight 0" in refused.stderr


def test_a_killed_training_of_trees_gives_the_same_bytes_when_run_again(tmp_path: Path) -> None:
    trees: dict[str, Any] = {
        "network": "lightgbm",
        "network_arguments": TREES,
        "epochs": 300,
        "keep": "last",
    }
    killed, whole = (
        write_project(tmp_path / name, **trees, label_smoothing=0.0, batch_size=128)
        for name in ("killed", "whole")
    )
    kill_after(killed, "round 150/300")
    assert not (killed / "artifacts/model").exists()
    for project in (killed, whole):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    text = (killed / "artifacts/model/trees.txt").read_bytes()
    assert text == (whole / "artifacts/model/trees.txt").read_bytes()
    manifest = read_model_manifest(killed / "artifacts/model")
    assert manifest.weights_sha256 == files.sha256_bytes(text)
    assert manifest.kept_epoch == text.count(b"\nTree=") == 300
    assert manifest.actual.accelerator == "cpu"


def test_a_model_with_altered_trees_is_refused(tmp_path: Path) -> None:
    trees: dict[str, Any] = {
        "network": "lightgbm",
        "network_arguments": TREES,
        "label_smoothing": 0.0,
        "batch_size": 128,
    }
    project = write_project(tmp_path / "project", **trees)
    assert run_training(project).returncode == 0
    path = project / "artifacts/model/trees.txt"
    path.write_text(path.read_text().replace("leaf_value=", "leaf_value=1", 1))
    with pytest.raises(IntegrityError, match="dvc repro train"):
        load_network(project / "artifacts/model")


def test_automatic_early_stopping_is_printed_and_recorded_as_requested_and_actual(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path / "one", early_stopping_patience="auto", keep="best")
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    assert "  auto    ends 5 epochs after the lowest validation loss\n" in done.stdout
    card = read_model_manifest(project / "artifacts/model")
    assert card.requested.early_stopping_patience == "auto"
    assert card.actual.early_stopping_patience == 5
