"""Tests of training on a GPU: fp16 with every strategy, resuming, and outputs as on the CPU."""

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from slipway.config.params import load_params
from slipway.profiling.measured_run import MeasuredRun, ProfiledProject
from slipway.training.networks.networks import load_network, read_model_manifest
from slipway.training.uncertainty.prediction import predict
from tests.training.conftest import split_of, write_project
from tests.training.real_runs import (
    TRAIN,
    kill_after,
    run_command,
    validation_accuracy,
    weights_digest,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
# Wide enough that ZeRO-3 shares its weights out: it leaves parameters below 100,000 values whole.
WIDE = {
    "width": 128,
    "blocks": [1, 1],
    "dropout": 0.1,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
ON_GPU = {"accelerator": "gpu", "network_arguments": WIDE, "learning_rate": 0.002}
STRATEGIES = ["single", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_reaches_the_accuracy_of_float32_with_every_strategy(
    tmp_path: Path, strategy: str, num_gpus: int
) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed, {torch.cuda.device_count()} found")
    if strategy == "single" and num_gpus > 1:
        pytest.skip("strategy single is one process")
    project = write_project(
        tmp_path, strategy=strategy, precision="16-mixed", devices=num_gpus, epochs=8, **ON_GPU
    )
    done = run_command(project)
    assert done.returncode == 0, done.stderr
    actual = read_model_manifest(project / "artifacts/model").actual
    dtype = "float16" if strategy.startswith("deepspeed") else "float32"
    assert (actual.strategy, actual.precision, actual.accelerator) == (strategy, "16-mixed", "gpu")
    assert (actual.world_size, actual.parameter_dtype) == (num_gpus, dtype)
    assert validation_accuracy(project) > 0.9
    assert {value.dtype for value in load_network(project / "artifacts/model").parameters()} == {
        torch.float32
    }


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        ("deepspeed_stage_1", "optimizer"),
        ("deepspeed_stage_2", "optimizer"),
        ("deepspeed_stage_3", "optimizer"),
        ("deepspeed_stage_3", "optimizer_and_parameters"),
    ],
)
def test_a_killed_training_with_offload_resumes_to_the_same_weights(
    tmp_path: Path, strategy: str, offload: str, precision: str
) -> None:
    settings = {
        "strategy": strategy,
        "offload": offload,
        "precision": precision,
        "epochs": 8,
        **ON_GPU,
    }
    whole, killed = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "killed", **settings),
    )
    done = run_command(whole)
    assert done.returncode == 0, done.stderr
    actual = read_model_manifest(whole / "artifacts/model").actual
    assert (actual.strategy, actual.offload, actual.accelerator) == (strategy, offload, "gpu")
    assert validation_accuracy(whole) > 0.9
    kill_after(killed, "epoch 4/8", TRAIN)
    assert "resumed   after epoch" in run_command(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)


def test_auto_is_single_bfloat16_on_one_gpu_and_zero_2_float16_on_several(
    tmp_path: Path,
) -> None:
    num_gpus = torch.cuda.device_count()
    auto = {"accelerator": "auto", "strategy": "auto", "precision": "auto", "devices": "auto"}
    project = write_project(tmp_path, batch_size=8 * num_gpus, **{**ON_GPU, **auto})
    done = run_command(project)
    assert done.returncode == 0, done.stderr
    actual = read_model_manifest(project / "artifacts/model").actual
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if num_gpus == 1:
        expected = ("single", "bf16-mixed" if has_bfloat16 else "16-mixed")
    else:
        expected = ("deepspeed_stage_2", "16-mixed")
    assert (actual.strategy, actual.precision, actual.world_size) == (*expected, num_gpus)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_a_timm_network_trains_with_deepspeed(tmp_path: Path, precision: str) -> None:
    if precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU does not compute in bfloat16")
    timm = {"network": "timm/resnet18", "network_arguments": {}}
    project = write_project(
        tmp_path,
        strategy="deepspeed_stage_2",
        precision=precision,
        epochs=1,
        warmup_epochs=0.0,
        **{**ON_GPU, **timm},
    )
    done = run_command(project)
    assert done.returncode == 0, done.stderr
    assert read_model_manifest(project / "artifacts/model").actual.precision == precision


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_float16_training_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, strategy: str
) -> None:
    settings = {"strategy": strategy, "precision": "16-mixed", **ON_GPU}
    whole, killed = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "killed", **settings),
    )
    assert run_command(whole).returncode == 0
    kill_after(killed, "epoch 2/4", TRAIN)
    assert "resumed   after epoch" in run_command(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)


def test_loader_processes_and_pinned_memory_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    digests = set()
    for num_workers in (0, 2):
        project = write_project(
            tmp_path / str(num_workers),
            num_workers=num_workers,
            strategy="single",
            precision="32-true",
            **ON_GPU,
        )
        done = run_command(project)
        assert done.returncode == 0, done.stderr
        digests.add(weights_digest(project))
    assert len(digests) == 1


def test_a_network_gives_nearly_the_same_outputs_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    project = write_project(tmp_path, strategy="single", precision="16-mixed", **ON_GPU)
    assert run_command(project).returncode == 0
    images = split_of(32).inputs
    answers = [
        predict(load_network(project / "artifacts/model"), images, 8, device)
        for device in ("cpu", "cuda")
    ]
    assert np.abs(answers[0] - answers[1]).max() < 1e-5


def test_the_profile_of_a_gpu_training_attributes_nearly_all_of_a_step_to_compute(
    tmp_path: Path,
) -> None:
    large = {
        "width": 768,
        "blocks": [4, 4, 4],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "batch",
    }  # a small network leaves a GPU idle
    settings = {
        **ON_GPU,
        "strategy": "single",
        "precision": "16-mixed",
        "batch_size": 128,
        "network_arguments": large,
    }
    project = write_project(tmp_path, **settings)
    paths = project / "data/packed", project / "data/augmented", project, project / "scratch"
    with MeasuredRun(
        ProfiledProject(load_params(project / "params.yaml"), *paths), "present"
    ) as run:
        run.time_steps()
        rounds = [run.time_steps(synchronised=True) for _ in range(5)]
    shares = [
        (each.parts_ms["forward"] + each.parts_ms["backward"] + each.parts_ms["optimizer"])
        / each.step_ms
        for each in rounds
    ]
    assert statistics.median(shares) >= 0.9
