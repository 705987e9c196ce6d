"""Real trainings with averages, pretrained weights, frozen parts and early stopping, and kills."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from slipway.system import files
from slipway.training.networks.networks import load_network, read_model_manifest
from tests.training.conftest import write_project
from tests.training.real_runs import kill_after, run_training, weights_digest

pytestmark = pytest.mark.process

PLAIN = {
    "width": 16,
    "blocks": [1, 1],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
TIMM = {
    "network": "timm/test_resnet",
    "network_arguments": {},
    "batch_size": 30,
    "learning_rate": 0.003,
}


def _pretrained(root: Path, **train: Any) -> Path:
    """Write a project whose network starts with pretrained weights from a local file."""
    project = write_project(root, pretrained="weights.safetensors", **{**TIMM, **train})
    torch.manual_seed(5)
    safetensors.torch.save_file(
        timm.create_model("test_resnet", num_classes=7).state_dict(),
        project / "weights.safetensors",
    )
    return project


def _metrics(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "metrics/train.json").read_text())
    return found


def _weights(project: Path) -> dict[str, torch.Tensor]:
    return dict(load_network(project / "artifacts/model").state_dict())


RECIPES: dict[str, dict[str, Any]] = {
    "average": {
        "ema_decay": 0.9,
        "network_arguments": {**PLAIN, "stochastic_depth": 0.3, "dropout": 0.1},
    },
    "sgd": {
        "optimizer": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "schedule": "one_cycle",
        "l1": 1e-5,
        "class_weights": "balanced",
    },
    "step": {
        "schedule": "step",
        "step_epochs": 2,
        "step_factor": 0.1,
        "warmup_epochs": 0.0,
        "class_weights": {"above": 1.0, "below": 2.0},
    },
}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(RECIPES["average"], id="average"),
        pytest.param(RECIPES["sgd"], id="sgd", marks=pytest.mark.nightly),
        pytest.param(RECIPES["step"], id="step", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_training_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    whole, killed = (write_project(tmp_path / name, **recipe) for name in ("whole", "killed"))
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    kill_after(killed, "epoch 2/4")
    assert "resumed   after epoch" in run_training(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["auto", "fsdp", "deepspeed_stage_3"])
def test_frozen_parts_and_pretrained_weights_survive_a_kill(tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"freeze_epochs": 2, "unfreeze_epochs": 2, "epochs": 5}
    settings |= {"ema_decay": 0.9, "strategy": strategy, "devices": 1 if strategy == "auto" else 2}
    whole, killed = (_pretrained(tmp_path / name, **settings) for name in ("whole", "killed"))
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    kill_after(killed, "epoch 1/5")
    kill_after(killed, "epoch 3/5")
    assert "resumed   after epoch" in run_training(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("single", "32-true"),
        pytest.param("ddp", "32-true", marks=pytest.mark.nightly),
        pytest.param("fsdp", "32-true", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_1", "32-true", marks=pytest.mark.nightly),
        ("deepspeed_stage_2", "bf16-mixed"),
        pytest.param("deepspeed_stage_3", "32-true", marks=pytest.mark.nightly),
    ],
)
def test_a_frozen_backbone_keeps_its_weights_and_statistics(
    tmp_path: Path, strategy: str, precision: str
) -> None:
    devices = 1 if strategy == "single" else 2
    project = _pretrained(
        tmp_path, freeze_epochs=2, epochs=2, strategy=strategy, precision=precision, devices=devices
    )
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    assert "weights   weights.safetensors, SHA-256" in done.stdout
    given, found = safetensors.torch.load_file(project / "weights.safetensors"), _weights(project)
    # The file is of colours, the pictures are grey.
    body = [
        name
        for name in given
        if not name.startswith("fc.") and given[name].shape == found[f"backbone.{name}"].shape
    ]
    assert all(torch.equal(found[f"backbone.{name}"], given[name]) for name in body)
    card = read_model_manifest(project / "artifacts/model")
    assert card.digests["pretrained"] == files.sha256_file(project / "weights.safetensors")
    assert card.network.mean == pytest.approx([0.5])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_weights_outside_the_frozen_parts_change_in_training(tmp_path: Path, strategy: str) -> None:
    project = _pretrained(tmp_path, freeze_epochs=1, epochs=2, strategy=strategy, devices=2)
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    given, found = safetensors.torch.load_file(project / "weights.safetensors"), _weights(project)
    assert not torch.equal(found["backbone.layer1.0.conv1.weight"], given["layer1.0.conv1.weight"])


@pytest.mark.nightly
def test_changing_the_pretrained_weights_starts_a_new_training(tmp_path: Path) -> None:
    project = _pretrained(tmp_path, epochs=4)
    kill_after(project, "epoch 3/4")
    torch.manual_seed(6)
    safetensors.torch.save_file(
        timm.create_model("test_resnet", num_classes=7).state_dict(),
        project / "weights.safetensors",
    )
    done = run_training(project)
    assert "differs in pretrained" in done.stdout
    assert "resumed   after" not in done.stdout


def test_early_stopping_ends_a_training_at_the_same_epoch_after_a_kill(
    tmp_path: Path,
) -> None:
    # Steps this large make the loss jump about.
    settings = {
        "epochs": 40,
        "early_stopping_patience": 2,
        "learning_rate": 0.1,
        "schedule": "constant",
        "checkpoint_every_epochs": 100,
    }
    whole, killed = (write_project(tmp_path / name, **settings) for name in ("whole", "killed"))
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    card, metrics = read_model_manifest(whole / "artifacts/model"), _metrics(whole)
    assert card.stopped_early is metrics["stopped_early"] is True
    assert card.epochs == card.kept_epoch + 2 < 40
    assert f"stopped   after epoch {card.epochs}, 2 after the lowest validation loss" in done.stdout
    kill_after(killed, f"epoch {card.epochs:>2}/40")
    assert run_training(killed).returncode == 0
    assert weights_digest(killed) == weights_digest(whole)
    assert read_model_manifest(killed / "artifacts/model").epochs == card.epochs


@pytest.mark.parametrize(
    ("strategy", "precision", "tolerance"),
    [
        ("ddp", "32-true", 1e-4),
        pytest.param("fsdp", "32-true", 1e-4, marks=pytest.mark.nightly),
        pytest.param("fsdp", "bf16-mixed", 0.1, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_1", "32-true", 1e-4, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "bf16-mixed", 0.1, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "16-mixed", 0.05, marks=pytest.mark.nightly),
    ],
)
def test_two_processes_reach_the_same_weight_average_as_one_process(
    tmp_path: Path, strategy: str, precision: str, tolerance: float
) -> None:
    settings = {
        "network_arguments": {**PLAIN, "normalisation": "group"},
        "ema_decay": 0.9,
        "epochs": 2,
    }
    one = write_project(tmp_path / "one", **settings)
    two = write_project(
        tmp_path / "two", **settings, strategy=strategy, precision=precision, devices=2
    )
    for project in (one, two):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    expected, found = _weights(one), _weights(two)
    assert (
        max(float((found[name] - value).abs().max()) for name, value in expected.items())
        < tolerance
    )
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert np.isclose(_metrics(two)["val_loss"], _metrics(one)["val_loss"], atol=tolerance)


@pytest.mark.nightly
def test_a_killed_deepspeed_training_resumes_its_average_exactly(tmp_path: Path) -> None:
    settings = {
        "devices": 2,
        "strategy": "deepspeed_stage_2",
        "precision": "bf16-mixed",
        "ema_decay": 0.9,
        "epochs": 3,
    }
    whole, killed = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "killed", **settings),
    )
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    kill_after(killed, "epoch 2/3")
    assert "resumed   after epoch" in run_training(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)


def test_the_final_model_holds_the_moving_average_of_the_weights(tmp_path: Path) -> None:
    plain, averaged = (
        write_project(tmp_path / "plain", keep="last"),
        write_project(tmp_path / "averaged", keep="last", ema_decay=0.99),
    )
    for project in (plain, averaged):
        assert run_training(project).returncode == 0
    assert weights_digest(plain) != weights_digest(averaged)
    assert (
        _metrics(plain)["train_loss"] == _metrics(averaged)["train_loss"]
    )  # the average changes nothing in training
    assert _metrics(plain)["val_loss"] != _metrics(averaged)["val_loss"]
