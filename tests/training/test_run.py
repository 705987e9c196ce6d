"""Whole trainings run in real processes, as `dvc repro` starts them."""

import errno
import gc
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from slipway.system import files
from slipway.training import assembly
from slipway.training import run as training
from slipway.training.distributed import state_on_disk
from slipway.training.distributed.placement import Placement
from slipway.training.distributed.strategies import trainer_arguments
from slipway.training.job import Job
from slipway.training.networks.networks import build_network, load_network, read_model_manifest
from slipway.training.telemetry.progress import memory_notes
from tests.project_params import PROJECT
from tests.training.conftest import write_project
from tests.training.forked_runs import run_forked
from tests.training.real_runs import (
    AS_ROOT,
    DEEPSPEED,
    TORCHRUN,
    TRAIN,
    kill_after,
    run_command,
    run_training,
    validation_accuracy,
    weights_digest,
)

pytestmark = pytest.mark.process


def test_a_finished_training_leaves_a_model_and_no_checkpoints(project: Path) -> None:
    done = run_command(project)
    assert done.returncode == 0, done.stderr
    card = read_model_manifest(project / "artifacts/model")
    assert card.requested.strategy == "auto"
    assert card.actual.strategy == "single"
    assert load_network(project / "artifacts/model").spec == card.network
    assert [path.name for path in (project / ".work/train").iterdir()] == ["lock"]
    curve = (project / "reports/live/plots/metrics/val/accuracy.tsv").read_text().splitlines()
    assert curve[0] == "step\taccuracy"
    assert len(curve) == 1 + 4
    assert validation_accuracy(project) > 0.9


@pytest.mark.nightly(seconds=18)
def test_a_nonfinite_loss_ends_the_training_with_one_message(tmp_path: Path) -> None:
    ended = run_training(write_project(tmp_path, learning_rate=1e30, warmup_epochs=0.0))
    assert ended.returncode == 1
    assert "error: the loss is not finite in step 2 (epoch 1)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "artifacts").exists()


def test_a_second_training_of_the_same_project_is_refused(project: Path) -> None:
    with files.lock(project / ".work/train/lock", "a training"):
        refused = run_training(project)
    assert refused.returncode == 1
    assert f"already running as process {os.getpid()}" in refused.stderr


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ({"batch_size": 151}, "there are only 150 training rows"),
        ({"warmup_epochs": 4.0}, "expected less than epochs 4"),
        ({"network": "timm/nothing", "network_arguments": {}}, "lacks"),
        ({"precision": "16-mixed"}, "cannot do on the CPU"),
    ],
)
def test_a_user_error_ends_the_training_with_one_message(
    tmp_path: Path, train: dict[str, Any], text: str
) -> None:
    refused = run_training(write_project(tmp_path, **train))
    assert refused.returncode == 1
    assert text in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("strategy", "precision", "offload", "command"),
    [
        pytest.param("ddp", "32-true", None, TRAIN, marks=pytest.mark.nightly),
        ("deepspeed_stage_1", "16-mixed", "optimizer", []),
        pytest.param("deepspeed_stage_2", "bf16-mixed", None, [], marks=pytest.mark.nightly),
        pytest.param(
            "deepspeed_stage_2", "bf16-mixed", "optimizer", DEEPSPEED, marks=pytest.mark.nightly
        ),
        pytest.param("deepspeed_stage_2", "16-mixed", None, TORCHRUN, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_3", "16-mixed", None, [], marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_3", "bf16-mixed", "optimizer", [], marks=pytest.mark.nightly),
        pytest.param(
            "deepspeed_stage_3",
            "16-mixed",
            "optimizer_and_parameters",
            [],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_processes_reach_the_accuracy_of_one_process(
    tmp_path: Path, strategy: str, precision: str, offload: str, command: list[str]
) -> None:
    project = write_project(
        tmp_path, devices=2, strategy=strategy, precision=precision, offload=offload
    )
    done = run_command(project, command) if command else run_training(project)
    assert done.returncode == 0, done.stderr
    actual = read_model_manifest(project / "artifacts/model").actual
    assert (actual.strategy, actual.precision, actual.offload, actual.world_size) == (
        strategy,
        precision,
        offload,
        2,
    )
    assert validation_accuracy(project) > 0.9
    network = load_network(project / "artifacts/model")
    assert {
        value.dtype.is_floating_point and value.dtype.itemsize for value in network.parameters()
    } == {4}


def test_mpirun_starts_two_processes_on_one_node(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    whole, launched = (
        write_project(tmp_path / name, devices=2, epochs=2) for name in ("whole", "launched")
    )
    assert run_training(whole).returncode == 0
    done = run_command(
        launched, [*AS_ROOT, "mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", *TRAIN]
    )
    assert done.returncode == 0, done.stderr
    assert weights_digest(launched) == weights_digest(whole)


def test_a_run_whose_engine_lacks_the_requested_offload_is_refused(tmp_path: Path) -> None:
    project = write_project(
        tmp_path, strategy="deepspeed_stage_2", precision="bf16-mixed", offload="optimizer"
    )
    code, output = run_forked(project, forget_offload)
    assert code == 1
    assert "offload: requested optimizer, actual null" in output


def forget_offload() -> None:
    def forgetful(placement: Placement, *arguments: Any, **named: Any) -> dict[str, Any]:
        return trainer_arguments(replace(placement, offload=None), *arguments, **named)

    setattr(assembly, "trainer_arguments", forgetful)  # noqa: B010


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("fsdp", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_1", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_3", marks=pytest.mark.nightly),
    ],
)
def test_accumulated_gradients_give_the_same_steps_as_whole_batches(
    tmp_path: Path, strategy: str
) -> None:
    exact = {
        "width": 16,
        "blocks": [1, 1],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "group",
    }
    losses = []
    for max_batch in (16, 4):  # 32 rows in a step of two processes: at once, and in four parts
        settings = {
            "strategy": strategy,
            "precision": "32-true",
            "devices": 2,
            "epochs": 2,
            "max_batch_per_device": max_batch,
        }
        project = write_project(tmp_path / str(max_batch), network_arguments=exact, **settings)
        done = run_training(project)
        assert done.returncode == 0, done.stderr
        assert f"x 2 processes x {16 // max_batch} accumulated; 4 steps per epoch" in done.stdout
        metrics = json.loads((project / "metrics/train.json").read_text())
        assert (metrics["processes"], metrics["gpus"]) == (2, 0)
        losses.append([metrics["train_loss"], metrics["val_loss"]])
    assert np.allclose(losses[0], losses[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "offload", "on_disk"),
    [
        pytest.param("deepspeed_stage_2", None, False, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "optimizer", False, marks=pytest.mark.nightly),
        pytest.param(
            "deepspeed_stage_3", "optimizer_and_parameters", False, marks=pytest.mark.nightly
        ),
        ("deepspeed_stage_3", "optimizer_and_parameters", True),
    ],
)
def test_a_killed_deepspeed_training_of_two_processes_resumes_exactly(
    tmp_path: Path, strategy: str, offload: str, on_disk: bool
) -> None:
    settings = {"devices": 2, "strategy": strategy, "precision": "bf16-mixed", "offload": offload}
    (disk := tmp_path / "disk").mkdir()
    whole, killed = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "killed", **settings, offload_path=str(disk) if on_disk else None),
    )
    assert run_training(whole).returncode == 0
    kill_after(killed, "epoch 3/4")
    assert "resumed   after epoch" in run_training(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)
    assert list(disk.iterdir()) == []


@pytest.mark.nightly(seconds=15)
def test_an_offload_path_without_room_ends_the_training_before_its_first_step(
    tmp_path: Path,
) -> None:
    settings = {"devices": 1, "strategy": "deepspeed_stage_3", "precision": "bf16-mixed"}
    project = write_project(tmp_path, offload="optimizer", offload_path=str(tmp_path), **settings)
    code, output = run_forked(project, fill_the_disk)
    assert code == 1
    assert f"cannot be kept in train.offload_path, {tmp_path}: [Errno 28]" in output
    assert "epoch 1/" not in output


@pytest.mark.nightly(seconds=15)
@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", "deepspeed_stage_3", "fsdp"])
def test_no_weight_or_state_is_in_memory_when_the_model_is_written(
    tmp_path: Path, strategy: str
) -> None:
    project = write_project(tmp_path, devices=1, strategy=strategy, precision="bf16-mixed")
    code, output = run_forked(project, print_tensors)
    assert code == 0, output
    found = re.search(r"(\d+) values in tensors of (\d+) weights", output)
    assert found, output
    assert int(found[1]) < int(found[2]) / 4


def print_tensors() -> None:
    """Print the number of values in all tensors before the model is written."""
    write = training.write_model

    def counted(job: Job) -> None:
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        num_values = sum(storage.nbytes() for storage in storages.values()) // 4
        num_weights = build_network(job.spec).num_parameters
        print(f"{num_values} values in tensors of {num_weights} weights")
        write(job)

    training.write_model = counted


def fill_the_disk() -> None:
    def full(tensor: Tensor, folder: Path) -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    setattr(state_on_disk, "_mapped_like", full)  # noqa: B010


def test_weights_sharded_by_zero_3_are_consolidated(tmp_path: Path) -> None:
    wide = {
        "width": 128,
        "blocks": [1, 1],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "batch",
    }  # DeepSpeed leaves below 100,000 values whole
    settings = {
        "devices": 2,
        "strategy": "deepspeed_stage_3",
        "precision": "bf16-mixed",
        "epochs": 1,
        "warmup_epochs": 0.0,
    }
    project = write_project(tmp_path, network_arguments=wide, **settings)
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    network = load_network(project / "artifacts/model")
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    assert (
        read_model_manifest(project / "artifacts/model").num_parameters
        == num_parameters
        > 1_000_000
    )


def test_a_training_killed_after_its_last_epoch_writes_all_results_when_run_again(
    tmp_path: Path,
) -> None:
    whole, killed = (
        write_project(tmp_path / "whole", epochs=2),
        write_project(tmp_path / "killed", epochs=2),
    )
    assert run_training(whole).returncode == 0
    assert run_forked(killed, kill_before_the_model_is_written)[0] == -9
    shutil.rmtree(killed / "reports")  # as DVC does with outputs before it runs a stage
    assert run_training(killed).returncode == 0
    assert weights_digest(killed) == weights_digest(whole)
    written = [
        {path.relative_to(project) for path in project.rglob("reports/**/*.tsv")}
        for project in (whole, killed)
    ]
    assert written[0] == written[1] != set()


def kill_before_the_model_is_written() -> None:
    setattr(training, "write_model", lambda job: os.kill(os.getpid(), 9))  # noqa: B010


def test_two_processes_equal_one_with_group_norm_and_without_dropout(tmp_path: Path) -> None:
    exact = {
        "width": 16,
        "blocks": [1, 1],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "group",
    }
    losses = []
    for devices in (1, 2):
        project = write_project(
            tmp_path / str(devices), devices=devices, network_arguments=exact, epochs=2
        )
        assert run_training(project).returncode == 0
        losses.append(json.loads((project / "metrics/train.json").read_text())["train_loss"])
    assert np.isclose(losses[0], losses[1], rtol=0, atol=1e-5)


def test_rows_that_exceed_the_free_memory_are_noted_at_the_start() -> None:
    rows = PROJECT.train
    blocks = rows.model_copy(update={"shuffle": "blocks", "shuffle_buffer_mib": 2048})
    (note,) = memory_notes(rows, stored=5 << 30, free=1 << 30)
    assert "the training rows take 5.4 GB, more than the 1.1 GB of free memory" in note
    assert "train.shuffle: blocks" in note
    (note,) = memory_notes(blocks, stored=5 << 30, free=1 << 30)
    assert "train.shuffle_buffer_mib is 2,048" in note
    assert memory_notes(blocks, stored=1 << 20, free=1 << 30) == []
    assert memory_notes(rows, stored=1 << 20, free=1 << 30) == []
    assert memory_notes(rows, stored=1 << 40, free=None) == []
