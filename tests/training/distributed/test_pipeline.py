"""Tests of the strategy `pipeline` on two processes: equal loss, kills, other strategies."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from torch import nn

from slipway.system.errors import ParamsError
from slipway.training.distributed.pipeline import check_stages
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import step_shape
from slipway.training.networks.image_networks import ImageNetwork
from slipway.training.networks.networks import read_model_manifest
from tests.project_params import PROJECT
from tests.training.checkpoints.test_other_layouts import losses
from tests.training.conftest import spec, write_project
from tests.training.distributed.divided_cases import (
    require_losses_of_one_process,
    require_resumption_by_each_strategy,
    require_same_weights_after_a_kill,
    trained,
)
from tests.training.distributed.test_fully_sharded import epoch_losses
from tests.training.networks.test_stages import Shrinking, Staged
from tests.training.networks.test_text_networks import network

DOCS = Path(__file__).parents[3] / "docs/how-to/own_network.md"
# The network of the page, as users copy it.
NETS = next(
    dedent(part.partition("```")[0])
    for part in DOCS.read_text(encoding="utf-8").split("```python\n")
    if "before_blocks" in part
)


def test_a_pipeline_with_more_stages_than_blocks_is_refused() -> None:
    built = network("small_transformer", num_layers=3)
    check_stages(built, 3)
    with pytest.raises(ParamsError, match=r"4 processes, .* only 3 blocks.* at most 3 processes"):
        check_stages(built, 4)


def test_a_pipeline_refuses_a_network_without_stages_by_name() -> None:
    with pytest.raises(ParamsError, match=r"'hashed_ngrams' has no stages"):
        check_stages(network(), 2)


def test_a_pipeline_names_what_an_own_network_lacks_or_breaks_of_the_contract() -> None:
    own = spec(name="nets:Net", arguments={})
    with pytest.raises(ParamsError, match=r"no method before_blocks\(\), after_blocks\(\), after"):
        check_stages(ImageNetwork(nn.Flatten(), own), 2)
    check_stages(ImageNetwork(Staged(), own), 2)
    with pytest.raises(ParamsError, match=r"'nets:Net' the block backbone\.blocks\.1 returns"):
        check_stages(ImageNetwork(Shrinking(), own), 2)


@pytest.mark.process
def test_an_own_network_for_images_trains_in_a_pipeline_with_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "network": "nets:Net",
        "network_arguments": {"width": 8},
        "precision": "32-true",
        "epochs": 2,
    }
    found = []
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        project = write_project(tmp_path / strategy, **settings, strategy=strategy, devices=devices)
        (project / "nets.py").write_text(NETS)
        found.append(trained(project))
    one, two = found
    assert np.allclose(epoch_losses(two), epoch_losses(one), rtol=0, atol=1e-5)
    assert np.allclose(losses(two), losses(one), rtol=0, atol=1e-5)
    alone, own = (read_model_manifest(each / "artifacts/model") for each in found)
    assert (own.actual.strategy, own.actual.world_size) == ("pipeline", 2)
    assert own.num_parameters == alone.num_parameters


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
    one, two = require_losses_of_one_process(
        tmp_path, "pipeline", num_steps, max_batch_per_device=16
    )
    # Rounding in the average decides about the last bits of the metrics.
    assert np.allclose(losses(two), losses(one), rtol=0, atol=1e-5)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_pipeline_training_resumes_to_the_same_weights(
    tmp_path: Path, precision: str
) -> None:
    require_same_weights_after_a_kill(tmp_path, "pipeline", precision)


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
    require_resumption_by_each_strategy(tmp_path, strategies)
