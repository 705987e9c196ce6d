"""Compares strategies that divide the weights over two processes with one process."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.training.networks.networks import load_network, read_model_manifest
from tests.training.checkpoints.test_other_layouts import EXACT, losses
from tests.training.conftest import ROOT, write_project
from tests.training.real_runs import run_command, run_training
from tests.training.text_projects import write_text_project

pytestmark = pytest.mark.process
TWO = {"strategy": "fsdp", "devices": 2}
RECIPE = {
    "network_arguments": EXACT,
    "precision": "32-true",
    "gradient_clip_norm": 0.5,
    "l1": 1e-4,
    "ema_decay": 0.9,
}


def epoch_losses(project: Path) -> list[float]:
    """Return the training loss of each epoch."""
    lines = (project / "reports/live/plots/metrics/train/loss.tsv").read_text().splitlines()
    return [float(line.split("\t")[1]) for line in lines[1:]]


@pytest.mark.parametrize("num_steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_each_sharded_step_has_the_same_loss_as_on_one_process(
    tmp_path: Path, num_steps: int
) -> None:
    # 150 rows: an epoch is one step.
    settings = {**RECIPE, "batch_size": 128, "epochs": num_steps}
    one = write_project(tmp_path / "one", **settings, strategy="single")
    two = write_project(tmp_path / "two", **settings, **TWO)
    for project in (one, two):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    assert len(epoch_losses(two)) == num_steps
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    actual = read_model_manifest(two / "artifacts/model").actual
    assert (actual.strategy, actual.world_size, actual.parameter_dtype) == ("fsdp", 2, "float32")
    expected = load_network(one / "artifacts/model").state_dict()
    found = load_network(two / "artifacts/model").state_dict()
    assert all(
        torch.allclose(found[name], value, rtol=0, atol=1e-4) for name, value in expected.items()
    )


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_a_divided_transformer_has_the_same_loss_as_on_one_process(
    tmp_path: Path, strategy: str
) -> None:
    # 72 rows: an epoch is one step.
    settings: dict[str, Any] = {"epochs": 20, "ema_decay": 0.9}
    one = write_text_project(tmp_path / "one", **settings, strategy="single")
    two = write_text_project(tmp_path / "two", **settings, strategy=strategy, devices=2)
    for project in (one, two):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    assert len(epoch_losses(two)) == 20
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    # The average is validated and becomes the model.
    assert np.allclose(losses(two), losses(one), rtol=0, atol=1e-5)
    own, alone = (
        torch.cat([value.flatten() for value in load_network(path).state_dict().values()])
        for path in (two / "artifacts/model", one / "artifacts/model")
    )
    # A bias of keys changes no answer, so Adam steps along the noise of rounding.
    assert (own - alone).abs().quantile(0.9) < 1e-4


def test_weights_divided_over_copies_and_within_them_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    # Fused outputs: queries, keys and values of the first, of modernbert's also two wide layers.
    networks = ["small_transformer", "bert", "modernbert", "modernbert-lora-4"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    module = ["-m", "tests.training.distributed.divided_twice", str(tmp_path), *networks]
    done = run_command(ROOT, [sys.executable, "-m", *launcher, *module])
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("equal")]
    assert found == [f"equal {name}" for name in networks]
