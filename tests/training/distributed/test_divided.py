"""Compares one process with four processes that train two copies of a network.

Two processes share each copy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.system.errors import ParamsError
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import step_shape
from slipway.training.networks.networks import load_network, read_model_manifest
from tests.project_params import PROJECT
from tests.training.checkpoints.test_other_layouts import EVERY_STEP, change, losses
from tests.training.distributed.test_fully_sharded import epoch_losses
from tests.training.real_runs import TRAIN, kill_at_step, run_command, weights_digest
from tests.training.text_projects import write_text_project

SHARING = ["tensor_parallel", "pipeline", "fsdp"]
COPIES: dict[str, Any] = {"devices": 4, "model_parallel": 2}
RECIPE: dict[str, Any] = {"gradient_clip_norm": 0.5, "l1": 1e-4, "ema_decay": 0.9}


def trained(project: Path) -> Path:
    # In fresh processes: a warm start has only one process beside the first.
    done = run_command(project)
    assert done.returncode == 0, done.stdout + done.stderr
    return project


@pytest.mark.parametrize("strategy", SHARING)
def test_copies_of_a_network_read_different_rows_but_processes_of_a_copy_the_same(
    strategy: str,
) -> None:
    changes = {"strategy": strategy, "accelerator": "cpu", "devices": 6, "model_parallel": 3}
    params = PROJECT.train.model_copy(update=changes | {"batch_size": 60})
    placement = place(params, TrainingHost(0, True, None))
    assert placement.num_readers == 2
    assert [placement.reader(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert placement.expected.model_parallel == 3
    assert str(placement) == f"{strategy}, 32-true, 6 on cpu in 2 copies of the network"
    shape = step_shape(params, placement)
    assert (shape.per_device, shape.world_size) == (30, 2)
    assert shape.num_micro_batches == (3 if strategy == "pipeline" else 1)
    with pytest.raises(ParamsError, match=r"is 61, which 2 copies of the network cannot share"):
        step_shape(params.model_copy(update={"batch_size": 61}), placement)
    whole = place(params.model_copy(update={"model_parallel": None}), TrainingHost(0, True, None))
    expected = (6, None) if strategy == "fsdp" else (1, 6)
    assert (whole.num_readers, whole.model_parallel) == expected


def test_a_batch_with_fewer_rows_than_pipeline_processes_is_refused() -> None:
    changes = {"strategy": "pipeline", "accelerator": "cpu", "devices": 4, "model_parallel": 2}
    params = PROJECT.train.model_copy(update=changes | {"batch_size": 2})
    with pytest.raises(ParamsError, match=r"as many micro-batches\. Use 4 or more"):
        step_shape(params, place(params, TrainingHost(0, True, None)))


@pytest.mark.nightly(seconds=120)
@pytest.mark.parametrize("strategy", SHARING)
def test_each_step_of_two_divided_copies_has_the_same_loss_as_on_one_process(
    tmp_path: Path, strategy: str
) -> None:
    # 72 rows: an epoch is one step, of two accumulated or four micro-batches in each copy.
    settings: dict[str, Any] = {**RECIPE, "epochs": 20}
    one = trained(write_text_project(tmp_path / "one", **settings, strategy="single"))
    four = write_text_project(tmp_path / "four", **settings, strategy=strategy, **COPIES)
    change(four, max_batch_per_device=8 if strategy == "pipeline" else 16)
    trained(four)
    assert len(epoch_losses(four)) == 20
    assert np.allclose(epoch_losses(four), epoch_losses(one), rtol=0, atol=1e-5)
    assert np.allclose(losses(four), losses(one), rtol=0, atol=1e-5)
    manifest = read_model_manifest(four / "artifacts/model")
    actual, (segment,) = manifest.actual, manifest.segments
    assert (actual.strategy, actual.world_size, actual.model_parallel) == (strategy, 4, 2)
    assert (segment.world_size, segment.model_parallel) == (4, 2)
    own, alone = (
        torch.cat([value.flatten() for value in load_network(path).state_dict().values()])
        for path in (four / "artifacts/model", one / "artifacts/model")
    )
    # A bias of keys changes no answer, so Adam steps along the noise of rounding.
    assert (own - alone).abs().quantile(0.9) < 1e-4


@pytest.mark.nightly(seconds=150)
@pytest.mark.parametrize("strategy", SHARING)
def test_a_killed_training_of_divided_copies_resumes_to_the_same_weights(
    tmp_path: Path, strategy: str
) -> None:
    arguments = {"width": 32, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.1}
    settings: dict[str, Any] = {
        **(RECIPE | COPIES),
        "strategy": strategy,
        "network_arguments": arguments,
        "epochs": 2,
        "batch_size": 16,
        "max_batch_per_device": 4,
    }
    whole = trained(write_text_project(tmp_path / "whole", **settings))
    killed = write_text_project(tmp_path / "killed", **(settings | EVERY_STEP))
    kill_at_step(killed, 5, TRAIN)
    resumed = run_command(killed)
    assert "steps of the next" in resumed.stdout, resumed.stderr
    assert weights_digest(killed) == weights_digest(whole)
    assert (killed / "metrics/train.json").read_text() == (whole / "metrics/train.json").read_text()


@pytest.mark.nightly(seconds=200)
@pytest.mark.parametrize(
    "layouts",
    [
        [
            {"strategy": "tensor_parallel", **COPIES},
            {"strategy": "tensor_parallel", "devices": 4, "model_parallel": None},
            {"strategy": "pipeline", **COPIES},
            {"strategy": "ddp", "devices": 2, "model_parallel": None},
        ],
        [
            {"strategy": "single", "devices": 1, "model_parallel": None},
            {"strategy": "fsdp", **COPIES},
            {"strategy": "ddp", "devices": 2, "model_parallel": None},
            {"strategy": "fsdp", **COPIES},
        ],
        [
            {"strategy": "fsdp", "devices": 4, "model_parallel": None},
            {"strategy": "fsdp", **COPIES},
            {"strategy": "tensor_parallel", **COPIES},
            {"strategy": "fsdp", **COPIES},
        ],
        [
            {"strategy": "fsdp", **COPIES},
            {"strategy": "fsdp", "devices": 2, "model_parallel": None},
            {"strategy": "fsdp", **COPIES},
            {"strategy": "single", "devices": 1, "model_parallel": None},
        ],
    ],
    ids=["copies", "from-single", "from-fsdp", "to-single"],
)
def test_other_meshes_and_strategies_resume_a_checkpoint_of_divided_copies(
    tmp_path: Path, layouts: list[dict[str, Any]]
) -> None:
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 16}
    whole = trained(write_text_project(tmp_path / "whole", **settings, strategy="single"))
    moved = write_text_project(tmp_path / "moved", **(settings | EVERY_STEP))
    for index, layout in enumerate(layouts):
        change(moved, **layout)
        if index + 1 < len(layouts):
            kill_at_step(moved, 5 * (index + 1), TRAIN)
    trained(moved)
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    found = [(segment.strategy, segment.model_parallel) for segment in segments]
    all_share = {"tensor_parallel": 4}  # without `model_parallel`
    assert found == [
        (each["strategy"], each["model_parallel"] or all_share.get(each["strategy"]))
        for each in layouts
    ]
