"""Tests of the strategy `pipeline` on two processes: equal loss, kills, other strategies."""

from pathlib import Path

import numpy as np
import pytest

from slipway.system.errors import ParamsError
from slipway.training.distributed.pipeline import check_stages
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import step_shape
from tests.project_params import PROJECT
from tests.training.checkpoints.test_other_layouts import losses
from tests.training.distributed.divided_cases import (
    require_losses_of_one_process,
    require_resumption_by_each_strategy,
    require_same_weights_after_a_kill,
)
from tests.training.networks.test_text_networks import network


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
