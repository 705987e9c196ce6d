"""Tests of the strategy `tensor_parallel` on two processes: equal loss, kills, other strategies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.training.networks.networks import load_network, read_model_manifest
from tests.training.checkpoints.test_other_layouts import EVERY_STEP, change, losses
from tests.training.distributed.test_fully_sharded import epoch_losses
from tests.training.real_runs import kill_at_step, run_training, weights_digest
from tests.training.text_projects import write_text_project

pytestmark = pytest.mark.process
TWO: dict[str, Any] = {"strategy": "tensor_parallel", "devices": 2}
RECIPE: dict[str, Any] = {"gradient_clip_norm": 0.5, "l1": 1e-4, "ema_decay": 0.9}


def trained(project: Path) -> Path:
    done = run_training(project)
    assert done.returncode == 0, done.stdout + done.stderr
    return project


@pytest.mark.parametrize("num_steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_each_tensor_parallel_step_has_the_same_loss_as_on_one_process(
    tmp_path: Path, num_steps: int
) -> None:
    # 72 rows: an epoch is one step.
    settings: dict[str, Any] = {**RECIPE, "epochs": num_steps}
    one = trained(write_text_project(tmp_path / "one", **settings, strategy="single"))
    two = trained(write_text_project(tmp_path / "two", **settings, **TWO))
    assert len(epoch_losses(two)) == num_steps
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    actual = read_model_manifest(two / "artifacts/model").actual
    assert (actual.strategy, actual.world_size) == ("tensor_parallel", 2)
    expected = load_network(one / "artifacts/model").state_dict()
    found = load_network(two / "artifacts/model").state_dict()
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in expected.items()
    }
    own = torch.cat([value.flatten() for value in found.values()])
    alone = torch.cat([value.flatten() for value in expected.values()])
    # A bias of keys changes no answer, so Adam steps along the noise of rounding.
    assert (own - alone).abs().quantile(0.9) < 1e-4


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_tensor_parallel_training_resumes_to_the_same_weights(
    tmp_path: Path, precision: str
) -> None:
    # 4 steps of two accumulated batches an epoch; each rank has to draw the same dropout.
    arguments = {"width": 32, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.1}
    settings: dict[str, Any] = {
        **(RECIPE | TWO),
        "network_arguments": arguments,
        "precision": precision,
        "epochs": 2,
        "batch_size": 16,
        "max_batch_per_device": 8,
    }
    whole = trained(write_text_project(tmp_path / "whole", **settings))
    killed = write_text_project(tmp_path / "killed", **(settings | EVERY_STEP))
    kill_at_step(killed, 5)
    resumed = run_training(killed)
    assert "steps of the next" in resumed.stdout, resumed.stderr
    assert weights_digest(killed) == weights_digest(whole)
    assert (killed / "metrics/train.json").read_text() == (whole / "metrics/train.json").read_text()
    assert read_model_manifest(whole / "artifacts/model").actual.precision == precision


@pytest.mark.nightly(seconds=90)
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "tensor_parallel", "fsdp", "tensor_parallel"],
        ["tensor_parallel", "deepspeed_stage_3", "tensor_parallel", "ddp"],
    ],
    ids=" ".join,
)
def test_tensor_parallel_and_other_strategies_resume_each_others_checkpoints(
    tmp_path: Path, strategies: list[str]
) -> None:
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 16, "devices": 2}
    whole = trained(write_text_project(tmp_path / "whole", **settings, strategy="ddp"))
    moved = write_text_project(tmp_path / "moved", **(settings | EVERY_STEP))
    for index, strategy in enumerate(strategies):
        change(moved, strategy=strategy)
        if index + 1 < len(strategies):
            kill_at_step(moved, 5 * (index + 1))
    trained(moved)
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    assert [segment.strategy for segment in segments] == strategies


def test_a_number_of_processes_that_does_not_divide_the_heads_is_refused_before_a_step(
    tmp_path: Path,
) -> None:
    project = write_text_project(tmp_path, strategy="tensor_parallel", devices=3)
    refused = run_training(project)
    assert refused.returncode == 1
    assert "3 processes cannot equally share the 4 heads" in refused.stderr
    assert "Use 2 or 4 processes" in refused.stderr
    assert not list((project / ".work/train").glob("*/step-*"))
