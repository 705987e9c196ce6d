"""Cases that every strategy must pass which divides one copy of a network between processes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipway.training.networks.networks import load_network, read_model_manifest
from tests.training.checkpoints.test_other_layouts import EVERY_STEP, change, losses
from tests.training.distributed.test_fully_sharded import epoch_losses
from tests.training.real_runs import kill_at_step, run_training, weights_digest
from tests.training.text_projects import write_text_project

RECIPE: dict[str, Any] = {"gradient_clip_norm": 0.5, "l1": 1e-4, "ema_decay": 0.9}


def trained(project: Path) -> Path:
    done = run_training(project)
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def require_losses_of_one_process(
    folder: Path, strategy: str, num_steps: int, **changes: Any
) -> tuple[Path, Path]:
    """Compare each step on two processes with one process; return both projects.

    `changes` to params.yaml are made for the two processes only. An epoch is one step of 72 rows.
    """
    settings: dict[str, Any] = {**RECIPE, "epochs": num_steps}
    one = trained(write_text_project(folder / "one", **settings, strategy="single"))
    two = write_text_project(folder / "two", **settings, strategy=strategy, devices=2)
    change(two, **changes)
    trained(two)
    assert len(epoch_losses(two)) == num_steps
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    actual = read_model_manifest(two / "artifacts/model").actual
    assert (actual.strategy, actual.world_size) == (strategy, 2)
    alone, own = (load_network(each / "artifacts/model").state_dict() for each in (one, two))
    assert {name: value.shape for name, value in own.items()} == {
        name: value.shape for name, value in alone.items()
    }
    difference = torch.cat([(own[name] - alone[name]).flatten() for name in alone])
    # A bias of keys changes no answer, so Adam steps along the noise of rounding.
    assert difference.abs().quantile(0.9) < 1e-4
    return one, two


def require_same_weights_after_a_kill(
    folder: Path, strategy: str, precision: str, **more: Any
) -> None:
    """Kill a training in its second epoch, and compare it with one that was not killed."""
    arguments = {"width": 32, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.1}
    settings: dict[str, Any] = {
        **RECIPE,
        "strategy": strategy,
        "devices": 2,
        "network_arguments": arguments,
        "precision": precision,
        "epochs": 2,
        "batch_size": 16,
        **more,
    }
    whole = trained(write_text_project(folder / "whole", **settings))
    killed = write_text_project(folder / "killed", **(settings | EVERY_STEP))
    kill_at_step(killed, 5)
    resumed = run_training(killed)
    assert "steps of the next" in resumed.stdout, resumed.stderr
    assert weights_digest(killed) == weights_digest(whole)
    assert (killed / "metrics/train.json").read_text() == (whole / "metrics/train.json").read_text()
    assert read_model_manifest(whole / "artifacts/model").actual.precision == precision


def require_resumption_by_each_strategy(folder: Path, strategies: list[str]) -> None:
    """Kill a training every five steps, and let the next strategy resume it."""
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 16, "devices": 2}
    whole = trained(write_text_project(folder / "whole", **settings, strategy="ddp"))
    moved = write_text_project(folder / "moved", **(settings | EVERY_STEP))
    for index, strategy in enumerate(strategies):
        change(moved, strategy=strategy)
        if index + 1 < len(strategies):
            kill_at_step(moved, 5 * (index + 1))
    trained(moved)
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    assert [segment.strategy for segment in segments] == strategies
