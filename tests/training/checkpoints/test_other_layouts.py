"""Several processes resume bit for bit; with another process layout the batches stay the same."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from slipway.system import files
from slipway.training.networks.networks import read_model_manifest
from tests.training.conftest import write_project
from tests.training.forked_runs import kill_after_checkpoint, run_forked
from tests.training.real_runs import kill_at_step, run_training, weights_digest
from tests.training.text_projects import write_text_project

pytestmark = pytest.mark.process
EXACT = {
    "width": 16,
    "blocks": [1, 1],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "normalisation": "group",
}
TRANSFORMER = {"width": 56, "num_layers": 2, "num_heads": 4, "patch": 4, "dropout": 0.0}
EVERY_STEP = {"checkpoint_every_minutes": 1e-9}


@pytest.mark.parametrize(
    ("strategy", "precision", "ema_decay"),
    [
        ("ddp", "32-true", 0.9),
        pytest.param("fsdp", "32-true", 0.9, marks=pytest.mark.nightly),
        pytest.param("fsdp", "bf16-mixed", 0.9, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_1", "bf16-mixed", None, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "16-mixed", 0.9, marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_3", "bf16-mixed", 0.9, marks=pytest.mark.nightly),
    ],
)
def test_two_processes_killed_within_an_epoch_end_with_the_same_weights(
    tmp_path: Path, strategy: str, precision: str, ema_decay: float | None
) -> None:
    # Two accumulated batches a step, and BatchNorm, whose running statistics differ between
    # processes within an epoch.
    settings = {
        "devices": 2,
        "strategy": strategy,
        "precision": precision,
        "epochs": 2,
        "max_batch_per_device": 8,
        "ema_decay": ema_decay,
    }
    whole, killed = (
        write_project(tmp_path / name, **settings, **more)
        for name, more in (("whole", {}), ("killed", EVERY_STEP))
    )
    assert run_training(whole).returncode == 0
    kill_at_step(killed, 5)
    resumed = run_training(killed)
    assert "steps of the next" in resumed.stdout, resumed.stderr
    assert weights_digest(killed) == weights_digest(whole)
    assert (killed / "metrics/train.json").read_text() == (whole / "metrics/train.json").read_text()


def change(project: Path, **train: Any) -> None:
    params = yaml.safe_load((project / "params.yaml").read_text())
    params["train"].update(train)
    files.write_text(project / "params.yaml", yaml.safe_dump(params))


def losses(project: Path) -> list[float]:
    metrics = json.loads((project / "metrics/train.json").read_text())
    return [metrics["train_loss"], metrics["val_loss"]]


def newest_manifest(project: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(
        sorted((project / ".work/train").glob("*/step-*/checkpoint.json"))[-1].read_bytes()
    )
    return manifest


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
def test_switching_from_one_process_to_two_and_back_keeps_the_batches(
    tmp_path: Path, strategy: str
) -> None:
    settings = {
        "network_arguments": EXACT,
        "precision": "32-true",
        "strategy": "single",
        "epochs": 3,
        "warmup_epochs": 1.0,
    }
    whole, moved = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "moved", **settings, **EVERY_STEP),
    )
    assert run_forked(whole)[0] == 0
    assert run_forked(moved, kill_after_checkpoint, 3)[0] == -9
    change(moved, devices=2, strategy=strategy)
    kill_at_step(moved, 6)
    assert [segment["strategy"] for segment in newest_manifest(moved)["segments"]] == [
        "single",
        strategy,
    ]
    assert newest_manifest(moved)["segments"][1]["first_step"] == 3
    change(moved, devices=1, strategy="single")
    code, output = run_forked(moved)
    assert code == 0, output
    note = (
        rf"note      saved by {strategy} on 2 processes with 16 rows a batch and .*, "
        r"resumed by single on 1 process with 32 "
    )
    assert re.search(note, output)
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    assert [segment.strategy for segment in segments] == ["single", strategy, "single"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after"),
    [("deepspeed_stage_2", "deepspeed_stage_2"), ("deepspeed_stage_3", "deepspeed_stage_1")],
)
def test_deepspeed_resumes_with_another_world_size_and_stage(
    tmp_path: Path, before: str, after: str
) -> None:
    settings = {
        "network_arguments": EXACT,
        "precision": "32-true",
        "epochs": 3,
        "warmup_epochs": 1.0,
    }
    whole = write_project(tmp_path / "whole", **settings, strategy="single")
    moved = write_project(tmp_path / "moved", **settings, **EVERY_STEP, strategy=before, devices=2)
    assert run_forked(whole)[0] == 0
    kill_at_step(moved, 4)
    change(moved, devices=1, strategy=after)
    done = run_training(moved)
    assert done.returncode == 0, done.stderr
    note = (
        rf"note      saved by {before} on 2 processes with 16 rows a batch and .*, "
        rf"resumed by {after} on 1 process with 32 "
    )
    assert re.search(note, done.stdout)
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "fsdp", "deepspeed_stage_3", "ddp"],
        ["deepspeed_stage_3", "fsdp", "ddp", "deepspeed_stage_3"],
    ],
    ids=" ".join,
)
def test_a_training_of_two_processes_resumes_under_each_strategy_in_turn(
    tmp_path: Path, strategies: list[str]
) -> None:
    settings = {
        "network_arguments": EXACT,
        "precision": "32-true",
        "epochs": 5,
        "warmup_epochs": 1.0,
        "devices": 2,
        "ema_decay": 0.9,
    }
    whole = write_project(tmp_path / "whole", **settings, strategy="ddp")
    moved = write_project(tmp_path / "moved", **settings, **EVERY_STEP)
    assert run_training(whole).returncode == 0
    for index, strategy in enumerate(strategies):
        change(moved, strategy=strategy)
        if index + 1 < len(strategies):
            kill_at_step(moved, 5 * (index + 1))
    done = run_training(moved)
    assert done.returncode == 0, done.stderr
    assert np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    segments = read_model_manifest(moved / "artifacts/model").segments
    assert [segment.strategy for segment in segments] == strategies


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk as the checkpoint folder of the project `filled`."""
    folder = tmp_path / "filled/.work/train"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True)
    if done.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.nightly(seconds=90)
@pytest.mark.parametrize("strategy", ["deepspeed_stage_3", "fsdp", "tensor_parallel", "pipeline"])
def test_a_training_resumes_exactly_after_a_sharded_checkpoint_filled_the_disk(
    tmp_path: Path, small_disk: Path, strategy: str
) -> None:
    # A checkpoint takes 1 MB.
    is_text = strategy in ("tensor_parallel", "pipeline")
    arguments = TRANSFORMER if is_text else EXACT | {"width": 32}
    settings: dict[str, Any] = {
        "network_arguments": arguments,
        "precision": "32-true",
        "epochs": 2,
        "batch_size": 16 if is_text else 32,
        "devices": 2,
        "strategy": strategy,
    }
    write = write_text_project if is_text else write_project
    whole, filled = (
        write(tmp_path / "whole", **settings),
        write(tmp_path / "filled", **(settings | EVERY_STEP)),
    )
    assert run_training(whole).returncode == 0
    failed = run_training(filled)
    assert failed.returncode == 1
    said = failed.stdout + failed.stderr
    assert re.search(r"(disk is full|No space left on device).*Free space", said), said
    saved = [int(path.parent.name[5:13]) for path in small_disk.glob("*/step-*/checkpoint.json")]
    assert len(saved) == 2, "two checkpoints fit"
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    resumed = run_training(filled)
    assert resumed.returncode == 0, resumed.stderr
    lines = (filled / ".work/log/train.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, lines) if event["event"] == "started"]
    assert starts[-1]["resumed_step"] == max(saved)
    assert weights_digest(filled) == weights_digest(whole)


def test_resuming_without_the_optimizer_state_would_change_the_result(tmp_path: Path) -> None:
    settings = {
        "network_arguments": EXACT,
        "precision": "32-true",
        "strategy": "single",
        "epochs": 3,
    }
    whole, moved = (
        write_project(tmp_path / "whole", **settings),
        write_project(tmp_path / "moved", **settings, **EVERY_STEP),
    )
    assert run_forked(whole)[0] == 0
    assert run_forked(moved, kill_after_checkpoint, 6)[0] == -9
    change(moved, max_batch_per_device=16)
    code, output = run_forked(moved, forget_the_optimizer)
    assert code == 0, output
    assert "note      saved by single" in output
    assert not np.allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)


def forget_the_optimizer() -> None:
    from slipway.training.checkpoints import resumption

    resumption._restore_optimizer = lambda *arguments: None
