"""Tests of the strategy `pipeline` on two processes: equal loss, kills, other strategies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.system.errors import ParamsError
from slipway.training.distributed.pipeline import check_stages
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import step_shape
from slipway.training.networks.networks import load_network, read_model_manifest
from tests.project_params import PROJECT
from tests.training.checkpoints.test_other_layouts import EVERY_STEP, change, losses
from tests.training.distributed.test_fully_sharded import epoch_losses
from tests.training.distributed.test_tensor_parallel import trained
from tests.training.networks.test_text_networks import network
from tests.training.real_runs import kill_at_step, run_training, weights_digest
from tests.training.text_projects import write_text_project

TWO: dict[str, Any] = {"strategy": "pipeline", "devices": 2}
RECIPE: dict[str, Any] = {"gradient_clip_norm": 0.5, "l1": 1e-4, "ema_decay": 0.9}


def test_a_pipeline_with_more_stages_than_blocks_is_refused() -> None:
    built = network("small_transformer", num_layers=3)
    check_stages(built, 3)
    with pytest.raises(ParamsError, match=r"4 processes, .* only 3 blocks.* at most 3 processes"):
        check_stages(built, 4)


def test_a_pipeline_refuses_a_network_without_stages_by_name() -> None:
    with pytest.raises(ParamsError, match=r"'hashed_ngrams' has no stages"):
        check_stages(network(), 2)


@pytest.mark.parametrize(
    ("batch_size", "limit", "devices", "micro"),
    [(64, 64, 2, 2), (64, 8, 2, 8), (64, 64, 4, 4), (9, 9, 2, 3), (7, 7, 3, 7)],
)
def test_a_pipeline_step_has_the_fewest_micro_batches_that_fit_and_fill_its_stages(
    batch_size: int, limit: int, devices: int, micro: int
) -> None:
    changes = {
        "strategy": "pipeline",
        "accelerator": "cpu",
        "devices": devices,
        "batch_size": batch_size,
        "max_batch_per_device": limit,
    }
    params = PROJECT.train.model_copy(update=changes)
    shape = step_shape(params, place(params, TrainingHost(0, True, None)))
    assert (shape.num_micro_batches, shape.per_device, shape.world_size) == (micro, batch_size, 1)
    few = params.model_copy(update={"batch_size": 1})
    placement = place(few, TrainingHost(0, True, None))
    with pytest.raises(ParamsError, match="needs as many micro-batches"):
        step_shape(few, placement)


@pytest.mark.process
@pytest.mark.parametrize("num_steps", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_each_pipeline_step_has_the_same_loss_as_on_one_process(
    tmp_path: Path, num_steps: int
) -> None:
    # 72 rows: an epoch is one step, of 4 micro-batches.
    settings: dict[str, Any] = {**RECIPE, "epochs": num_steps}
    one = trained(write_text_project(tmp_path / "one", **settings, strategy="single"))
    two = write_text_project(tmp_path / "two", **settings, **TWO)
    change(two, max_batch_per_device=16)
    trained(two)
    assert len(epoch_losses(two)) == num_steps
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    actual = read_model_manifest(two / "artifacts/model").actual
    assert (actual.strategy, actual.world_size) == ("pipeline", 2)
    expected = load_network(one / "artifacts/model").state_dict()
    found = load_network(two / "artifacts/model").state_dict()
    own, alone = (
        torch.cat([value.flatten() for value in weights.values()]) for weights in (found, expected)
    )
    # A bias of keys changes no answer, so Adam steps along the noise of rounding.
    assert (own - alone).abs().quantile(0.9) < 1e-4
    # Rounding in the average decides about the last bits of the metrics.
    assert np.allclose(losses(two), losses(one), rtol=0, atol=1e-5)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_pipeline_training_resumes_to_the_same_weights(
    tmp_path: Path, precision: str
) -> None:
    arguments = {"width": 32, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.1}
    settings: dict[str, Any] = {
        **(RECIPE | TWO),
        "network_arguments": arguments,
        "precision": precision,
        "epochs": 2,
        "batch_size": 16,
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
        ["ddp", "pipeline", "fsdp", "pipeline"],
        ["pipeline", "tensor_parallel", "pipeline", "ddp"],
    ],
    ids=" ".join,
)
def test_pipeline_and_other_strategies_resume_each_others_checkpoints(
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
